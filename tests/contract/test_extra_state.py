"""What modules keep besides tensors, in state dicts of every kind and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardwise import FullyShardedDataParallel, StateDictType, checkpoint
from shardwise.checkpoint import StateDictOptions, get_model_state_dict, set_model_state_dict
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Counter(nn.Module):
    """A layer that keeps a number and a tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.line, self.count, self.seen = nn.Linear(3, 5), count, torch.arange(3) + count

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": [self.seen]}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.seen = state["count"], state["seen"][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def build(front: str, count: int) -> Any:
    model = nn.Sequential(Counter(count), nn.Linear(5, 2))
    return shard(model, front, [model[0]])


def inner(model: Any) -> Counter:
    return next(module for module in model.modules() if isinstance(module, Counter))


def assert_is(model: Any, count: int) -> None:
    assert inner(model).count == count
    assert torch.equal(inner(model).seen, torch.arange(3) + count)


@ranks(2)
@pytest.mark.parametrize("kind", list(StateDictType), ids=str)
@pytest.mark.parametrize("front", FRONTS)
def test_state_dicts(front: str, kind: StateDictType) -> None:
    """Under the bare module's key, in every kind of state dict."""
    model, other = build(front, 5), build(front, 0)
    with (FullyShardedDataParallel.state_dict_type(model, kind),
          FullyShardedDataParallel.state_dict_type(other, kind)):
        state = model.state_dict()
        assert list(state) == list(nn.Sequential(Counter(0), nn.Linear(5, 2)).state_dict())
        other.load_state_dict(state)
    assert_is(other, 5)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_files(front: str, rank: int, tmp_path: Path) -> None:
    """Each rank's own comes back; where it is the same on all, any number of ranks gets it."""
    model = build(front, 5)
    checkpoint.save(tmp_path / "same", model)
    inner(model).count += rank
    checkpoint.save(tmp_path / "own", model, wait=False)
    inner(model).count = 100
    other = build(front, 0)
    checkpoint.load(tmp_path / "own", other)
    assert inner(other).count == 5 + rank
    bare = nn.Sequential(Counter(0), nn.Linear(5, 2))
    checkpoint.load(tmp_path / "same", bare)
    assert_is(bare, 5)
    plain = nn.Sequential(nn.Sequential(), nn.Linear(5, 2))
    plain[0].line = nn.Linear(3, 5)
    with pytest.raises(CheckpointError, match=r"extra state of other modules \(parameter '0'\).*got \['0'\]"):
        checkpoint.load(tmp_path / "same", plain)
    checkpoint.load(tmp_path / "same", plain, strict=False)
    assert torch.equal(plain[0].line.weight, bare[0].line.weight)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_other_ways(front: str, rank: int, tmp_path: Path) -> None:
    """Through DCP, and from rank 0 to all."""
    model, other = build(front, 5), build(front, 0)
    folder = [str(tmp_path)]
    torch.distributed.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    assert_is(other, 5)
    third = build(front, 0)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    set_model_state_dict(third, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_is(third, 5)
