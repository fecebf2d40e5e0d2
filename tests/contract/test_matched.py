"""C8: collectives made of messages that meet only where both ranks mean the same, and what is said if they do not."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.logbook import Logbook
from shardwise.comm.matched import MatchedCollectives
from shardwise.errors import DivergenceError
from tests.bed import ranks
from tests.bed.traffic import count_messages
from tests.contract.test_transports import _same, _values


def _matched() -> MatchedCollectives:
    assert dist.group.WORLD is not None
    return MatchedCollectives(dist.group.WORLD)


@ranks(2, 4)
def test_matched_sums_are_made_in_rank_order_whatever_their_size(rank: int, world: int) -> None:
    collectives = _matched()
    for numel in (3, 4096, 70_003, 200_001):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = _values(rank, numel, dtype)
            collectives.all_reduce(tensor).wait()
            assert _same(tensor, reduce(torch.add, [_values(peer, numel, dtype) for peer in range(world)]))


@ranks(2, 4)
def test_matched_collectives_put_no_more_on_the_wire_than_they_must(rank: int, world: int) -> None:
    """Elements that this rank sends; of a broadcast of n the source sends 2 (N-1)/N n, the others less than n."""
    collectives, numel, share = _matched(), 240_000, 240_000 * (world - 1) // world
    whole, part, even = torch.ones(numel), torch.ones(numel // world), [numel // world] * world
    collectives.barrier()
    for start, most in (
        (lambda: collectives.all_gather(whole, part), share),
        (lambda: collectives.reduce_scatter(part, whole), share),
        (lambda: collectives.all_reduce(whole), 2 * share),
        (lambda: collectives.broadcast(whole, 1), 2 * share if rank == 1 else numel),
        (lambda: collectives.all_to_all(whole.clone(), whole, even, even), share),
        (lambda: collectives.all_gather(torch.empty(0), torch.empty(0)), 0),
    ):
        with count_messages() as messages:
            start().wait()
        assert sum(messages) <= most, messages


@ranks(4)
def test_matched_broadcast_of_much_is_passed_on(rank: int, world: int) -> None:
    collectives = _matched()
    for source in range(world):
        tensor = _values(rank, 200_001, torch.float32)
        collectives.broadcast(tensor, source).wait()
        assert _same(tensor, _values(source, 200_001, torch.float32))


@ranks(2)
def test_matched_messages_do_not_meet_those_of_the_user(rank: int, world: int) -> None:
    """They have connections of their own, so any tag is the user's."""
    collectives, out, word = _matched(), torch.empty(2), torch.tensor([7.0])
    works = [dist.isend(torch.tensor([50.0]), 1 - rank, tag=tag) for tag in (0, 1, 2**31 - 1)]
    collectives.all_gather(out, torch.tensor([float(rank)])).wait()
    assert out.tolist() == [0.0, 1.0]
    for tag in (0, 1, 2**31 - 1):
        dist.recv(word, 1 - rank, tag=tag)
        assert word.item() == 50.0
    for work in works:
        assert work is not None
        work.wait()


@ranks(2)
def test_matched_collectives_need_not_be_waited_for_in_order_or_at_all(rank: int, world: int) -> None:
    collectives = _matched()
    outs = [torch.empty(2) for _ in range(200)]
    handles = [collectives.all_gather(out, torch.tensor([float(rank)])) for out in outs[:60]]
    for handle in reversed(handles):
        handle.wait()
    for out in outs[60:]:
        collectives.all_gather(out, torch.tensor([float(rank)]))  # nobody waits
    collectives.barrier()
    assert all(out.tolist() == [0.0, 1.0] for out in outs[:60])


@ranks(2)
def test_matched_a_rank_that_is_late_is_no_divergence(rank: int, world: int) -> None:
    """It is looked at again and again meanwhile; then it comes, and all is well."""
    collectives, out, looks, original = _matched(), torch.empty(2), list[int](), Logbook.compare
    collectives.barrier()

    def compare(self: Logbook, *words: Any) -> bool:
        found = original(self, *words)
        looks.append(self.number)
        if len(looks) == 3:
            dist.send(torch.ones(1), 0)  # rank 0 may come
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logbook, "compare", compare)
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        collectives.all_gather(out, torch.tensor([float(rank)])).wait()
    assert out.tolist() == [0.0, 1.0] and (rank == 0 or len(looks) >= 3)


@ranks(2, 4)
def test_matched_comparison_at_once_can_be_asked_for(rank: int, world: int) -> None:
    """``check_order``: before anything is moved, and without a look at the store."""
    collectives = _matched()
    collectives.compare_calls(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logbook, "compare", lambda *_: None)
        with pytest.raises(DivergenceError, match="rank 0 runs gather with tag 0, rank 1 runs gather with tag 1"):
            collectives.all_gather(torch.empty(world), torch.ones(1), tag=rank)
    collectives.barrier()


@ranks(4)
def test_matched_ranks_that_have_not_come_are_said_so(rank: int, world: int) -> None:
    """Two ranks differ, and the third and fourth wait for other things: they learn it when they come."""
    collectives = _matched()
    collectives.barrier()
    try:
        if rank > 1:
            dist.recv(torch.ones(1), rank - 2)
        collectives.all_gather(torch.empty(world), torch.ones(1), tag=rank)
        collectives.barrier()
    except DivergenceError as error:
        told = str(error)
    if rank < 2:
        dist.send(torch.ones(1), rank + 2)
    said: list[str | None] = [None] * world
    dist.all_gather_object(said, told)
    assert len(set(said)) == 1
    assert "rank 1 runs gather with tag 1, rank 2 is not at it, rank 3 is not at it, in coll" in told
