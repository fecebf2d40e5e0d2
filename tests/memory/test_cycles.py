"""A model that is sharded, used and deleted leaves nothing behind."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as listed

import shardwise
from shardwise import MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard, unsynced
from tests.bed.models import TinyMLP, loss, points


def _fail(_: Tensor) -> Tensor:
    raise IndexError


def _sharded(front: str) -> Any:
    plain = nn.Sequential(TinyMLP(), nn.Unflatten(1, (1, 1)), nn.BatchNorm1d(1), nn.Flatten())
    mixed: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)}
    if front == "fully_shard":
        mixed = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)}
    return shard(plain, front, [plain[0]], **mixed)


def _cycle(front: str, rank: int, folder: Path) -> None:
    """What users do with a model, from its beginning to its end."""
    model = _sharded(front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        with unsynced(model, front):
            loss(model, points(rank, step)).backward()
        loss(model, points(rank, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(points(rank, 0)[0])
    with shardwise.summon_full_params(model):
        copy.deepcopy(model)
    copied = copy.deepcopy(model)
    loss(copied, points(rank, 0)).backward()
    copied.load_state_dict(model.state_dict())
    shardwise.checkpoint.save(folder, model, optimizer)
    shardwise.checkpoint.load(folder, copied, torch.optim.AdamW(copied.parameters()))
    output = model(points(rank, 0)[0]).sum()
    output.register_hook(_fail)
    with pytest.raises(IndexError):
        output.backward()
    model.zero_grad()


def _census() -> Counter[str]:
    """The live objects by their class."""
    gc.collect()
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U67_nothing_stays(front: str, rank: int, world: int, tmp_path: Path) -> None:
    """No object, and no class in torch's list of those that optimizers search for every parameter."""
    for warm_up in range(3):
        _cycle(front, rank, tmp_path / f"warm {warm_up}")
        before, classes = _census(), list(listed)
    for cycle in range(3):
        _cycle(front, rank, tmp_path / f"cycle {cycle}")
    after = _census()
    assert {kind: (count, after[kind]) for kind, count in before.items() if after[kind] != count} == {}
    assert after.keys() == before.keys() and listed == classes
