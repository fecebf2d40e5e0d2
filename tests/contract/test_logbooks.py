"""C8: on NCCL and its like nothing is compared in advance; the ranks' logbooks tell, a little later.

There is no NCCL here: gloo's group is driven through the same calls, ranks mix equal sizes, and looks are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.bench.meter import count_calls
from shardwise.comm import mesh, process_group
from shardwise.comm.logbook import Logbook
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.errors import DivergenceError
from tests.bed import ranks
from tests.bed.fronts import FRONTS
from tests.contract.test_divergence import _agreed, _data, _sharded, _step


@contextmanager
def _trusting(*, round_s: float) -> Iterator[Any]:
    """The transport of models sharded inside trusts, as on NCCL. With long rounds it looks when it is told to."""
    assert dist.group.WORLD is not None
    trusting = ProcessGroupCollectives(dist.group.WORLD, check_tags=False)
    trusting._quick = trusting._trusting = True
    with ExitStack() as stack:
        if round_s > 1:
            stack.enter_context(patch.object(process_group, "watch", lambda _: None))
        stack.enter_context(patch.object(mesh, "collectives_for", lambda *_, **__: trusting))
        stack.enter_context(patch.object(process_group, "_ROUND_S", round_s))
        yield trusting


def _look(transport: Any) -> None:
    transport._next_round = 0.0
    transport.look(0.0)


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_C8_ranks_that_trust_hear_of_it_from_the_logbooks(front: str, rank: int, world: int) -> None:
    """Equal sizes are mixed without a word at first, for a few rounds."""
    odd = rank == world - 1
    with _trusting(round_s=0.01) as transport:
        model = _sharded(front)
        for _ in range(3):
            _step(model, rank)
        number = transport._book.number
        model(_data(rank), "a" if odd else "b")
        while transport._verdict is None:  # the thread looks; the test's own limit ends this
            time.sleep(0.002)
        text = _agreed(lambda: model(_data(rank), "a"), world)
    assert "rank 0 runs gather of 'b', " in text and f"rank {world - 1} runs gather of 'a'" in text
    assert f"in collective {number + 1} of this group. Every rank must run" in text


@ranks(2, 4)
def test_C8_ranks_that_trust_may_be_apart_and_late(rank: int, world: int) -> None:
    """Some have shown more than others, some nothing yet, and one runs nothing for many rounds: no divergence."""
    with _trusting(round_s=1e9) as transport:
        model = _sharded("fully_shard")
        for step in range(6):
            _step(model, rank)
            if rank != step % world:
                _look(transport)
                _look(transport)
        dist.barrier()
        for _ in range(3):
            _look(transport)
        assert transport._verdict is None


@ranks(2)
def test_C8_an_earlier_life_of_the_same_store_does_not_count(rank: int, world: int) -> None:
    """As after a restart: what was shown then, under the same numbers, was something else."""
    for tag in (4 * rank, 8):
        with _trusting(round_s=1e9) as transport:
            transport.all_gather(torch.empty(world), torch.ones(1), tag=tag).wait()
            transport._book.publish()
            dist.barrier()
            if tag == 8:
                assert not transport._book.compare(None)
            dist.barrier()


@ranks(2)
def test_C8_a_verdict_is_printed_and_ends_the_next_collective(rank: int, world: int) -> None:
    with _trusting(round_s=1e9) as transport:
        transport.all_gather(torch.empty(world), torch.ones(1), tag=rank).wait()
        transport._book.publish()
        dist.barrier()
        with pytest.MonkeyPatch.context() as patches:
            said = list[str]()
            patches.setattr(process_group, "print", lambda text, **_: said.append(str(text)), raising=False)
            _look(transport)
        dist.barrier()
        with pytest.raises(DivergenceError, match="rank 0 runs gather with tag 0, rank 1 runs gather with tag 1, in "
                                                  "collective 1 of this group") as caught:
            transport.all_gather(torch.empty(world), torch.ones(1), tag=2)
        assert said == [str(caught.value)]


@ranks(2)
def test_C8_a_line_in_the_logbook_costs_two_calls(rank: int, world: int) -> None:
    """Of Python and C together, and the description of a call is made once."""
    with _trusting(round_s=1e9) as transport:
        out, shard = torch.empty(world), torch.ones(1)

        def run() -> None:
            transport.all_gather(out, shard, tag=4).wait()

        run()
        with_it = count_calls(run)
        with patch.object(Logbook, "note", lambda *_: 0):  # this one is counted in both
            without = count_calls(run)
    assert with_it - without == 1
    assert with_it <= 12, with_it
