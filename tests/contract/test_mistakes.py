"""Mistakes that are easily made, and what is said about them (rows C1, C9, C29, U1, U68)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise
from shardwise import FullyShardedDataParallel, checkpoint, fully_shard, summon_full_params
from shardwise.checkpoint.inspection import verify
from shardwise.errors import CheckpointError, LifecycleError, OptionTypeError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard
from tests.bed.models import TinyMLP, loss, points

VISIBLE = pytest.mark.parametrize("front", ["orig", "fully_shard"])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C29_whole_values_may_be_computed_with_while_a_backward_is_due(front: str, rank: int) -> None:
    """In a summon between a forward and its backward; after it rows are refused as before."""
    twin = TinyMLP()
    model: Any = shard(twin, front)
    pending = loss(model, points(rank, 0))
    with summon_full_params(model):
        squares = twin.middle.weight.square().sum().item()
    assert squares == TinyMLP().middle.weight.square().sum().item()
    if front != "flat":
        with pytest.raises(LifecycleError, match=r"full_tensor\(\), whose gradient goes to the rows"):
            twin.middle.weight.square()
    pending.backward()
    with torch.no_grad():
        assert twin.middle.weight.square().dim() == 2 or front == "flat"


@ranks(2)
@VISIBLE
def test_U1_a_parent_before_its_child_is_refused(front: str, rank: int) -> None:
    """The child would be a unit without parameters. What was sharded goes on."""
    twin = TinyMLP()
    model: Any = shard(twin, front)
    with pytest.raises(LifecycleError, match=r"has its parameters already.*TinyMLP.*last"):
        fully_shard(twin.middle) if front == "fully_shard" else FullyShardedDataParallel(twin.middle)
    loss(model, points(rank, 0)).backward()
    assert twin.middle.weight.grad is not None


@ranks(2)
def test_C1_the_same_memory_as_its_conjugate(rank: int) -> None:
    """``p.data = p.data.conj()`` of a complex parameter shows the same place, and is an edit all the same."""
    layer = nn.Linear(3, 4, dtype=torch.complex64)
    nn.init.constant_(layer.weight, 1 + 2j)
    whole = layer.weight.detach().clone()
    fully_shard(layer)
    for _ in range(2):
        layer.weight.data = layer.weight.data.conj()
        with torch.no_grad():
            layer(torch.ones(1, 3, dtype=torch.complex64))
        whole = whole.conj().resolve_conj()
        assert torch.equal(full_parameters(layer, ["weight"])["weight"], whole)


@ranks(2)
def test_C1_the_same_memory_in_another_dtype(rank: int) -> None:
    """A view of the same size of element: noticed on every rank alike, with rows or without."""
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float16)
    fully_shard(layer)
    layer.weight.data = layer.weight.data.view(torch.bfloat16)
    layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.dtype is layer.weight.grad.dtype is torch.bfloat16


def _shared() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


@ranks(2)
def test_C9_an_optimizer_on_one_rank_only(rank: int) -> None:
    """An error on every rank at once, in memory and in files; the next save goes through."""
    model: Any = shard(TinyMLP(), "orig")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = _shared()
    mine = optimizer if rank else None
    with pytest.raises(CheckpointError, match=r"an optimizer on every rank, or on none.*on ranks \[1\]"):
        checkpoint.save_to_memory(model, mine)
    with pytest.raises(CheckpointError, match=r"an optimizer on every rank, or on none.*on ranks \[1\]"):
        checkpoint.save(folder / "one", model, mine)
    with pytest.raises(CheckpointError, match=r"this is no optimizer.*list"):
        checkpoint.save(folder / "one", model, [])  # type: ignore[arg-type]
    checkpoint.save(folder / "one", model, optimizer)
    assert verify(folder / "one").faults == ()
    with pytest.raises(CheckpointError, match="copies of 1 to 2"):
        checkpoint.save_to_memory(model, copies=2.0)  # type: ignore[arg-type]


@ranks(2)
def test_U68_arguments_that_are_mixed_up(rank: int) -> None:
    model: Any = shard(TinyMLP(), "orig")
    for wrong in ((model, "there"), ("there", model.state_dict())):
        with pytest.raises(OptionTypeError, match=r"takes a path and a model.*save\(path, model, optimizer\)"):
            checkpoint.save(*wrong)
        with pytest.raises(OptionTypeError, match=r"checkpoint\.load takes a path and a model"):
            checkpoint.load(*wrong)


@ranks(2)
def test_U68_folders_that_are_no_checkpoint_of_ours(rank: int) -> None:
    """Nothing is called well that nobody has looked at."""
    folder = _shared()
    model = fully_shard(TinyMLP())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    for call in (verify, lambda path: checkpoint.load(path, model)):
        with pytest.raises(CheckpointError, match=r"a folder of torch\.distributed\.checkpoint.*checkpoint convert"):
            call(folder / "dcp")
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="there are no safetensors files"):
        verify(folder / "empty")
    assert shardwise.checkpoint is checkpoint
