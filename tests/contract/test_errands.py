"""C8: where ranks differ, the error names the call of the library that each is in, beside the collective."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import FullyShardedDataParallel
from shardwise.checkpoint import StateDictOptions, get_model_state_dict
from shardwise.comm.beats import Beats
from shardwise.comm.choose import collectives_for
from shardwise.comm.errands import HERE, Errand, in_errand
from shardwise.comm.hierarchical import HierarchicalCollectives
from tests.bed import ranks
from tests.bed.fronts import transport
from tests.contract.test_divergence import _agreed, _data, _sharded, _step, both


def _summon(model: Any) -> None:
    with shardwise.summon_full_params(model):
        assert not HERE.number  # what is done inside is no part of it


def _unit_by_unit(model: Any) -> None:
    for _ in shardwise.iter_units_full(model):
        assert not HERE.number


CALLS: dict[str, Callable[[Any], object]] = {
    "summon_full_params": _summon,
    "iter_units_full": _unit_by_unit,
    "unshard": lambda model: model.a.unshard(),
    "full_tensor": lambda model: model.a.weight.full_tensor(),
    "reading a norm of gradients (float, print)":
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_": lambda model: shardwise.clip_grad_norm(model.parameters(), 1.0),
    "get_model_state_dict": lambda model: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    "iter_full_tensors": lambda model: list(shardwise.checkpoint.iter_full_tensors(model)),
    "apply": lambda model: model.apply(lambda _: None),
}


@ranks(2)
@both
@pytest.mark.parametrize("call", CALLS)
def test_C8_the_call_of_each_rank_is_named(call: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        model = _sharded("fully_shard")
    _step(model, rank)
    text = _agreed(lambda: CALLS[call](model) if rank else model(_data(rank), "b"), world)
    assert "ranks run different calls" in text
    assert "rank 0 runs gather of 'b', rank 1 runs " in text and f" in {call}" in text
    assert "Every rank must make the same calls in the same order" in text
    assert not HERE.number


@ranks(2)
@both
def test_C8_a_state_dict_on_one_rank_and_a_norm_on_the_other(over: str, rank: int, world: int) -> None:
    """The collectives belong to no unit, and none is named."""
    with transport(over):
        model: Any = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    text = _agreed(lambda: model.clip_grad_norm_(1.0) if rank else model.state_dict(), world)
    assert "rank 1 runs all-reduce in clip_grad_norm_" in text and " in state_dict, rank 1" in text


@ranks(2)
def test_C8_asked_to_compare_it_names_them_too(rank: int, world: int) -> None:
    with transport("group"):
        model = _sharded("fully_shard")
    _step(model, rank)
    with shardwise.check_order(model):
        text = _agreed(lambda: CALLS["full_tensor"](model) if rank else CALLS["clip_grad_norm_"](model), world)
    assert "rank 0 runs all-reduce in clip_grad_norm_, rank 1 runs gather in full_tensor." in text


@ranks(4)
def test_C8_ranks_of_two_hosts_name_them_too(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    comm = HierarchicalCollectives(group, 2, timeout_s=30.0)

    def run() -> None:
        if rank == 3:
            with Errand("checkpoint.save"):
                comm.all_reduce(torch.ones(3))
        comm.all_gather(torch.empty(4), torch.ones(1), tag=4)

    text = _agreed(run, world)
    assert "rank 2 runs gather with tag 4, rank 3 runs all-reduce in checkpoint.save" in text
    comm.close()


@ranks(2)
@both
def test_C8_the_same_collective_in_other_calls_is_no_divergence(over: str, rank: int, world: int) -> None:
    with transport(over):
        model = _sharded("fully_shard")
    _step(model, rank)
    with Errand("state_dict" if rank else "checkpoint.save"):
        whole: Tensor = model.a.weight.full_tensor()
    assert whole.shape == (9, 9)


@ranks(2)
def test_C8_ranks_that_wait_in_different_places_name_the_call(rank: int, world: int, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])
    model = nn.Linear(4, 4)
    with (patch.dict(os.environ, SHARDWISE_LOST_AFTER="0.8"),
          patch.object(Beats, "_far", frozenset())):  # of tests that play several hosts
        comm = collectives_for(group, torch.device("cpu"))
        comm.barrier()

        def run() -> None:
            if rank:
                with Errand("full_tensor"):
                    comm.all_gather(torch.empty(2), torch.ones(1))
            else:
                shardwise.checkpoint.save(tmp_path / "c", model, process_group=group)

        text = _agreed(run, world)
    assert "rank 0 is in an exchange of words in checkpoint.save (" in text
    assert f"{__name__.split('.')[-1]}.py" in text and "rank 1 is in gather in full_tensor (" in text


def test_C8_the_outermost_call_counts() -> None:
    with Errand("get_state_dict"), Errand("state_dict"):
        assert in_errand() == " in get_state_dict"
    assert in_errand() == ""
    with pytest.raises(KeyError), Errand("nobody calls this"):
        pass


@ranks(2)
def test_C8_a_step_pays_no_call_for_it(rank: int, world: int) -> None:
    model = _sharded("fully_shard")
    for _ in range(3):
        _step(model, rank)
    files, before = set[str](), sys.getprofile()
    sys.setprofile(lambda frame, *_: files.add(Path(frame.f_code.co_filename).name))
    try:
        _step(model, rank)
    finally:
        sys.setprofile(before)
    assert "session.py" in files and "errands.py" not in files


def test_C8_threads_have_errands_of_their_own() -> None:
    seen: list[str] = []
    with Errand("state_dict"):
        thread = threading.Thread(target=lambda: seen.append(in_errand()))
        thread.start()
        thread.join()
    assert seen == [""]
