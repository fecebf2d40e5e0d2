"""U68: what ``torch.save`` writes of a sharded model is one rank's rows; it says so and is not taken for the whole."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint.records import rebuild_record
from shardwise.errors import CheckpointError
from tests.bed import ranks


def _net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 2))


def _sharded(seed: int = 0) -> Any:
    model = _net(seed)
    shardwise.fully_shard(model[0])
    return shardwise.fully_shard(model)


def _saved(what: Any) -> tuple[io.BytesIO, list[str]]:
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(what, file)
    file.seek(0)
    return file, sorted({str(one.message) for one in caught})


@ranks(2)
def test_U68_torch_save_of_rows_says_so(rank: int, world: int) -> None:
    """Of a state dict, an optimizer's, parameters and gradients; once each, and only in ``torch.save``."""
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for what in (model.state_dict(), optimizer.state_dict(), dict(model.named_parameters()), [model[0].weight.grad]):
        _, said = _saved(what)
        assert len(said) == 1, said
        assert "torch.save writes sharded tensors, of which this file gets one rank's rows only (of 2 ranks)" in said[0]
        assert "checkpoint.save" in said[0] and "full_state_dict=True" in said[0]
    pickle.dumps(model.state_dict())  # warnings are errors here
    copy.deepcopy(model.state_dict())
    copy.copy(model.state_dict()["0.weight"])
    pickle.dumps(dict(model.named_parameters()))
    options = shardwise.checkpoint.StateDictOptions(full_state_dict=True)
    whole = shardwise.checkpoint.get_model_state_dict(model, options=options)
    file, said = _saved(whole)
    assert not said
    _net(seed=1).load_state_dict(torch.load(file))
    with shardwise.summon_full_params(model):
        assert not _saved({name: p.data for name, p in model.named_parameters()})[1]
        assert not _saved(dict(model.named_parameters()))[1]


@ranks(1)
def test_U68_one_rank_has_the_whole_and_nothing_is_said(rank: int, world: int) -> None:
    model = _sharded()
    assert not _saved(model.state_dict())[1] and not _saved(dict(model.named_parameters()))[1]


@ranks(2)
def test_U68_each_rank_reads_its_own_file(rank: int, world: int) -> None:
    model, other = _sharded(), _sharded(seed=1)
    file, _ = _saved(model.state_dict())
    state = torch.load(file)
    other.load_state_dict(state)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not _saved(state)[1]  # what was read is saved again as it is


@ranks(2)
def test_U68_a_file_of_one_rank_is_not_taken_for_the_whole(rank: int, world: int) -> None:
    model = _sharded()
    model(torch.ones(1, 8))  # now units have names
    file, _ = _saved(model.state_dict())
    files: list[Any] = [None] * world
    dist.all_gather_object(files, file.getvalue())
    state = torch.load(io.BytesIO(files[0]))
    first, last = state["0.weight"].placement.rows
    assert repr(state["0.weight"]).startswith(f"ShardedRecord(rows 0 to {last} of shape (40, 8)") and first == 0
    what = (rf"\(parameter 'weight', unit '0'\): .*got rows 0 to {last} of shape \(40, 8\), those of rank 0 of 2\. "
            r".*checkpoint\.save")
    with pytest.raises(CheckpointError, match="read from a file cannot be gathered.*" + what):
        state["0.weight"].full_tensor()
    with pytest.raises(RuntimeError, match=rf"0\.weight.*cannot take in a sharded record {what}"):
        _net().load_state_dict(state)
    plain = _net()
    plain.load_state_dict(state, assign=True)
    with pytest.raises(CheckpointError, match="computes nothing, and aten.* was called on one " + what):
        plain(torch.ones(1, 8))
    if rank:
        with pytest.raises(CheckpointError, match="cannot be gathered.*" + what):
            model.load_state_dict(state)


@ranks(1)
def test_U68_a_file_of_before_records_had_names_loads(rank: int, world: int) -> None:
    record = rebuild_record(torch.ones(2, 3), (4, 3), ((0, 2), (2, 4)), 1)
    with pytest.raises(CheckpointError, match="got rows 2 to 4 of shape"):
        record.full_tensor()
