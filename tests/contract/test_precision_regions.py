"""Regions of another precision: ``full_precision()`` and ``torch.autocast``; rows C31, U36."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import MixedPrecision, MixedPrecisionPolicy, full_precision
from shardwise.errors import LifecycleError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, full_parameters, shard, units, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors
from tests.bed.peers import ddp

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = [name for name, _ in TinyMLP().named_parameters()]


def mixed(front: str) -> dict[str, Any]:
    if front == "fully_shard":
        return {"mp_policy": MixedPrecisionPolicy(BF16, BF16)}
    return {"mixed_precision": MixedPrecision(BF16, BF16, BF16)}


class Trained:
    """A sharded model in bf16 after a step, beside a plain one with the same values."""

    def __init__(self, front: str, rank: int, **arguments: Any) -> None:
        self.rank = rank
        self.inside = TinyMLP()
        self.inside.register_buffer("third", torch.tensor([1 / 3]))
        self.model: Any = shard(self.inside, front, [self.inside.middle], **mixed(front), **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain = TinyMLP()
        with torch.no_grad():
            for name, value in full_parameters(self.model, NAMES).items():
                self.plain.get_parameter(name).copy_(value)

    def backward(self) -> None:
        loss(self.model, points(self.rank, 0)).backward()

    def gradients(self) -> dict[str, Tensor | None]:
        return full_gradients(self.model, NAMES)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("front", FRONTS)
def test_C31_evaluation_in_full_precision(front: str, strategy: str, rank: int) -> None:
    run = Trained(front, rank, strategy=strategy)
    x = points(rank, 1)[0]
    with torch.no_grad():
        low = run.model(x)
        for _ in range(2):
            with full_precision(run.model), full_precision(run.model):
                assert run.inside.third.dtype is FP32
                assert torch.equal(run.inside.third, torch.tensor([1 / 3]))
                assert torch.equal(run.model(x), run.plain(x))
            assert torch.equal(run.model(x), low)
            assert run.inside.third.dtype is (FP32 if front == "fully_shard" else BF16)
    assert low.dtype is BF16


@ranks(2)
def test_C31_without_it_evaluation_is_mixed_like_training(rank: int) -> None:
    run = Trained("orig", rank)
    run.model.eval()
    with torch.no_grad():
        assert run.model(points(rank, 1)[0]).dtype is BF16
    assert run.inside.third.dtype is BF16


@ranks(1, 2)
@pytest.mark.parametrize("front", FRONTS)
def test_C31_gradients_in_full_precision(front: str, rank: int, world: int) -> None:
    run = Trained(front, rank)
    with full_precision(run.model):
        run.backward()
    parts = []
    for r in range(world):
        one = copy.deepcopy(run.plain)
        loss(one, points(r, 0)).backward()
        parts.append({name: p.grad for name, p in one.named_parameters()})
    expected = {name: sum(part[name] for part in parts) / world for name in NAMES}
    assert_same_tensors(run.gradients(), expected, "gradient", bitwise=True)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.backward()
    assert all(p.grad is not None for p in run.model.parameters())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C31_between_forward_and_backward_and_while_gradients_are_unsent(front: str, rank: int) -> None:
    run, twin = Trained(front, rank), Trained(front, rank)
    for one in (run, twin):
        with unsynced(one.model, front):
            one.backward()
        value = loss(one.model, points(rank, 0))
        if one is run:
            with full_precision(run.model), torch.no_grad():
                assert torch.equal(run.model(points(rank, 1)[0]), run.plain(points(rank, 1)[0]))
        value.backward()
    assert_same_tensors(run.gradients(), twin.gradients(), "gradient", bitwise=True)


@ranks(2)
def test_C31_gradients_that_wait_come_along(rank: int) -> None:
    """One micro-batch outside and one inside, both unsent, are one sum."""
    run = Trained("orig", rank)
    with run.model.no_sync():
        run.backward()
        with full_precision(run.model):
            run.backward()
    run.backward()
    assert all(p.grad is not None for p in run.model.parameters())
    once = Trained("orig", rank)
    once.backward()
    expected = {name: 3 * g for name, g in once.gradients().items() if g is not None}
    assert_same_tensors(run.gradients(), expected, "gradient", rtol=2e-2, atol=2e-2)


@ranks(2)
def test_C31_forward_and_backward_on_different_sides(rank: int) -> None:
    run = Trained("orig", rank)
    with full_precision(run.model):
        value = loss(run.model, points(rank, 0))
    with pytest.raises(LifecycleError, match="different sides of full_precision") as caught:
        value.backward()
    assert "backward inside of it, as forward, got outside" in str(caught.value)
    value = loss(run.model, points(rank, 0))
    with full_precision(run.model), pytest.raises(LifecycleError, match="got inside"):
        value.backward()
    run.optimizer.zero_grad()
    run.backward()
    assert all(p.grad is not None for p in run.model.parameters())


@ranks(2)
def test_C31_not_inside_a_forward(rank: int) -> None:
    run = Trained("orig", rank)

    def enter(module: nn.Module, args: Any) -> None:
        with full_precision(run.model):
            pass

    handle = run.inside.middle.register_forward_pre_hook(enter)
    with pytest.raises(LifecycleError, match="cannot change the precision of a unit in use"):
        run.backward()
    handle.remove()
    run.backward()


@ranks(2)
def test_C31_an_exception_leaves_the_model_as_it_was(rank: int) -> None:
    run = Trained("orig", rank)
    with pytest.raises(ZeroDivisionError), full_precision(run.model):
        run.model(points(rank, 1)[0])
        raise ZeroDivisionError
    assert not any(unit.in_full_precision for unit in units(run.model).values())
    run.backward()
    assert run.model(points(rank, 1)[0]).dtype is BF16


@ranks(2)
def test_C31_kept_low_gradients_and_full_ones_take_turns(rank: int) -> None:
    mp = MixedPrecision(BF16, BF16, keep_low_precision_grads=True)
    model = shardwise.FullyShardedDataParallel(TinyMLP(), mixed_precision=mp, use_orig_params=True)
    for dtype in (BF16, FP32, BF16):
        model.zero_grad()
        if dtype is FP32:
            with full_precision(model):
                loss(model, points(rank, 0)).backward()
        else:
            loss(model, points(rank, 0)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}


# ---------------------------------------------------------------------- autocast
def _data(rank: int, number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * number + rank))


def _around(model: Any, rank: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """Each step: a forward without gradients, then two micro-batches, all in one region."""
    losses = []
    for step in range(3):
        with torch.autocast("cpu", BF16):
            with torch.no_grad():
                model(_data(rank, 90 + step))
            for micro in (0, 1):
                value = model(_data(rank, 2 * step + micro)).float().square().mean()
                value.backward()
                losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Casting(TinyMLP):
    """Autocast inside of the model only."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().forward(x)


