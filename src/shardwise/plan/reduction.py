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


def plan_reduction(
    layouts: Sequence[FlatLayout], trained: Sequence[Sequence[bool]], rank: int, itemsize: int
) -> ReductionPlan:
    """Place the trained parameters. ``itemsize``: bytes of an element on the wire."""
    world = layouts[0].world_size
    unit = max(256 // itemsize, 1) if world > 1 else 1
    places: list[list[list[int]]] = []  # [k][i][rank] -> offset in the chunk
    cursors = [0] * world
    base: list[int | None] = []
    for layout, flags in zip(layouts, trained, strict=True):
        if all(flags):
            start = max(cursors)
            base.append(start)
            places.append([
                [start + layout.span(i, r).shard_offset for r in range(world)] for i in range(len(flags))
            ])
            cursors = [start + layout.shard_numel] * world
        else:
            base.append(None)
            places.append(_pack(layout, flags, cursors))
    chunk = -(-max(cursors) // unit) * unit
    pieces = tuple(
        tuple(_pieces(layout, i, places[k][i], chunk) if flags[i] else () for i in range(len(flags)))
        for k, (layout, flags) in enumerate(zip(layouts, trained, strict=True))
    )
    own = tuple(tuple(places[k][i][rank] for i in range(len(flags))) for k, flags in enumerate(trained))
    return ReductionPlan(world, chunk, pieces, own, tuple(base))


def _pack(layout: FlatLayout, flags: Sequence[bool], cursors: list[int]) -> list[list[int]]:
    """Put the spans of trained parameters one behind the other, in every rank's chunk."""
    places: list[list[int]] = []
    for i, trained in enumerate(flags):
        places.append(list(cursors))
        if trained:
            for rank in range(layout.world_size):
                cursors[rank] += -(-layout.span(i, rank).numel // 8) * 8
    return places


def _pieces(layout: FlatLayout, index: int, places: Sequence[int], chunk: int) -> tuple[Piece, ...]:
    """The spans of one parameter, joined where they are neighbours in the buffer."""
    joined: list[Piece] = []
    for rank in range(layout.world_size):
        span = layout.span(index, rank)
        if span.numel == 0:
            continue
        target = rank * chunk + places[rank]
        last = joined[-1] if joined else None
        if last and last.target + last.numel == target and last.source + last.numel == span.start:
            joined[-1] = Piece(last.source, last.target, last.numel + span.numel)
        else:
            joined.append(Piece(span.start, target, span.numel))
    return tuple(joined)
