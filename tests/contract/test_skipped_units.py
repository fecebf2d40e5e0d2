"""C8, U56: with ``allow_skipped_units`` every rank runs its own units, and training is as unsharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import ConfigurationError, DivergenceError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, shard, transport, units, unsynced
from tests.bed.models import TinyMLP, points
from tests.bed.training import Twins


class Tower(nn.Module):
    """A unit with units inside: what a batch without images skips as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.layers = nn.Linear(5, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.outward = nn.Linear(16, 5)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if recompute else layer(x))
        return self.outward(x)


class Mixture(nn.Module):
    """Experts, a tower, and a head that every rank uses. ``path`` says which, in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.gate = nn.Linear(5, 5)
        # every rank has rows of each
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 5)) for _ in range(4))
        self.tower = Tower()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, path: str = "") -> Tensor:
        x = self.gate(x)
        for name in path:
            x = x + (self.tower(x, name == "c") if name in "tc" else torch.tanh(self.experts[int(name)](x)))
        return self.head(x)


def _inner(model: Any) -> list[nn.Module]:
    return [*model.experts, *model.tower.layers, model.tower, model.head]


def _along(paths: Sequence[str]) -> Any:
    def run(model: Any, rank: int, step: int) -> Tensor:
        return model(points(rank, step)[0], paths[rank % len(paths)]).square().mean()
    return run


def _twins(front: str, place: tuple[int, int], **arguments: Any) -> Twins:
    return Twins(Mixture, front, place, inner=_inner, allow_skipped_units=True, **arguments)


#: each rank's path: other experts, a tower on one rank, other orders, none, twice, recomputed
PATHS = [["0", "1"], ["012", "2"], ["t", ""], ["0t1", "3"], ["01", "10"], ["", "321"], ["00", "0t0"], ["c", "2c"],
         ["0", "0"], ["t0t", "1"]]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("over", ["shared", "group"])
def test_C8_ranks_run_different_units(front: str, strategy: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        twins = _twins(front, (rank, world), strategy=strategy)
    for paths in PATHS:
        twins.run = _along(paths)
        twins.train(1)
    for name, unit in units(twins.model).items():
        assert (unit.gather.nbytes, unit.uses, unit.collector.nbytes) == (0, 0, 0), name


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_C8_four_ranks_run_different_units(front: str, rank: int, world: int) -> None:
    twins = _twins(front, (rank, world))
    for paths in (["0", "1", "2", "3"], ["t", "", "0", "t1"], ["012", "c", "c", "321"]):
        twins.run = _along(paths)
        twins.train(1, rtol=1e-5, atol=1e-6)


@ranks(4)
def test_C8_with_replicas(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twins = _twins("fully_shard", (rank, world), mesh=mesh)
    for paths in (["0", "1", "2", "3"], ["t", "", "0", "t1"]):
        twins.run = _along(paths)
        twins.train(1, rtol=1e-5, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C8_different_units_while_gradients_add_up(front: str, rank: int, world: int) -> None:
    twins = _twins(front, (rank, world))
    for paths in (["0t", "1"], ["2", ""]):
        twins.run = _along(paths)
        with unsynced(twins.model, front):
            twins.backward(0)
        twins.run = _along(paths[::-1])
        twins.backward(1)
        twins.check_gradients()
        twins.update()
        twins.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C8_two_forwards_for_one_backward_and_forwards_without(front: str, rank: int, world: int) -> None:
    twins = _twins(front, (rank, world))
    with torch.no_grad():
        path = "0t" if rank else "1"
        torch.testing.assert_close(twins.model(points(rank, 9)[0], path), twins.plain(points(rank, 9)[0], path))
    twins.backward(0, [_along(["0", "t1"]), _along(["t", "2"])])
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C8_edits_are_seen_by_ranks_that_skip(front: str, rank: int, world: int) -> None:
    """A parameter whose data was replaced travels with its new values, used on this rank or not."""
    twins = _twins(front, (rank, world))
    twins.run = _along(["0", "1"])
    twins.train(1)
    for model in (twins.plain, twins.model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
    twins.run = _along(["1", "0"])
    twins.backward(1)
    twins.check_gradients()


@ranks(2)
def test_C8_a_root_that_some_ranks_do_not_run_is_an_error(rank: int, world: int) -> None:
    model: Any = shard(Mixture(), "fully_shard", allow_skipped_units=True)
    out = model(points(rank, 0)[0], "0")
    with pytest.raises(DivergenceError, match=r"some ranks run a forward while others run a backward.*may skip units"):
        if rank:
            model(points(rank, 1)[0], "0")
        else:
            out.sum().backward()
    dist.barrier()


@ranks(2)
def test_C8_a_failure_on_one_rank_leaves_no_rank_behind(rank: int, world: int) -> None:
    twins = _twins("fully_shard", (rank, world))
    if rank:
        with pytest.raises(ValueError):
            twins.model(points(rank, 0)[0], "0t?")
    else:
        twins.model(points(rank, 0)[0], "12")
    twins.run = _along(["0", "t"])
    twins.train(1)


@ranks(4)
def test_C8_units_on_other_groups_are_refused(rank: int, world: int) -> None:
    model = TinyMLP()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    shardwise.fully_shard(model.inward, mesh=mesh["a"])
    shardwise.fully_shard(model, allow_skipped_units=True)
    with pytest.raises(ConfigurationError, match=r"allow_skipped_units needs one mesh .*for FSDPLinear"):
        model(points(rank, 0)[0])


@ranks(2)
def test_C8_costs_one_agreement_for_each_gather_and_reduction(rank: int, world: int) -> None:
    """And without the option, none."""
    for allowed in (False, True):
        with counted() as traffic:
            model: Any = shard(Mixture(), "orig", (), allow_skipped_units=allowed)
            model(points(rank, 0)[0], "0").sum().backward()
            traffic.clear()
            model(points(rank, 0)[0], "0").sum().backward()
        moved = traffic.count("all_gather", "reduce_scatter")
        assert moved == 2
        # one before each, one at the end of each pass, and one that finds unused parameters
        assert traffic.count("all_reduce") == 1 + (moved + 2 if allowed else 0), traffic.operations
