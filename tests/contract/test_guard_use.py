"""Weights touched at rest, and calls that do not enter by forward (rows C27, C29, U5, U6, A14)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import register_fsdp_forward_method
from shardwise.errors import LifecycleError, OptionTypeError
from shardwise.storage.guard import GuardedParameter
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, shard, units
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)


class Encoder(nn.Module):
    """``encode`` uses the root's own layer and an inner unit, without ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.inward = nn.Linear(5, 7)
            self.block = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
            self.outward = nn.Linear(7, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.inward(x)))

    def scaled(self, x: Tensor) -> Tensor:
        return x @ self.inward.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.encode(x))


def _twins(front: str, rank: int, world: int, method: str) -> Twins:
    def run(model: Any, rank: int, step: int) -> Tensor:
        return getattr(model, method)(points(rank, step)[0]).pow(2).mean()

    return Twins(Encoder, front, (rank, world), inner=lambda model: [model.block], run=run)


@ranks(2)
@fronts
def test_C29_a_method_that_was_not_registered(rank: int, world: int, front: str) -> None:
    """Layers called by it gather their unit: right values and gradients, before and after a forward."""
    twins = _twins(front, rank, world, "encode")
    for step in range(2):
        twins.backward(step)
        twins.check_gradients()
        twins.backward(step, [lambda model, rank, step: model(points(rank, step)[0]).sum()])
        twins.check_gradients()
    with torch.no_grad():
        inputs, _ = points(rank, 5)
        torch.testing.assert_close(twins.model.encode(inputs), twins.plain.encode(inputs))  # type: ignore[operator]


@ranks(2)
@fronts
def test_C29_a_registered_method(rank: int, world: int, front: str) -> None:
    """It is an entrance like forward: one gather for all it does, parameters read directly too."""
    with counted() as traffic:
        for method in ("encode", "scaled"):
            twins = _twins(front, rank, world, method)
            register_fsdp_forward_method(twins.model, method)
            for step in range(2):
                twins.backward(step)
                twins.check_gradients()
            traffic.clear()
            with torch.no_grad():
                getattr(twins.model, method)(points(rank, 0)[0])
            assert traffic.count("all_gather") == (2 if method == "encode" else 1)
    with pytest.raises(OptionTypeError, match="no such method"):
        register_fsdp_forward_method(twins.model, "decode")
    plain = Encoder()
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)


@ranks(2)
@fronts
def test_U6_a_child_of_a_unit_called_directly(rank: int, world: int, front: str) -> None:
    """Also before any forward, and by another unit's forward; its signature is the class's."""
    twins = Twins(Encoder, front, (rank, world), inner=lambda model: [model.block],
                  run=lambda model, rank, step: model.block[0](torch.ones(2, 7)).mul(rank + 1).mean())
    twins.backward()
    twins.check_gradients()
    model: Any = twins.model
    assert inspect.signature(model.block[0].forward) == inspect.signature(nn.Linear(1, 1).forward)
    assert units(model)["block"].gather.nbytes == 0


@ranks(2)
@fronts
def test_U6_the_units_own_forward_costs_nothing_more(rank: int, front: str) -> None:
    """While a unit is in use its children show the class's forward."""
    model: Any = shard(TinyMLP(), front)
    seen: list[bool] = []
    model.middle.register_forward_pre_hook(lambda module, _: seen.append("forward" in vars(module)))
    model(points(rank, 0)[0])
    assert seen == [False]
    assert "forward" in vars(model.middle)


_USES = [
    lambda inner, y: y @ inner.outward.weight,
    lambda inner, y: inner.inward.weight.T,
    lambda inner, y: inner.middle.bias.square().sum(),
    lambda inner, y: torch.cat([inner.middle.bias, y[0]]),
    lambda inner, y: y.add(inner.middle.weight),
    lambda inner, y: inner.middle.weight[0],
    lambda inner, y: torch.autograd.grad(y.sum(), [inner.middle.weight]),
]


@ranks(2)
@fronts
def test_C27_use_between_forward_and_backward_is_refused(rank: int, front: str) -> None:
    """With the name, the unit, the state and the cure; the step itself goes on."""
    model: Any = shard(TinyMLP(), front)
    y = model(points(rank, 0)[0])
    for use in _USES:
        _check_refusal(use, model.module if front != "fully_shard" else model, y, rank)
    y.sum().backward()


def _check_refusal(use: Any, inner: Any, y: Tensor, rank: int) -> None:
    with pytest.raises(LifecycleError) as caught:
        use(inner, y)
    for part in ("parameter '", "unit '(root)'", f"rank {rank}", "SHARDED", "summon_full_params",
                 "register_fsdp_forward_method"):
        assert part in str(caught.value)


@ranks(2)
@fronts
def test_C27_what_is_allowed(rank: int, front: str) -> None:
    """Reads, ``detach``, and changes without grad mode; the optimizer sees the cheap class."""
    model = shard(TinyMLP(), front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    y = loss(model, points(rank, 0))
    for parameter in model.parameters():
        assert isinstance(parameter, GuardedParameter)
        assert (parameter.shape, parameter.dtype, parameter.numel(), parameter.grad) is not None
        assert parameter.detach().requires_grad is False
        assert isinstance(parameter, nn.Parameter)
        repr(parameter)
        with torch.no_grad():
            parameter.mul_(1.0)
            parameter.clone()
    y.backward()
    assert not any(isinstance(p, GuardedParameter) for p in model.parameters())
    optimizer.step()
    with torch.no_grad():
        loss(model, points(rank, 0))
    assert not any(isinstance(p, GuardedParameter) for p in model.parameters())


@ranks(1)
@fronts
def test_C27_one_rank_holds_everything(rank: int, front: str) -> None:
    """There is nothing to guard: the weight is whole."""
    model: Any = shard(TinyMLP(), front)
    y = model(points(rank, 0)[0])
    (y.sum() + model.outward.weight.sum()).backward()
