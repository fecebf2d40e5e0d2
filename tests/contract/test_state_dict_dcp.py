"""``torch.distributed.checkpoint`` takes sharded state dicts as they are, across numbers of ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import FullyShardedDataParallel, StateDictType
from shardwise.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.bed import ranks
from tests.bed.checkpoints import adamw, first_ranks, odd, over, train
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
kind_of = FullyShardedDataParallel.state_dict_type
COUNTS = [(2, 1), (2, 3), (2, 4), (4, 2)]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def full(model: nn.Module) -> dict[str, Any]:
    with kind_of(model, FULL):
        return model.state_dict()


def sharded(model: nn.Module) -> dict[str, Any]:
    with kind_of(model, SHARDED):
        return model.state_dict()


@ranks(4, timeout=240)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("front", FRONTS)
def test_another_number_of_ranks(
    front: str, counts: tuple[int, int], rank: int, world: int, tmp_path: Path
) -> None:
    """U73, U75, U74: model and optimizer, read back by more and by fewer ranks."""
    path = _common(tmp_path)
    groups = [first_ranks(count, world) for count in counts]
    if rank < counts[0]:
        model = odd(front, seed=2, **over(front, groups[0]))
        optimizer = adamw(model)
        train(model, optimizer, rank, range(2))
        state = {"model": sharded(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path, process_group=groups[0])
        torch.save((full(model), get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True))), Path(path) / f"whole{rank}")
    dist.barrier()
    if rank < counts[1]:
        model = odd(front, blank=True, **over(front, groups[1]))
        optimizer = adamw(model)
        state = {"model": sharded(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path, process_group=groups[1])
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        expected, expected_optimizer = torch.load(Path(path) / "whole0")
        assert_same_tensors(_common_values(full(model)), _common_values(expected), bitwise=True)
        found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        assert found["param_groups"] == expected_optimizer["param_groups"]
        for fqn, values in expected_optimizer["state"].items():
            assert_same_tensors(found["state"][fqn], values, fqn, bitwise=True)
    dist.barrier()


def _common_values(state: dict[str, Any]) -> dict[str, Tensor]:
    """Without the statistics that each rank has of its own."""
    return {key: value for key, value in state.items() if "running_" not in key}


def _common(path: Path) -> str:
    """Rank 0's folder, on every rank."""
    box = [str(path)]
    dist.broadcast_object_list(box)
    return box[0]


class Shapes(nn.Module):
    """Parameters of any shapes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], start: float) -> None:
        super().__init__()
        sizes = [(shape, float(torch.Size(shape).numel())) for shape in shapes]
        self.values = nn.ParameterList(
            nn.Parameter(start + torch.arange(size).reshape(shape)) for shape, size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([value.sum() * x.sum() for value in self.values]).sum()


shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4)


@ranks(4, timeout=240)
def test_shapes_that_do_not_divide() -> None:
    """U75: every shape, also 0-d, one row, and fewer rows than ranks."""
    any_shapes()


@settings(max_examples=6, derandomize=True, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))
@given(shapes=shapes, counts=st.sampled_from(COUNTS), front=st.sampled_from(FRONTS))
def any_shapes(shapes: list[tuple[int, ...]], counts: tuple[int, int], front: str) -> None:
    """Every rank draws the same examples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = _common(Path(tempfile.mkdtemp()) if rank == 0 else Path())
    groups = [first_ranks(count, world) for count in counts]
    expected = Shapes(shapes, 1.0).state_dict()
    if rank < counts[0]:
        source = shard(Shapes(shapes, 1.0), front, **over(front, groups[0]))
        dcp.save(sharded(source), checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    if rank < counts[1]:
        model = shard(Shapes(shapes, 0.5), front, **over(front, groups[1]))
        state = sharded(model)
        dcp.load(state, checkpoint_id=folder, process_group=groups[1])
        model.load_state_dict(state)
        assert_same_tensors(full(model), expected, bitwise=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


@ranks(2, timeout=180)
@pytest.mark.parametrize("front", FRONTS)
def test_async_save(front: str, rank: int, tmp_path: Path) -> None:
    """U78: what is written is the state at the call, though training goes on."""
    path = _common(tmp_path)
    model = odd(front, seed=2)
    optimizer, expected = adamw(model), full(model)
    expected = {key: value.clone() for key, value in expected.items()}
    written = dcp.async_save({"model": sharded(model)}, checkpoint_id=path)
    train(model, optimizer, rank, range(1))
    written.result()
    dist.barrier()
    state = {"model": sharded(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    assert_same_tensors(_common_values(full(model)), _common_values(expected), bitwise=True)


@ranks(2, timeout=180)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("peer", ["fully_shard", "wrapper", "wrapper_flat"])
def test_checkpoints_of_the_peers(peer: str, front: str, rank: int, tmp_path: Path) -> None:
    """C30: what torch's two libraries wrote with torch.distributed.checkpoint loads as it is."""
    import torch.distributed.checkpoint.state_dict as theirs
    from torch.distributed import fsdp

    path = _common(tmp_path)
    plain, mesh = TinyMLP(seed=2), init_device_mesh("cpu", (2,))
    if peer == "fully_shard":
        fsdp.fully_shard(plain.middle, mesh=mesh)
        model: nn.Module = fsdp.fully_shard(plain, mesh=mesh)
    else:
        model = fsdp.FullyShardedDataParallel(
            plain, device_id=torch.device("cpu"), use_orig_params=peer == "wrapper", device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss(model, points(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    whole_options = theirs.StateDictOptions(full_state_dict=True)
    expected = theirs.get_model_state_dict(model, options=whole_options)
    momentum = theirs.get_optimizer_state_dict(model, optimizer, options=whole_options)["state"]

    twin = TinyMLP()
    ours = shard(twin, front, [twin.inward])
    trained = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    state = {"model": get_model_state_dict(ours), "optim": get_optimizer_state_dict(ours, trained)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(ours, state["model"])
    set_optimizer_state_dict(ours, trained, state["optim"])
    assert_same_tensors(full(ours), expected, bitwise=True)
    found = get_optimizer_state_dict(ours, trained, options=StateDictOptions(full_state_dict=True))["state"]
    for fqn, values in momentum.items():
        assert torch.equal(found[fqn]["exp_avg"], values["exp_avg"]), fqn
