"""Collectives made of messages between two ranks.

Each is a generator: it posts messages and gives, one after the other, what has to be waited for before it
goes on. What comes before the first wait happens when the collective starts; the rest when it is waited for.
Every rank receives no more than the best algorithm needs: (N-1)/N of what is gathered or scattered, twice that for
a large all-reduce. Sums are made in rank order, so that they have the bits of every other transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Messages", "Steps", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce_scatter"]

Steps = Iterator[Any]
"""Works, each of which is waited for before the next step."""
Combine = Callable[..., Tensor]

#: up to this many bytes to one rank, an all-reduce gathers every contribution, and a broadcast sends all to everyone
_SMALL = 256 << 10


class Messages(Protocol):
    """The messages of one collective. Those of another, or of another rank's idea of it, never meet them."""

    rank: int
    size: int
    #: the other ranks, beginning with the next one, so that not all send to one at a time
    others: tuple[int, ...]

    def send(self, part: Tensor, place: int, sort: int = 0) -> Any:
        """Send ``part`` to rank ``place``; ``sort`` tells messages of one collective apart."""

    def receive(self, part: Tensor, place: int, sort: int = 0) -> Any:
        """Let ``part`` be filled by rank ``place``."""


def gather(post: Messages, out: Tensor, shard: Tensor) -> Steps:
    """``out`` [N * n] = the ``shard`` [n] of every rank."""
    slots = out.view(post.size, -1).unbind()
    works = [post.receive(slots[place], place) for place in post.others]
    works += [post.send(shard, place) for place in post.others]
    if slots[post.rank].data_ptr() != shard.data_ptr():
        slots[post.rank].copy_(shard.view(-1))
    yield from works


def reduce_scatter(post: Messages, out: Tensor, full: Tensor, combine: Combine) -> Steps:
    """``out`` [n] = slot ``rank`` of the ``full`` [N * n] of every rank, combined in rank order."""
    slots = full.view(post.size, -1).unbind()
    arriving, parts = _contributions(post, slots[post.rank])
    sent = [post.send(slots[place], place) for place in post.others]
    yield from _combined(out.view(-1), parts, arriving, combine)
    yield from sent


def all_reduce(post: Messages, tensor: Tensor, combine: Combine) -> Steps:
    """``tensor`` of every rank, combined in place in rank order; a small one is not changed until all have come."""
    flat = tensor.view(-1)
    if (post.size - 1) * tensor.nbytes <= _SMALL:
        return _all_reduce_whole(post, flat, combine)
    return _all_reduce_ranges(post, flat, combine)


def _all_reduce_whole(post: Messages, flat: Tensor, combine: Combine) -> Steps:
    arriving, parts = _contributions(post, flat)
    sent = [post.send(flat, place) for place in post.others]
    total = parts[1 if post.rank == 0 else 0]  # one that arrived: the own is being read
    yield from _combined(total, parts, arriving, combine)
    yield from sent
    flat.copy_(total)


def _all_reduce_ranges(post: Messages, flat: Tensor, combine: Combine) -> Steps:
    """Each rank combines one range for all. Its total arrives where the contribution to it has left."""
    ranges = _ranges(flat, post.size)
    mine = ranges[post.rank]  # nobody reads it
    arriving, parts = _contributions(post, mine)
    totals = [post.receive(ranges[place], place, 1) for place in post.others]
    sent = [post.send(ranges[place], place) for place in post.others]
    total = parts[0]
    yield from _combined(total, parts, arriving, combine)
    sent += [post.send(total, place, 1) for place in post.others]
    if total is not mine:
        mine.copy_(total)
    yield from totals
    yield from sent


def broadcast(post: Messages, tensor: Tensor, source: int) -> Steps:
    """``tensor`` of rank ``source``, in place."""
    flat = tensor.view(-1)
    if post.size == 2 or post.size * tensor.nbytes <= _SMALL:
        return _broadcast_whole(post, flat, source)
    return _broadcast_ranges(post, flat, source)


def _broadcast_whole(post: Messages, flat: Tensor, source: int) -> Steps:
    if post.rank == source:
        yield from [post.send(flat, place) for place in post.others]
    else:
        yield post.receive(flat, source)


def _broadcast_ranges(post: Messages, flat: Tensor, source: int) -> Steps:
    """The source gives each rank a range, and its own to all; each passes its range on."""
    ranges = _ranges(flat, post.size)
    if post.rank == source:
        works = [post.send(ranges[place], place) for place in post.others]
        yield from works + [post.send(ranges[source], place, 1) for place in post.others]
        return
    mine = post.receive(ranges[post.rank], source)
    works = [post.receive(ranges[place], place, 1) for place in post.others]
    yield mine
    yield from works + [post.send(ranges[post.rank], place, 1) for place in post.others if place != source]


def all_to_all(
    post: Messages, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Steps:
    """Slot ``p`` of ``full`` goes to rank ``p``; slot ``p`` of ``out`` comes from there. Sizes in elements."""
    slots, mine = out.split(list(received)), full.split(list(sent))
    works = [post.receive(slots[place], place, received[place]) for place in post.others if received[place]]
    works += [post.send(mine[place], place, sent[place]) for place in post.others if sent[place]]
    slots[post.rank].copy_(mine[post.rank])
    yield from works


def barrier(post: Messages) -> Steps:
    """A word from everyone to everyone."""
    word, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(post.size, dtype=torch.uint8)
    return gather(post, heard, word)


def _contributions(post: Messages, mine: Tensor) -> tuple[dict[int, Any], list[Tensor]]:
    """What is to arrive for the range of ``mine``, by rank, and where each rank's contribution will be."""
    arrived = mine.new_empty((post.size - 1, mine.numel())).unbind()
    parts = [*arrived[: post.rank], mine, *arrived[post.rank :]]
    return {place: post.receive(parts[place], place) for place in post.others}, parts


def _combined(out: Tensor, parts: Sequence[Tensor], arriving: dict[int, Any], combine: Combine) -> Steps:
    """out = part 0 ∘ part 1 ∘ …, each as soon as it and all before it are there."""
    for place, part in enumerate(parts):
        if place in arriving:
            yield arriving[place]
        if place == 1:
            combine(parts[0], part, out=out)
        elif place:
            combine(out, part, out=out)


def _ranges(flat: Tensor, size: int) -> tuple[Tensor, ...]:
    """``size`` ranges of almost equal length; the last may be shorter, or empty."""
    share = -(-flat.numel() // size)
    return tuple(flat[place * share : (place + 1) * share] for place in range(size))
