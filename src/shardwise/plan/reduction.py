"""Where each gradient goes in the buffer that is reduce-scattered.

The buffer has one chunk for each rank; chunk ``r`` holds what rank ``r`` keeps: its spans of
every parameter that is trained. Where a unit has one flat parameter and all of it is trained,
the chunk *is* the shard, and a gradient is one contiguous piece, however many ranks share it::

    rank 0          rank 1          rank 2
    |--- w ---------|------- w -----|- w -|b|..|     chunk = shard, one piece for w, one for b

Otherwise (several flat parameters, or frozen parameters in between) spans are packed, frozen
ones take no room, and a gradient has one piece for each rank that holds part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import FlatLayout

__all__ = ["Piece", "ReductionPlan", "plan_reduction"]


@dataclass(frozen=True)
class Piece:
    """``numel`` elements of a gradient (memory order, from ``source``) go to ``target``."""

    source: int
    target: int
    numel: int


@dataclass(frozen=True)
class ReductionPlan:
    """``pieces[k][i]``: of parameter ``i`` of flat parameter ``k``, () where it is not trained.
    ``own[k][i]``: where its span lies in this rank's chunk. ``base[k]``: where an entirely
    trained flat parameter begins in a chunk, None for others."""

    world_size: int
    chunk_numel: int
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]
    own: tuple[tuple[int, ...], ...]
    base: tuple[int | None, ...]

    @property
    def numel(self) -> int:
        return self.world_size * self.chunk_numel


class _Whole:
    """Where the spans of an entirely trained flat parameter lie: as in the shard, from ``start`` on."""

    def __init__(self, layout: FlatLayout, start: int) -> None:
        self.start: int | None = start
        self._layout, self._start = layout, start

    def place(self, index: int, rank: int) -> int:
        return self._start + self._layout.span(index, rank).shard_offset


class _Packed:
    """Where the spans of the trained parameters lie: one behind the other, in each rank's chunk."""

    def __init__(self, layout: FlatLayout, flags: Sequence[bool], cursors: list[int]) -> None:
        self.start: int | None = None
        self._places: dict[tuple[int, int], int] = {}
        for index, trained in enumerate(flags):
            for rank in layout.holders(index) if trained else ():
                self._places[index, rank] = cursors[rank]
                cursors[rank] += -(-layout.span(index, rank).numel // 8) * 8

    def place(self, index: int, rank: int) -> int:
        """0 where ``rank`` has nothing of it."""
        return self._places.get((index, rank), 0)


def plan_reduction(
    layouts: Sequence[FlatLayout], trained: Sequence[Sequence[bool]], rank: int, itemsize: int
) -> ReductionPlan:
    """Place the trained parameters. ``itemsize``: bytes of an element on the wire.

    The work grows with the pieces, and not with parameters times ranks.
    """
    world = layouts[0].world_size
    unit = max(256 // itemsize, 1) if world > 1 else 1
    places: list[_Whole | _Packed] = []
    cursors = [0] * world
    for layout, flags in zip(layouts, trained, strict=True):
        if all(flags):
            start = max(cursors)
            places.append(_Whole(layout, start))
            cursors = [start + layout.shard_numel] * world
        else:
            places.append(_Packed(layout, flags, cursors))
    chunk = -(-max(cursors) // unit) * unit
    pieces = tuple(
        tuple(_pieces(layout, i, placed, chunk) if flag else () for i, flag in enumerate(flags))
        for placed, layout, flags in zip(places, layouts, trained, strict=True)
    )
    own = tuple(tuple(placed.place(i, rank) for i in range(len(flags)))
                for placed, flags in zip(places, trained, strict=True))
    return ReductionPlan(world, chunk, pieces, own, tuple(placed.start for placed in places))


def _pieces(layout: FlatLayout, index: int, placed: _Whole | _Packed, chunk: int) -> tuple[Piece, ...]:
    """The spans of one parameter, joined where they are neighbours in the buffer."""
    if placed.start == 0 and chunk == layout.shard_numel:  # the buffer is as the flat parameter is
        numel = layout.parameters[index].numel
        return (Piece(0, layout.offsets[index], numel),) if numel else ()
    joined: list[Piece] = []
    for rank in layout.holders(index):
        span, target = layout.span(index, rank), rank * chunk + placed.place(index, rank)
        last = joined[-1] if joined else None
        if last and last.target + last.numel == target and last.source + last.numel == span.start:
            joined[-1] = Piece(last.source, last.target, last.numel + span.numel)
        else:
            joined.append(Piece(span.start, target, span.numel))
    return tuple(joined)
