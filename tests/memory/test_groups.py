"""What a group costs beside its own is free when it is destroyed, whoever still keeps a transport or a model."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import last_words
from shardwise.comm.choose import collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.comm.matched import MatchedCollectives
from shardwise.comm.peers import Peers
from shardwise.errors import CommunicationError
from tests.bed import ranks

_CPU = torch.device("cpu")


def _counts() -> tuple[int, int]:
    """Open file descriptors, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _life_of_a_group(shared_memory: bool) -> Collectives:
    group = dist.new_group([0, 1])
    made = collectives_for(group, _CPU, shared_memory=shared_memory)  # pyright: ignore[reportArgumentType]
    made.all_gather(torch.empty(2), torch.ones(1)).wait()
    assert Peers.of(group).gather("word") == ["word", "word"]  # pyright: ignore[reportArgumentType]
    dist.barrier()
    dist.destroy_process_group(group)
    return made


@ranks(2)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_destroyed_groups_leave_no_descriptor_and_no_thread(shared_memory: bool, rank: int, world: int) -> None:
    gc.collect()
    gc.disable()
    try:
        kept = [_life_of_a_group(shared_memory)]
        before = _counts()
        kept += [_life_of_a_group(shared_memory) for _ in range(3)]
        assert _counts() == before
    finally:
        gc.enable()
    with pytest.raises(CommunicationError, match="process group was destroyed"):
        kept[0].all_gather(torch.empty(2), torch.ones(1))


@ranks(2)
def test_a_transport_that_was_interrupted_is_closed(rank: int, world: int) -> None:
    """It does not meet the others over the addresses that they had."""
    made = MatchedCollectives(dist.new_group([0, 1]))  # pyright: ignore[reportArgumentType]
    made.barrier()
    if rank == 0:
        with patch("shardwise.comm.wire.Waiting.__enter__", side_effect=KeyboardInterrupt), \
                pytest.raises(KeyboardInterrupt):
            made.barrier()
        with pytest.raises(CommunicationError, match=r"ranks 0, 1 is closed, .* no barrier \(KeyboardInterrupt\)"):
            made.barrier()
    else:
        with pytest.raises(CommunicationError, match="rank 0 "):
            made.barrier()
            made.barrier()


@ranks(2)
def test_the_store_of_a_group_is_not_kept(rank: int, world: int) -> None:
    """Its server would keep the port, so that the next group finds it in use."""

    class Group:
        def get_group_store(self) -> Any:
            return store

    store, group = dist.HashStore(), Group()
    with patch.object(last_words._Kept, "group", weakref.ref(group)):
        last_words.show("key", "text")
        assert last_words.read("key") == "text"
        del group
        assert last_words.read("key") is None
        last_words.show("key", "nobody")
