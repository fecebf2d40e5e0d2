"""C8: ranks that wait for each other in different places hear of it, instead of waiting for the time limit."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import crossing
from shardwise.comm.beats import Beats
from shardwise.comm.choose import collectives_for
from shardwise.comm.crossing import Crossing
from shardwise.comm.peers import Peers
from shardwise.errors import DivergenceError
from tests.bed import ranks


@ranks(2)
def test_C8_a_checkpoint_on_one_rank_and_a_gather_on_the_other(rank: int) -> None:
    """As at the end of batches that are not equally many."""
    group = dist.new_group([0, 1])
    with (patch.dict(os.environ, SHARDWISE_LOST_AFTER="0.8"),
          patch.object(Beats, "_far", frozenset()),  # of tests that play several hosts
          patch.object(Beats, "doing", lambda: f"at train.py:{rank}")):
        peers, comm = Peers.of(group), collectives_for(group, torch.device("cpu"))
        comm.barrier()
        with pytest.raises(DivergenceError) as caught:
            if rank == 0:
                peers.gather("a plan")
            else:
                comm.all_gather(torch.empty(2), torch.ones(1), tag=4)
    text = str(caught.value)
    assert "ranks wait for each other in different places" in text
    assert ("rank 0 is in an exchange of words, as a checkpoint needs it (at train.py:0), "
            "rank 1 is in gather with tag 4 (at train.py:1)") in text
    assert "as many batches" in text
    assert peers.gather(f"new {rank}") == ["new 0", "new 1"]  # and not what was said before


@ranks(4)
def test_C8_who_waits_beside_them_hears_of_it(rank: int) -> None:
    """Ranks 2 and 3 are in the checkpoint of rank 0, and not in the gather of rank 1."""
    pair, every = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])
    with (patch.dict(os.environ, SHARDWISE_LOST_AFTER="0.8"), patch.object(Beats, "_far", frozenset())):
        peers = Peers.of(every)
        if rank < 2:
            comm = collectives_for(pair, torch.device("cpu"))
            comm.barrier()
        with pytest.raises(DivergenceError, match=r"rank 0 is in .*, rank 1 is in "):
            if rank == 1:
                comm.all_gather(torch.empty(2), torch.ones(1), tag=4)
            else:
                peers.gather("a plan")
    assert peers.gather(rank) == [0, 1, 2, 3]


def test_C8_only_a_rank_that_goes_on_waiting_for_this_one_is_an_error() -> None:
    board: dict[str, str] = {}
    with (patch.object(crossing, "show", board.__setitem__), patch.object(dist, "is_initialized", lambda: True),
          patch.object(crossing, "read_all", lambda keys: [board.get(key, "") for key in keys])):

        def look(which: Crossing, rank: int, needed: list[int]) -> Any:
            with patch.object(dist, "get_rank", lambda: rank):
                return which.look(needed)

        def looks(first: Crossing, second: Crossing, needs: tuple[list[int], list[int]], both: bool = True) -> None:
            for _ in range(8):
                look(first, 0, needs[0])
                if both:
                    look(second, 1, needs[1])

        looks(Crossing("a", "gather"), Crossing("a", "gather"), ([1], [0]))  # the same place
        looks(Crossing("a", "gather"), Crossing("b", "words"), ([1], [2]))  # the other one needs somebody else
        look(Crossing("b", "words"), 1, [0])
        looks(Crossing("a", "gather"), Crossing("b", "words"), ([1], [0]), both=False)  # said once, and not again
        for _ in range(8):  # one wait after the other, as ranks do that get on
            first = Crossing("a", "gather")
            look(first, 0, [1])
            look(Crossing("b", "words"), 1, [0])
            look(first, 0, [1])
        with pytest.raises(DivergenceError, match="rank 0 is in gather, rank 1 is in words"):
            looks(Crossing("a", "gather"), Crossing("b", "words"), ([1], [0]))
