"""What FSDPModule offers: unshard, reshard and the set_ methods (rows U43-U45, U49, U57, U58, B13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigurationError, LifecycleError
from tests.bed import ranks
from tests.bed.fronts import full_gradients, shard, transport, units
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points
from tests.bed.training import Twins

INNER = ("inward", "middle", "outward")


def _tiny(strategy: str = "FULL_SHARD") -> Any:
    model: Any = TinyMLP()
    return shard(model, "fully_shard", [model.inward, model.middle, model.outward], strategy)


def _twins(rank: int, world: int, strategy: str = "FULL_SHARD") -> Twins:
    return Twins(TinyMLP, "fully_shard", (rank, world), strategy=strategy,
                 inner=lambda m: [m.inward, m.middle, m.outward])


def _gathered(model: nn.Module) -> list[str]:
    return [name for name, unit in units(model).items() if unit.gather.holds_memory]


@ranks(2)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_unshard_and_reshard(over: str, rank: int, world: int) -> None:
    """Own parameters only; at once, with a handle, twice, before the first forward, without parameters."""
    with transport(over):
        twins = _twins(rank, world)
    model: Any = twins.model
    assert model.middle.unshard() is None and _gathered(model) == ["middle"]
    handle = model.inward.unshard(async_op=True)
    assert isinstance(handle, shardwise.UnshardHandle)
    handle.wait()
    handle.wait()
    model.unshard()
    assert _gathered(model) == ["inward", "middle"], "the root has no parameters of its own"
    model.middle.reshard()
    model.middle.reshard()
    assert _gathered(model) == ["inward"]
    twins.train(2)
    model.inward.unshard(async_op=True)  # nobody waits: forward does
    twins.train(1)
    assert _gathered(model) == []


@ranks(2)
def test_reshard_in_use_is_refused(rank: int) -> None:
    model = _tiny()
    model.middle.register_forward_pre_hook(lambda module, args: model.middle.reshard())
    with pytest.raises(LifecycleError, match=r"cannot reshard a unit that is in use \(unit 'middle'\)"):
        model(points(rank, 0)[0])


@ranks(2)
def test_U49_reshard_after_forward_can_be_changed(rank: int, world: int) -> None:
    twins = _twins(rank, world)
    model: Any = twins.model
    twins.train(1)
    model.set_reshard_after_forward(False)
    value = twins.run(model, rank, 5)
    assert _gathered(model) == list(INNER)
    value.backward()
    model.zero_grad()
    assert _gathered(model) == []
    model.set_reshard_after_forward(True, recurse=False)
    model.middle.set_reshard_after_forward(True)
    value = twins.run(model, rank, 5)
    assert _gathered(model) == ["inward", "outward"]
    value.backward()
    model.zero_grad()
    twins.train(1)


@ranks(2)
def test_reshard_after_backward_can_be_put_off(rank: int, world: int) -> None:
    """For micro-batches: gathered once for all of them, freed in the last one."""
    twins = _twins(rank, world, "SHARD_GRAD_OP")
    model: Any = twins.model
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for number in range(3):
        if number == 2:
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
        model.set_is_last_backward(number == 2)
        twins.backward(number)
        assert _gathered(model) == ([] if number == 2 else list(INNER))
    twins.check_gradients()
    twins.update()
    twins.check_parameters()


@ranks(2)
def test_set_requires_gradient_sync_without_recursion(rank: int, world: int) -> None:
    """One unit adds up unsent while the others reduce."""
    twins = _twins(rank, world)
    model: Any = twins.model
    model.middle.set_requires_gradient_sync(False, recurse=False)
    twins.backward(0)
    assert model.middle.weight.grad is None and model.inward.weight.grad is not None
    model.middle.set_requires_gradient_sync(True)
    twins.backward(1)
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
def test_U57_the_divide_factor(name: str, rank: int, world: int) -> None:
    """A sum, divided by what the user says; for that unit only."""
    twins = _twins(rank, world)
    getattr(twins.model.middle, name)(5.0)
    twins.backward(0)
    for p in twins.plain.middle.parameters():
        p.grad.mul_(world / 5.0)
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_U45_prefetch_lists(over: str, rank: int, world: int) -> None:
    """The named units are gathered when the unit begins, in forward and in backward."""
    with transport(over):
        twins = _twins(rank, world)
    model: Any = twins.model
    model.inward.set_modules_to_forward_prefetch([model.middle, model.outward])
    model.outward.set_modules_to_backward_prefetch([model.middle, model.inward])
    seen: list[list[str]] = []
    handle = model.inward.register_forward_pre_hook(lambda module, args: seen.append(_gathered(model)))
    twins.train(2)
    handle.remove()
    assert all(set(names) == set(INNER) for names in seen) and len(seen) == 2
    assert _gathered(model) == []


@ranks(2)
def test_the_all_reduce_hook_sees_reduced_gradients(rank: int, world: int) -> None:
    twins = _twins(rank, world)
    sizes: list[int] = []

    def hook(chunk: torch.Tensor) -> None:
        sizes.append(chunk.dim())
        chunk.mul_(2)

    twins.model.middle.set_all_reduce_hook(hook)
    twins.backward(0)
    for p in twins.plain.middle.parameters():
        p.grad.mul_(2)
    twins.check_gradients()
    assert sizes == [1]


@ranks(2)
def test_set_is_last_backward_gives_the_same(rank: int, world: int) -> None:
    """Gradients are there at the latest after the last backward."""
    twins = _twins(rank, world)
    for number in range(3):
        twins.model.set_is_last_backward(number == 2)
        twins.backward(number)
    twins.check_gradients()


@ranks(2)
def test_bad_settings_are_refused() -> None:
    model = _tiny()
    cases: list[tuple[Any, str]] = [
        (lambda: model.set_gradient_divide_factor(0.0), "the gradient divide factor must be positive"),
        (lambda: model.set_reshard_after_forward("no"), "reshard_after_forward has the wrong type"),
        (lambda: model.set_modules_to_forward_prefetch(model.middle), "prefetch takes a list"),
        (lambda: model.set_modules_to_backward_prefetch([nn.Linear(1, 1)]), "this module is not sharded"),
    ]
    for call, text in cases:
        with pytest.raises((ConfigurationError, LifecycleError), match=text):
            call()


@ranks(2)
def test_U86_lists_of_modules(rank: int, world: int) -> None:
    """Side by side as one unit; gathered by the first, freed by the last, in any order of use."""
    class Sides(TinyMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.middle(torch.tanh(self.inward(x))).mean()

    twins = Twins(Sides, "fully_shard", (rank, world), inner=lambda m: [[m.inward, m.outward], m.middle])
    assert all(isinstance(m, shardwise.FSDPModule) for m in (twins.model.inward, twins.model.outward))
    assert len({id(u) for u in units(twins.model).values()}) == 3
    twins.train(3)


@ranks(2)
def test_U25_ignored_parameters(rank: int, world: int) -> None:
    """Left as they are; their gradients are this rank's own."""
    plain = TinyMLP()
    weight, value = plain.middle.weight, plain.middle.weight.detach().clone()
    model = shardwise.fully_shard(plain, ignored_params={plain.middle.weight})
    assert model.middle.weight is weight and torch.equal(weight, value) and not shardwise.is_sharded(weight)
    loss(model, points(rank, 0)).backward()
    reference = TinyMLP()
    loss(reference, points(rank, 0)).backward()
    torch.testing.assert_close(weight.grad, reference.middle.weight.grad)
    names = ["inward.weight"]
    for other in range(world):
        if other != rank:
            loss(reference, points(other, 0)).backward()
    expected = reference.inward.weight.grad / world
    torch.testing.assert_close(full_gradients(model, names)["inward.weight"], expected)


@ranks(2)
def test_moving_and_casting_after_sharding(rank: int, world: int) -> None:
    """``to(float64)`` and ``half`` then float: the shards follow; names and objects stay."""
    twins = _twins(rank, world)
    objects = list(twins.model.parameters())
    for model in (twins.plain, twins.model):
        model.to(torch.float64)
    twins.run = lambda m, r, s: m(points(r, s)[0].double()).square().mean()
    twins.train(2)
    assert list(map(id, twins.model.parameters())) == list(map(id, objects))
    assert all(p.dtype is torch.float64 for p in twins.model.parameters())


@ranks(2)
def test_train_and_eval_reach_every_module(rank: int) -> None:
    plain = OddTransformer(blocks=1)
    model = shard(plain, "fully_shard", plain.units())
    model.eval()
    assert not any(m.training for m in model.modules())
    first, second = (loss(model, batch(rank, 0)) for _ in range(2))
    assert torch.equal(first, second)
