"""What one step puts on the wire: the collectives planned, no other, and not a byte more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, over_the_group, shard, units, unsynced
from tests.bed.models import OddTransformer, batch, loss
from tests.bed.traffic import Traffic, count_collectives, count_messages

WIDTH, BLOCKS = 64, 3
BLOCK, ROOT = 2 * WIDTH * WIDTH, WIDTH * WIDTH  # parameters; both divide by 4 ranks without padding


class Clean(nn.Module):
    """Shapes without padding, so that the formulas hold as they stand."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _step(model: nn.Module) -> None:
    model(torch.ones(3, WIDTH)).square().mean().backward()


def _second(traffic: Traffic, model: nn.Module, step: Callable[[Any], None] = _step) -> Traffic:
    """The traffic of the second of two equal steps."""
    step(model)
    traffic.clear()
    step(model)
    return traffic


@ranks(2, 4)
@pytest.mark.parametrize("overlaps", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "DEFAULT"])
def test_U43_U44_bytes_of_a_step(front: str, strategy: str, overlaps: bool, world: int) -> None:
    """Two gathers of each block and one of the root, which stays; one reduction of each unit; prefetch
    changes the order and nothing else."""
    with counted(overlaps=overlaps) as traffic:
        plain = Clean()
        model = shard(plain, front, list(plain.blocks), strategy)
        _second(traffic, model)
    root_stays = front != "fully_shard" or strategy != "FULL_SHARD"
    again = 0 if strategy == "SHARD_GRAD_OP" else BLOCKS * BLOCK + (0 if root_stays else ROOT)
    part = 4 * (world - 1) // world if (world - 1) * 4 % world == 0 else 4 * (world - 1) / world
    assert traffic.wire_bytes("all_gather") == (BLOCKS * BLOCK + ROOT + again) * part
    assert traffic.wire_bytes("reduce_scatter") == (BLOCKS * BLOCK + ROOT) * part
    assert traffic.count("all_gather") == (1 if strategy == "SHARD_GRAD_OP" else 2) * BLOCKS + (
        1 if root_stays else 2)
    assert traffic.count("reduce_scatter") == BLOCKS + 1
    assert traffic.count("all_reduce") == 1 and traffic.numel("all_reduce") == 2 * BLOCKS + 1
    assert traffic.count() == traffic.count("all_gather", "reduce_scatter", "all_reduce")


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "flat"])
def test_no_shard_only_reduces(front: str, world: int) -> None:
    with counted() as traffic:
        plain = Clean()
        model = shard(plain, front, list(plain.blocks), "NO_SHARD")
        _second(traffic, model)
    large = [call.numel for call in traffic.calls if call.numel > 2 * BLOCKS + 1]
    assert traffic.count() == traffic.count("all_reduce") == BLOCKS + 2
    assert sorted(large) == sorted([BLOCK] * BLOCKS + [ROOT])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U58_no_sync_reduces_nothing(front: str) -> None:
    with counted() as traffic:
        plain = Clean()
        model = shard(plain, front, list(plain.blocks))
        _step(model)
        with unsynced(model, front):
            traffic.clear()
            _step(model)
            assert traffic.operations == ["all_gather"] * (2 * BLOCKS + 1)
        traffic.clear()
        _step(model)
        assert traffic.count("reduce_scatter") == BLOCKS + 1, "one reduction for both micro-batches"


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_evaluation_gathers_each_unit_once(front: str) -> None:
    with counted() as traffic:
        plain = Clean()
        model = shard(plain, front, list(plain.blocks))
        assert traffic.count() == 0, "sharding itself needs no collective"
        with torch.no_grad():
            _second(traffic, model, lambda m: m(torch.ones(2, WIDTH)))
    assert traffic.operations == ["all_gather"] * (BLOCKS + 1)


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_U13_frozen_parameters_are_not_reduced(front: str, world: int) -> None:
    """Half of block 0 is frozen, all of block 1; the half travels with the rest of its unit."""
    with counted() as traffic:
        plain = Clean()
        plain.blocks[0][0].requires_grad_(False)
        plain.blocks[1].requires_grad_(False)
        model = shard(plain, front, list(plain.blocks))
        _second(traffic, model)
    assert traffic.count("all_gather") == 2 * BLOCKS + 1
    assert traffic.numel("reduce_scatter") == BLOCK // 2 + BLOCK + ROOT
    assert traffic.count("reduce_scatter") == BLOCKS


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C4_U14_dtypes_of_one_unit_travel_together(front: str, world: int) -> None:
    with counted() as traffic:
        wide = nn.Linear(WIDTH, WIDTH, bias=False).double()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), wide)
        wide.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        _second(traffic, shard(model, front))
    bytes_of_parameters = WIDTH * WIDTH * (4 + 8)
    assert traffic.count("all_gather") == traffic.count("reduce_scatter") == 1
    assert traffic.wire_bytes("all_gather") == bytes_of_parameters * (world - 1) / world


