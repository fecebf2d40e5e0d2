"""Ranges of tensors from rank to rank, in rounds of bounded size.

Each rank lists what it sends to each other and what comes from there, in the same order on both sides. A round moves
the next elements of every pair through two buffers of ``BUFFER_BYTES`` at most, whatever the tensors' sizes. The
channel is that of words between ranks (gloo, in host memory), so it is there whatever the group trains over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.peers import Peers
from .ranged_io import BUFFER_BYTES
from .together import between, together

__all__ = ["Range", "Row", "exchange_ranges", "exchange_rows", "row_major"]

Row = tuple[int, int, int]
"""Number of a tensor, first element, and the one behind the last: a range in words."""


@dataclass(frozen=True, eq=False)
class Range:
    """The elements ``[start, stop)`` of ``values`` in row-major order, which may lie in memory in any order."""

    values: Tensor
    start: int
    stop: int


def row_major(values: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views of ``values`` that have its elements ``[start, stop)``, in row-major order."""
    if values.is_contiguous():
        yield values.reshape(-1)[start:stop]
        return
    row = values[0].numel()
    first, last = -(-start // row), stop // row  # rows that are wanted whole
    if first > last:
        yield from row_major(values[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from row_major(values[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield values[first:last]
    if last * row < stop:
        yield from row_major(values[last], 0, stop - last * row)


class _Stream:
    """Ranges one behind the other, taken a bit at a time."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = [one for one in ranges if one.start < one.stop]
        self._ranges.reverse()
        self.left = sum(one.stop - one.start for one in self._ranges)

    def take(self, count: int) -> Iterator[Tensor]:
        """Views of the next ``count`` elements."""
        self.left -= count
        while count:
            one = self._ranges.pop()
            stop = min(one.stop, one.start + count)
            if stop < one.stop:
                self._ranges.append(Range(one.values, stop, one.stop))
            count -= stop - one.start
            yield from row_major(one.values, one.start, stop)


def exchange_ranges(peers: Peers, sent: Sequence[Iterable[Range]], received: Sequence[Iterable[Range]],
                    dtypes: Iterable[torch.dtype], *, doing: str, limit: int = BUFFER_BYTES) -> None:
    """Fill ``received[r]`` with what rank ``r`` sends to this one, for each rank (a collective).

    The ranges may be of several ``dtypes``, the same on all ranks; those of each dtype keep their order.
    """
    pairs = [_Pairs(peers, dtype, sent, received) for dtype in dtypes]
    with together(peers, doing) as words:
        words.mine = [(pair.partners, pair.longest) for pair in pairs]
    for pair, everyone in zip(pairs, zip(*words.all, strict=True), strict=True):
        partners, longest = (max(numbers) for numbers in zip(*everyone, strict=True))
        if longest:
            slot = min(longest, max(1, limit // pair.dtype.itemsize // partners))
            boxes = torch.empty(2, slot * partners, dtype=pair.dtype)
            with between(peers, doing):
                for _ in range(-(-longest // slot)):
                    pair.move(slot, boxes)


class _Pairs:
    """The streams of one dtype between this rank and all others."""

    def __init__(self, peers: Peers, dtype: torch.dtype, sent: Sequence[Iterable[Range]],
                 received: Sequence[Iterable[Range]]) -> None:
        self._peers, self.dtype = peers, dtype
        self._sent, self._received = ([_Stream(one for one in ranges if one.values.dtype == dtype) for ranges in way]
                                      for way in (sent, received))
        self._keep_own()
        self.partners = max(sum(stream.left > 0 for stream in way) for way in (self._sent, self._received))
        self.longest = max(stream.left for way in (self._sent, self._received) for stream in way)

    @torch.no_grad()
    def _keep_own(self) -> None:
        """What a rank sends to itself does not travel."""
        mine, own = self._sent[self._peers.rank], self._received[self._peers.rank]
        while mine.left:
            count = min(mine.left, BUFFER_BYTES // self.dtype.itemsize)
            box = torch.empty(count, dtype=self.dtype)
            _copy(mine.take(count), box, out=False)
            _copy(own.take(count), box, out=True)

    @torch.no_grad()
    def move(self, slot: int, boxes: Tensor) -> None:
        """One round: up to ``slot`` elements between each two ranks, through ``boxes`` [2, slots of a round]."""
        sent, received = ([min(slot, stream.left) for stream in way] for way in (self._sent, self._received))
        full, out = boxes[0, : sum(sent)], boxes[1, : sum(received)]
        _copy((view for stream, count in zip(self._sent, sent, strict=True) for view in stream.take(count)),
              full, out=False)
        size = self.dtype.itemsize
        self._peers.all_to_all(out.view(torch.uint8), full.view(torch.uint8),
                               [count * size for count in received], [count * size for count in sent])
        _copy((view for stream, count in zip(self._received, received, strict=True) for view in stream.take(count)),
              out, out=True)


def _copy(views: Iterable[Tensor], box: Tensor, *, out: bool) -> None:
    """Between ``views`` and ``box``, where they lie one behind the other; ``out`` of the box or into it."""
    place = 0
    for view in views:
        part = box[place : place + view.numel()].view(view.shape)
        place += view.numel()
        if out:
            view.copy_(part)
        else:
            part.copy_(view)


def exchange_rows(peers: Peers, rows: Sequence[Sequence[Row]], *, doing: str
                  ) -> list[list[Row]]:
    """Send ``rows[r]`` to rank ``r``; what each rank sent to this one (a collective)."""
    sent = [3 * len(one) for one in rows]
    received = torch.empty(peers.size, dtype=torch.int64)
    full = torch.tensor([number for one in rows for row in one for number in row], dtype=torch.int64)
    with between(peers, doing):
        peers.all_to_all(received, torch.tensor(sent), [1] * peers.size, [1] * peers.size)
        counts: list[int] = received.tolist()
        out = torch.empty(sum(counts), dtype=torch.int64)
        peers.all_to_all(out, full, counts, sent)
    return [[(a, b, c) for a, b, c in part.view(-1, 3).tolist()] for part in out.split(counts)]
