"""The search for the smallest equal shards that hold some parameters without cutting a granule.

Plain integers only: a parameter is (numel, granule), so that equal units share one cached answer.

With the order of the parameters and the shard size S given, putting each parameter at the earliest
place that its granule allows is optimal, because an earlier end never hurts what follows. So only
S and the order are searched:

* S: a parameter longer than 2 S has two boundaries inside, which lie S apart, so its granule must
  divide S. `next_legal` steps through exactly the sizes that satisfy this, upwards from the lower
  bound. A few round sizes and a geometric ladder follow; the first success is refined by halving.
* order: the caller's, coarse granules first, long parameters first, and one that fills gaps. If
  that leaves much padding which a legal size could avoid, some shuffles (seeded, so that every rank
  finds the same) are tried too.

The last rung of the ladder always succeeds: a shard as long as the longest parameter plus an even
share of everything, in which no parameter needs a cut.

Rejected: one padded row range per parameter and rank (padding per parameter, and more copies after
a gather); shards of different sizes (slower collectives); a solver (the marks are met without one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd, lcm
from random import Random

__all__ = ["pack", "shard_unit", "start_unit"]

SHARD_BYTES = 256  # collectives are slow on shards that are not a multiple of this
START_BYTES = 16  # vector loads want every parameter to start at a multiple of this

_DENSE_SIZES = 32  # legal shard sizes tried one after the other, from the lower bound up …
_DENSE_WORK = 8_000  # … fewer if that would place more parameters than this, but 8 always
_LADDER_RUNGS = 24  # then sizes that close in on the fall-back, halving the distance
_REFINEMENTS = 12  # halvings between the last failure and the first success
_GAP_FILL_LIMIT = 20_000  # parameters × kinds up to which the gap-filling order is tried
_SHUFFLE_WORK = 4_096  # parameters placed in shuffled orders, over all shuffles
_SHUFFLE_ABOVE = 1_000  # … tried only if the shard is longer than possible by one part in so many
_SHUFFLE_LEAST = 4_096  # … and by so many elements

_Size = tuple[int, int]  # numel, granule
_Placement = list[tuple[int, int]]  # index of the parameter, its offset


def start_unit(itemsize: int) -> int:
    """Elements whose multiples are legal starts of a parameter."""
    return START_BYTES // gcd(START_BYTES, itemsize)


def shard_unit(world_size: int, itemsize: int) -> int:
    """Elements whose multiples are legal shard sizes; itself a multiple of `start_unit`."""
    return SHARD_BYTES // gcd(SHARD_BYTES, itemsize) if world_size > 1 else start_unit(itemsize)


@lru_cache(maxsize=1024)
def pack(sizes: tuple[_Size, ...], world_size: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """Offsets in the caller's order, and the shard size. Empty parameters lie at 0."""
    if not any(numel for numel, _ in sizes):
        return (0,) * len(sizes), 0
    size, placement = _Search(sizes, world_size, itemsize).best()
    placed = dict(placement)
    return tuple(placed.get(index, 0) for index in range(len(sizes))), size