@ranks(2)
def test_U86_a_list_of_modules_is_one_unit() -> None:
    with counted() as traffic:
        model = Clean()
        shardwise.fully_shard(list(model.blocks))
        shardwise.fully_shard(model)
        _second(traffic, model)
    gathered = [call.numel for call in traffic.calls if call.operation == "all_gather"]
    assert set(gathered) == {BLOCKS * BLOCK, ROOT}
    assert [call.numel for call in traffic.calls if call.operation == "reduce_scatter"].count(
        BLOCKS * BLOCK) == 1


@ranks(2)
def test_reshard_after_backward_false_gathers_once() -> None:
    """Nothing is gathered again until ``reshard()``, and gradients are reduced all the same."""
    with counted() as traffic:
        model = Clean()
        shard(model, "fully_shard", list(model.blocks), "SHARD_GRAD_OP")
        model.set_reshard_after_backward(False)
        _second(traffic, model)
        assert traffic.count("all_gather") == 0 and traffic.count("reduce_scatter") == BLOCKS + 1
        for module in (*model.blocks, model):
            module.reshard()
        traffic.clear()
        _step(model)
        assert traffic.count("all_gather") == BLOCKS + 1


@ranks(2)
def test_an_unsharded_unit_is_not_gathered_again() -> None:
    """``unshard()`` before the pass, with and without a handle."""
    with counted() as traffic:
        model = Clean()
        shard(model, "fully_shard", list(model.blocks), "DEFAULT")
        _step(model)
        traffic.clear()
        model.blocks[0].unshard()
        handle = model.blocks[1].unshard(async_op=True)
        assert traffic.count("all_gather") == 2
        handle.wait()
        with torch.no_grad():
            model.blocks[1](model.blocks[0](torch.ones(1, WIDTH)))
        assert traffic.count("all_gather") == 2


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C10_clipping_needs_one_reduction(front: str) -> None:
    """However many gradients there are; torch's own function too."""
    with counted() as traffic:
        plain = OddTransformer()
        model = shard(plain, front, plain.units())
        loss(model, batch(0, 0)).backward()
        traffic.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert traffic.operations == ["all_reduce"] and traffic.numel() == 1
        traffic.clear()
        if front == "fully_shard":
            shardwise.clip_grad_norm(model.parameters(), 0.5)
        else:
            model.clip_grad_norm_(0.5)
        assert traffic.operations == ["all_reduce"] and traffic.numel() == 1


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_bytes_of_the_odd_model(front: str, world: int) -> None:
    """With padding, several flat parameters, frozen ones and ties: as the plan says."""
    with counted() as traffic:
        plain = OddTransformer()
        model = shard(plain, front, plain.units())
        _second(traffic, model, lambda m: loss(m, batch(0, 0)).backward())
    found = units(model)
    size = {name: sum(s.layout.flat_numel * s.full.element_size() for s in unit.storages)
            for name, unit in found.items()}
    part = (world - 1) / world
    assert traffic.wire_bytes("all_gather") == part * sum(
        bytes_ * (1 if name == "" else 2) for name, bytes_ in size.items())
    trained = {name: sum(p.numel() for p in _own(OddTransformer(), name, found) if p.requires_grad)
               for name in found}
    reduced = sorted(call.numel for call in traffic.calls if call.operation == "reduce_scatter")
    for numel, least in zip(reduced, sorted(trained.values()), strict=True):
        rows = max(p.shape[1:].numel() for p in OddTransformer().parameters())
        assert least <= numel <= least + world * (rows + 64 + 16)


def _own(model: nn.Module, name: str, found: dict[str, Any]) -> list[nn.Parameter]:
    """The parameters of a unit, without those of the units below it."""
    below = [other for other in found if other != name and other.startswith(name and name + ".")]
    inner = {id(p) for other in below for p in model.get_submodule(other).parameters()}
    return [p for p in model.get_submodule(name).parameters() if id(p) not in inner]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_over_gloo_nothing_travels_but_the_messages_of_the_collectives(front: str, world: int) -> None:
    """Counted at the messages: what the transport is asked for is what travels. No rank says beforehand
    what it is about to do, and nothing goes over the process group itself."""
    with over_the_group():
        plain = Clean()
        model = shard(plain, front, list(plain.blocks))
        _step(model)
        with count_collectives() as traffic, count_messages() as messages:
            _step(model)
    assert not traffic.calls
    assert messages.count(BLOCK // world) == 3 * BLOCKS and messages.count(ROOT // world) == 2
    assert len(messages) == 3 * BLOCKS + 3
