"""A18: a whole value written in place into a parameter at rest fails in words that say what it shows and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import WritebackError
from tests.bed import ranks
from tests.bed.fronts import shard


def _whole_index(p: Any, whole: Tensor) -> None:
    p[39] = whole[39]


def _all(p: Any, whole: Tensor) -> None:
    p[...] = whole


def _mask(p: Any, whole: Tensor) -> None:
    p[whole > 1] = 0.0


def _plus(p: Any, whole: Tensor) -> None:
    p += whole


def _times(p: Any, whole: Tensor) -> None:
    p *= whole


EDITS: dict[str, Callable[[Any, Tensor], object]] = {
    "copy_": lambda p, whole: p.copy_(whole),
    "sub_": lambda p, whole: p.sub_(whole),
    "lerp_": lambda p, whole: p.lerp_(whole, 0.5),
    "__iadd__": _plus,
    "__imul__": _times,
    "__setitem__": _all,
}
front = pytest.mark.parametrize("front", ["orig", "fully_shard"])


def _model(front: str) -> Any:
    torch.manual_seed(0)
    return shard(nn.Sequential(nn.Linear(8, 40, bias=False)), front, [], "FULL_SHARD")


@ranks(2)
@front
@pytest.mark.parametrize("edit", EDITS)
def test_A18_a_whole_value_in_place_is_refused_in_words(front: str, edit: str, rank: int, world: int) -> None:
    model = _model(front)
    weight, whole = model[0].weight, torch.arange(320.0).view(40, 8)
    before = weight.detach().clone()
    with torch.no_grad(), pytest.raises(WritebackError) as caught:
        EDITS[edit](weight, whole)
    rows = shardwise.plan_of(model).units[0].parameters[0].rows
    first = sum(rows[:rank])
    text = (
        f"shardwise: Cannot writeback: a whole value was written in place (by {edit!r}) into a sharded parameter, "
        f"which shows this rank's rows only (parameter '0.weight', unit 'Sequential', rank {rank}): expected "
        f"{(rows[rank], 8)} (rows {first} to {first + rows[rank]} of (40, 8)), got (40, 8). On all ranks assign it, "
        "p.data = whole, of which each takes its rows; or use summon_full_params, or load_state_dict. In place write "
        "this rank's rows.")
    assert str(caught.value) == text, f"{caught.value}\n{text}"
    assert isinstance(caught.value.__cause__, RuntimeError) and torch.equal(weight, before)


@ranks(2)
@front
def test_A18_an_index_into_the_whole_is_refused_in_words(front: str, rank: int, world: int) -> None:
    weight, whole = _model(front)[0].weight, torch.arange(320.0).view(40, 8)
    for edit in (_whole_index, _mask):
        with torch.no_grad(), pytest.raises(WritebackError, match=re.escape("of (40, 8)), got an index of the whole")):
            edit(weight, whole)


@ranks(2)
@front
def test_A18_rows_in_place_and_torchs_other_words_stay(front: str, rank: int, world: int) -> None:
    """Also between forward and backward; and what the error says to do works."""
    model = _model(front)
    weight, whole = model[0].weight, torch.arange(320.0).view(40, 8)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.copy_(whole)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"must match|expand"):
            weight.copy_(torch.ones(5, 5))
        weight.copy_(torch.ones_like(weight.data))
        weight[...] = 2.0
        weight -= torch.ones(8)
    assert torch.equal(weight.full_tensor(), torch.ones(40, 8))
    output = model(torch.ones(1, 8)).sum()
    with torch.no_grad(), pytest.raises(WritebackError, match="into a sharded parameter"):
        weight.copy_(whole)
    output.backward()
    weight.data = whole
    model(torch.ones(1, 8))
    assert torch.equal(weight.full_tensor(), whole)
    with shardwise.summon_full_params(model), torch.no_grad():
        weight.copy_(whole + 1)
        with pytest.raises(RuntimeError, match=r"must match|expand"):
            weight.copy_(torch.ones(9, 9))
    assert torch.equal(weight.full_tensor(), whole + 1)


@ranks(2)
def test_A18_what_optimizers_call_is_torchs_own(rank: int, world: int) -> None:
    """An optimizer's step pays nothing: its operations are found where they were."""
    weight = _model("fully_shard")[0].weight
    for name in ("add_", "mul_", "addcdiv_", "addcmul_", "data", "detach"):
        assert getattr(type(weight), name) is getattr(Tensor, name)