class _Search:
    """One search: the parameters that are not empty, prepared for many trials of a shard size."""

    def __init__(self, sizes: Sequence[_Size], world_size: int, itemsize: int) -> None:
        self.sizes, self.world_size = sizes, world_size
        self.start_unit, self.unit = start_unit(itemsize), shard_unit(world_size, itemsize)
        self.given = [index for index, (numel, _) in enumerate(sizes) if numel]
        self.kinds = sorted({sizes[index] for index in self.given}, reverse=True)  # long ones first
        self.coarse = sorted(self.given, key=lambda i: (-min(sizes[i]), -sizes[i][0]))
        self.long = sorted(self.given, key=lambda i: (-sizes[i][0], -sizes[i][1]))
        padded = [_round_up(sizes[index][0], self.start_unit) for index in self.given]
        slack = max(room - sizes[index][0] for room, index in zip(padded, self.given, strict=True))
        share = -(-(sum(padded) - slack) // world_size)
        self.lower = _round_up(max(share, *(min(kind) for kind in self.kinds)), self.unit)
        self.safe = _round_up(max(padded) + -(-sum(padded) // world_size), self.unit)

    def best(self) -> tuple[int, _Placement]:
        """The smallest shard size found, with the placement that fits it."""
        failed, sizes = None, self.shard_sizes()
        while (placement := self.place(size := next(sizes))) is None:
            failed = size
        if failed is None:  # the smallest legal size: nothing can be better
            return size, placement
        return self.shuffle(*self.refine(failed, size, placement))

    def shard_sizes(self) -> Iterator[int]:
        """Sizes worth a trial, upwards; the last one always succeeds."""
        tried = self.lower - self.unit
        for _ in range(min(_DENSE_SIZES, max(8, _DENSE_WORK // len(self.given)))):
            tried = self.next_legal(tried + self.unit)
            yield tried
        later = {self.next_legal(size) for size in self.round_sizes()}
        yield from sorted(size for size in later if tried < size < self.safe)
        yield self.safe

    def round_sizes(self) -> Iterator[int]:
        common = self.unit
        for numel, granule in self.kinds:
            yield max(self.lower, _round_up(numel, self.unit))  # no boundary need lie inside
            yield max(self.lower, _round_up(-(-numel // 2), self.unit))  # one at most
            if lcm(common, granule) <= self.safe:
                common = lcm(common, granule)
                yield _round_up(self.lower, common)
                yield _round_up(self.lower, common) + common
        for rung in range(_LADDER_RUNGS):
            yield _round_up(self.lower + ((self.safe - self.lower) >> rung), self.unit)

    def next_legal(self, size: int) -> int:
        """The smallest shard size from `size` on that the granule of every parameter over 2 S divides."""
        while True:
            common, shortest = self.unit, 0
            for numel, granule in self.kinds:
                if numel <= 2 * size:
                    break
                common, shortest = lcm(common, granule), numel
            legal = _round_up(size, common)
            if not shortest or 2 * legal < shortest:
                return legal
            size = _round_up(-(-shortest // 2), self.unit)  # from here on the shortest asks for nothing

    def refine(self, failed: int, size: int, placement: _Placement) -> tuple[int, _Placement]:
        """Halve the distance between a size that failed and one that did not."""
        for _ in range(_REFINEMENTS):
            middle = (failed + size) // 2
            trial = self.next_legal(_round_up(middle, self.unit))
            if trial >= size:
                failed = middle
            elif better := self.place(trial):
                size, placement = trial, better
            else:
                failed = trial
        return size, placement

    def shuffle(self, size: int, placement: _Placement) -> tuple[int, _Placement]:
        """Try shuffled orders on ever smaller sizes, where there is something to win."""
        random, order = Random(0), list(self.given)
        for _ in range(_SHUFFLE_WORK // len(order)):
            target = self.next_legal(_round_up((self.lower + size) // 2, self.unit))
            if target >= size or size - self.lower < max(_SHUFFLE_LEAST, self.lower // _SHUFFLE_ABOVE):
                break
            random.shuffle(order)
            if better := self.place_in_order(order, target):
                size, placement = target, better
        return size, placement

    def place(self, size: int) -> _Placement | None:
        """The first of the orders that fits into shards of this size, or None."""
        for order in (self.given, self.coarse, self.long):
            if placement := self.place_in_order(order, size):
                return placement
        return self.place_filling_gaps(size)

    def place_in_order(self, order: Sequence[int], size: int) -> _Placement | None:
        limit, cursor = self.world_size * size, 0
        placement: _Placement = []
        for index in order:
            numel, granule = self.sizes[index]
            offset = _earliest(cursor, numel, granule, self.start_unit, size)
            if offset is None or offset + numel > limit:
                return None
            placement.append((index, offset))
            cursor = _round_up(offset + numel, self.start_unit)
        return placement

    def place_filling_gaps(self, size: int) -> _Placement | None:
        """Always the parameter that leaves the smallest gap; of equals the one of the coarsest granule."""
        if len(self.given) * len(self.kinds) > _GAP_FILL_LIMIT:
            return None
        waiting: dict[_Size, list[int]] = {}
        for index in self.coarse:
            waiting.setdefault(self.sizes[index], []).append(index)
        limit, cursor = self.world_size * size, 0
        placement: _Placement = []
        while waiting:
            chosen, place = None, limit
            for kind in waiting:
                offset = _earliest(cursor, *kind, self.start_unit, size)
                if offset is not None and offset < place:
                    chosen, place = kind, offset
                    if place == cursor:
                        break
            if chosen is None or place + chosen[0] > limit:
                return None
            placement.append((waiting[chosen].pop(), place))
            cursor = _round_up(place + chosen[0], self.start_unit)
            if not waiting[chosen]:
                del waiting[chosen]
        return placement


def _earliest(cursor: int, numel: int, granule: int, aligned: int, size: int) -> int | None:
    """First legal offset from the aligned `cursor` on for one parameter; None if this shard size has none.

    Boundaries are aligned themselves, so a start before one that is both aligned and whole granules
    away from it lies a multiple of lcm(granule, aligned) before it.
    """
    boundary = (cursor // size + 1) * size
    if cursor + numel <= boundary:
        return cursor
    step = lcm(granule, aligned)
    offset = boundary - (boundary - cursor) // step * step
    if offset + numel <= boundary + size or size % granule == 0:
        return offset
    # Longer than a shard, whose size its granule does not divide, so one boundary at most may lie inside:
    # skip this one and try the next.
    offset = boundary + size - size // step * step
    return offset if offset + numel <= boundary + 2 * size else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