def _inside(model: Any, rank: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        value = model(_data(rank, step)).float().square().mean()
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@ranks(2)
@pytest.mark.parametrize(("kind", "train"), [(TinyMLP, _around), (Casting, _inside)])
@pytest.mark.parametrize("front", FRONTS)
def test_autocast_as_ddp(
    front: str, kind: type[TinyMLP], train: Callable[..., list[float]], rank: int
) -> None:
    reference = kind()
    peer = ddp(reference)
    expected = train(peer, rank, torch.optim.SGD(reference.parameters(), lr=0.1))
    plain = kind()
    model = shard(plain, front, [plain.middle])
    losses = train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))
    assert losses == expected
    assert all(p.dtype is FP32 for p in model.parameters())
    expected_values = {name: p.detach() for name, p in reference.named_parameters()}
    assert_same_tensors(full_parameters(model, NAMES), expected_values, "parameter", bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_autocast_sees_a_step_in_its_region(front: str, rank: int) -> None:
    """Its cache of casts would show the parameters of before."""
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = _data(rank, 0)
    with torch.autocast("cpu", BF16):
        before = model(x)
        before.float().square().sum().backward()
        optimizer.step()
        after = model(x)
    with torch.autocast("cpu", BF16):
        assert torch.equal(after, model(x))
    assert not torch.equal(before, after)
