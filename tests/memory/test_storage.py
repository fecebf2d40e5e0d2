"""What a rank holds: shards at rest, two gathered units in use, and nothing that was freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise import memory_of
from shardwise.engine.build import pool_for
from shardwise.engine.gather import Gather
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, shard, units, unsynced
from tests.bed.models import OddTransformer, batch, loss

ALL = ("FULL_SHARD", "SHARD_GRAD_OP")


def _held(model: nn.Module) -> int:
    """Bytes of gathered parameters and of unsent gradients, in all units."""
    return sum(unit.gather.nbytes + unit.collector.nbytes for unit in units(model).values())


def _sharded(front: str, strategy: str = "FULL_SHARD") -> tuple[OddTransformer, Any]:
    plain = OddTransformer()
    return plain, shard(plain, front, plain.units(), strategy)


def _gathered(model: nn.Module) -> set[str]:
    return {name for name, unit in units(model).items() if unit.gather.holds_memory}


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ALL)
def test_freed_units_hold_no_byte(front: str, strategy: str) -> None:
    """After sharding, after an evaluation, and after a backward; in between, what the strategy says."""
    _, model = _sharded(front, strategy)
    assert _held(model) == 0
    with torch.no_grad():
        model(batch(0, 0)[0])
    assert _held(model) == 0
    value = loss(model, batch(0, 0))
    root_stays = front != "fully_shard"
    expected = set(units(model)) if strategy == "SHARD_GRAD_OP" else {""} if root_stays else set()
    assert _gathered(model) == expected
    value.backward()
    assert _held(model) == 0


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_parameters_at_rest_are_this_ranks_part(front: str, world: int) -> None:
    """The whole values are let go at wrap time, and gradients and optimizer state are as small."""
    plain = OddTransformer()
    whole = [StorageWeakRef(p.untyped_storage()) for p in plain.parameters()]
    total = sum(p.numel() * p.element_size() for p in plain.parameters())
    model = shard(plain, front, plain.units())
    assert all(storage.expired() for storage in whole)
    storages = [storage for unit in units(model).values() for storage in unit.storages]
    at_rest = sum(s.shard.numel() * s.shard.element_size() for s in storages)
    aligned = sum(256 * len(unit.storages) for unit in units(model).values())
    assert total / world <= at_rest <= total / world + 2 * aligned + 4096
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    loss(model, batch(0, 0)).backward()
    optimizer.step()
    trained = sum(s.shard.numel() for s in storages if s.trainable)
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert sum(p.grad.numel() for p in model.parameters() if p.grad is not None) == moments <= trained


@ranks(2)
@pytest.mark.parametrize("overlaps", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("front", FRONTS)
def test_at_most_two_units_are_gathered(front: str, overlaps: bool) -> None:
    """Beside the root, which needs its own between the passes, and units around the one that runs."""
    with counted(overlaps=overlaps):
        plain = OddTransformer(blocks=4)
        model = shard(plain, front, plain.blocks, "DEFAULT")
    loss(model, batch(0, 0)).backward()
    with _most_gathered(model) as seen:
        loss(model, batch(0, 0)).backward()
    assert 1 <= max(seen) <= (2 if overlaps else 1)


@contextmanager
def _most_gathered(model: nn.Module) -> Iterator[list[int]]:
    """How many units below the root hold gathered memory, at each gather."""
    inner = [unit for name, unit in units(model).items() if name]
    seen: list[int] = []
    start = Gather.start

    def watched(gather: Gather, tag: int) -> None:
        start(gather, tag)
        seen.append(sum(unit.gather.holds_memory for unit in inner))

    with patch.object(Gather, "start", watched):
        yield seen


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A22_A23_U67_zero_grad_frees_at_once(front: str) -> None:
    """Nothing but the user's parameters holds the gradients; saving a checkpoint does not bring them back."""
    _, model = _sharded(front)
    for _ in range(2):
        loss(model, batch(0, 0)).backward()
        held = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
        assert held and not any(storage.expired() for storage in held)
        model.zero_grad(set_to_none=True)
        assert all(storage.expired() for storage in held)
        model.state_dict()
        assert memory_of(model).gradients == memory_of(model).gathered == 0


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_frozen_parameters_have_no_gradient_memory(front: str) -> None:
    plain = OddTransformer()
    for block in plain.blocks:
        block.attention.requires_grad_(False)
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    model = shard(plain, front, plain.units())
    with unsynced(model, front):
        loss(model, batch(0, 0)).backward()
        assert all(p.grad is None for p in model.parameters())
        planned = sum(unit.collector.plan.numel for unit in units(model).values())
        wanted = sum(p.numel() for n, p in OddTransformer().named_parameters() if n in trained)
        assert wanted <= planned <= 1.25 * wanted, "unsent gradients of trained parameters only"
    loss(model, batch(0, 0)).backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_unsent_gradients_are_held_and_then_let_go(front: str) -> None:
    _, model = _sharded(front)
    with unsynced(model, front):
        loss(model, batch(0, 0)).backward()
        assert sum(unit.gather.nbytes for unit in units(model).values()) == 0
        assert _held(model) > 0
    loss(model, batch(0, 1)).backward()
    assert _held(model) == 0


class _Widths(nn.Module):
    """Units of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64 * k, bias=False) for k in range(1, 13))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).sum() for part in self.parts]).sum()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_memory_kept_for_reuse_is_bounded(front: str) -> None:
    """By a few of the largest unit, however many sizes of units there are."""
    plain = _Widths()
    largest = max(p.numel() * 4 for p in plain.parameters())
    model = shard(plain, front, plain.parts)
    pool = pool_for(torch.device("cpu"))
    pool.clear()
    for _ in range(2):
        model(torch.ones(1, 64)).backward()
        assert pool.nbytes <= 4 * largest
