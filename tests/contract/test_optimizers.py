"""Any optimizer, made at any time, trains (rows A2, A3, C2, U4, U10, U66, C28, U65)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigurationError, LifecycleError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, full_parameters, shard, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_parameters, assert_same_tensors

VISIBLE = ("orig", "fully_shard")
WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
}
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "AdamW_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=True),
    "AdamW_one_by_one": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=False),
    "AdamW_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def _reference(world: int, make: Make, steps: int = 3) -> nn.Module:
    model = TinyMLP()
    optimizer = make(model.parameters())
    for step in range(steps):
        for rank in range(world):
            (loss(model, points(rank, step)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _check(model: nn.Module, expected: nn.Module) -> None:
    names = [name for name, _ in expected.named_parameters()]
    assert_same_parameters(full_parameters(model, names), expected.named_parameters())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss(model, points(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_A2_equals_the_unsharded_run(front: str, name: str, rank: int, world: int) -> None:
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    _train(model, OPTIMIZERS[name](model.parameters()), rank, range(3))
    _check(model, _reference(world, OPTIMIZERS[name]))


def _before(plain: Any, front: str, rank: int, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = make(plain.parameters())
    return shard(plain, front, [plain.middle]), optimizer


def _after_forward(plain: Any, front: str, rank: int, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Under no_grad, with what stays gathered, and before a backward."""
    model = shard(plain, front, [plain.middle], "SHARD_GRAD_OP")
    with torch.no_grad():
        model(points(rank, 0)[0])
    model(points(rank, 0)[0])
    return model, make(model.parameters())


def _in_forward(plain: Any, front: str, rank: int, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Between forward and backward, from the parameters of the module itself."""
    model = shard(plain, front, [plain.middle])
    value = loss(model, points(rank, 0))
    optimizer = make(model.parameters())
    value.backward()
    optimizer.zero_grad()
    return model, optimizer


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
@pytest.mark.parametrize("when", [_before, _after_forward, _in_forward])
def test_C2_U4_made_at_any_time(front: str, when: Any, rank: int, world: int) -> None:
    model, optimizer = when(TinyMLP(), front, rank, OPTIMIZERS["AdamW_foreach"])
    _train(model, optimizer, rank, range(3))
    _check(model, _reference(world, OPTIMIZERS["AdamW_foreach"]))


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_C2_state_from_before_sharding_is_not_mistaken(front: str, rank: int, world: int) -> None:
    """An optimizer without state yet goes on with its groups: no decay for biases, another rate."""
    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.2},
                                  {"params": vectors[:2], "weight_decay": 0.0, "lr": 3e-2},
                                  {"params": vectors[2:], "weight_decay": 0.0}], lr=1e-2)

    expected = TinyMLP()
    reference = make(expected)
    for step in range(3):
        for other in range(world):
            (loss(expected, points(other, step)) / world).backward()
        reference.step()
        reference.zero_grad()
    for early in (True, False):
        plain = TinyMLP()
        optimizer = make(plain) if early else None
        model = shard(plain, front, [plain.middle])
        _train(model, optimizer or make(model), rank, range(3))
        _check(model, expected)


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_U66_C28_optimizer_in_backward(front: str, rank: int, world: int) -> None:
    """Post-accumulate hooks fire once for each parameter, with the reduced shard as its gradient."""
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    fired: list[int] = []
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        fired.append(id(parameter))
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss(model, points(rank, number)).backward()
    assert sorted(fired) == sorted(3 * [id(p) for p in model.parameters()])
    _check(model, _reference(world, lambda ps: torch.optim.SGD(ps, lr=0.1)))


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_U65_C28_gradient_hooks_fire_and_may_change_it(front: str, rank: int, world: int) -> None:
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    _check(model, _reference(world, lambda ps: torch.optim.SGD(ps, lr=0.3), steps=2))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_either_way(front: str, to_none: bool, rank: int, world: int) -> None:
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        loss(model, points(rank, step)).backward()
        optimizer.step()
    _check(model, _reference(world, lambda ps: torch.optim.SGD(ps, lr=0.1)))


@ranks(2)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("front", VISIBLE)
def test_A2_optimizers_of_whole_parameters_are_refused(front: str, name: str, rank: int) -> None:
    """They would make something else of rows, and say nothing."""
    model = shard(TinyMLP(), front)
    optimizer = WHOLE[name](model.parameters())

    def closure() -> torch.Tensor:
        value = loss(model, points(rank, 0))
        value.backward()
        return value

    with pytest.raises(ConfigurationError, match=rf"torch.optim.{name} .* rows.*OwnerExchange"):
        optimizer.step(closure)
    plain = TinyMLP()
    other = WHOLE[name](plain.parameters())
    value = loss(plain, points(rank, 0))
    value.backward()
    other.step(lambda: value if name == "Muon" else loss(plain, points(rank, 0)))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A2_a_step_between_forward_and_backward(front: str, rank: int) -> None:
    """Torch itself refuses it: what was saved for backward has changed."""
    plain = TinyMLP()
    model = shard(plain, front, [plain.inward, plain.middle], "FULL_SHARD")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, points(rank, 0)).backward()
    late = loss(model, points(rank, 1))
    optimizer.step()
    with pytest.raises(LifecycleError, match=r"changed between a forward and its backward.*optimizer.step\(\)"):
        late.backward()
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="did not finish"):
        loss(model, points(rank, 2)).backward()
    optimizer.step()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A2_zero_grad_of_a_model_forgets_what_is_unsent(front: str, rank: int) -> None:
    model = shard(TinyMLP(), front)
    with unsynced(model, front):
        loss(model, points(rank, 0)).backward()
    model.zero_grad()
    loss(model, points(rank, 1)).backward()
    names = [name for name, _ in TinyMLP().named_parameters()]
    found = full_gradients(model, names)
    model.zero_grad()
    loss(model, points(rank, 1)).backward()
    assert_same_tensors(found, full_gradients(model, names), "gradient", bitwise=True)
