"""Where each parameter of a unit lies in the flat buffer, and which part of it each rank holds.

`FlatLayout` is the answer: frozen, and it checks itself. `plan_layout` finds one with the smallest
shard (`packing` has the search), and `find_offenders` says who is to blame where that is still large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import itemgetter

from shardwise.errors import ConfigurationError
from shardwise.plan.packing import pack, shard_unit, start_unit

__all__ = ["FlatLayout", "Offender", "ParameterSpec", "Span", "find_offenders", "plan_layout", "row_granule"]

_OFFENDER_KINDS = 16  # coarsest granules that `find_offenders` looks at


def row_granule(shape: Sequence[int]) -> int:
    """Elements of one row, everything behind dimension 0; 1 where there is no such thing."""
    return max(1, prod(shape[1:]))


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout has to know of one parameter."""

    fqn: str
    shape: tuple[int, ...]
    granule: int  # elements that no shard boundary may cut, counted from the parameter's first element

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise ConfigurationError("a granule must hold at least one element", fqn=self.fqn,
                                     expected="1 or more", got=self.granule)
        if any(size < 0 for size in self.shape):
            raise ConfigurationError("a shape cannot be negative", fqn=self.fqn, got=self.shape)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """The elements ``[start, stop)`` of one parameter that one rank holds; may be empty."""

    start: int
    stop: int
    shard_offset: int  # where `start` lies in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Parameters laid one behind the other in a flat buffer of ``world_size`` equal shards.

    ::

        rank    |   0   |   1   |   2   |     three shards of S = 8 elements
                 aaa.BBBBbbbbBBBBcccccc..

        a   3 elements; the dot behind it is padding, so that b starts at an aligned place
        b   3 rows of 4 elements (BBBB, bbbb, BBBB): with one row as its granule, the boundary at 8
            falls between two rows; rank 0 holds row 0, rank 1 holds rows 1 and 2
        c   6 elements; the dots at the end are padding, so that all shards are equal

    Every parameter is contiguous and may span shards. A rank's part of it is one range of whole
    granules: with rows as granules, one block of rows.
    """

    parameters: tuple[ParameterSpec, ...]  # in the caller's order
    offsets: tuple[int, ...]  # first element in the flat buffer, in the caller's order
    world_size: int
    shard_numel: int  # S
    itemsize: int  # bytes of one element of the flat buffer

    def __post_init__(self) -> None:
        _check_sizes(self.world_size, self.itemsize)
        unit = shard_unit(self.world_size, self.itemsize)
        if self.shard_numel < 0 or self.shard_numel % unit:
            raise ConfigurationError("layout: the shard is not aligned", got=self.shard_numel,
                                     expected=f"a multiple of {unit} elements")
        if len(self.parameters) != len(self.offsets):
            raise ConfigurationError("layout: one offset per parameter is needed", got=len(self.offsets),
                                     expected=len(self.parameters))
        end, before = 0, "the buffer's start"
        for offset, spec in sorted(zip(self.offsets, self.parameters, strict=True), key=itemgetter(0)):
            if not spec.numel:
                continue
            if offset < end:
                raise ConfigurationError(f"layout: the parameter overlaps {before}", fqn=spec.fqn,
                                         expected=f"an offset of {end} or more", got=offset)
            self._check_place(spec, offset)
            end, before = offset + spec.numel, f"{spec.fqn!r}"

    def _check_place(self, spec: ParameterSpec, offset: int) -> None:
        aligned, size = start_unit(self.itemsize), self.shard_numel
        if offset % aligned:
            raise ConfigurationError("layout: the parameter is not aligned", fqn=spec.fqn, got=offset,
                                     expected=f"a multiple of {aligned} elements")
        stop = offset + spec.numel
        if stop > self.flat_numel:
            raise ConfigurationError("layout: the parameter ends behind the flat buffer", fqn=spec.fqn,
                                     expected=f"{self.flat_numel} or less", got=stop)
        boundary = (offset // size + 1) * size
        cut = boundary < stop and (boundary - offset) % spec.granule
        if cut or (boundary + size < stop and size % spec.granule):
            raise ConfigurationError("layout: a shard boundary cuts a granule", fqn=spec.fqn,
                                     expected=f"boundaries at multiples of {spec.granule} elements",
                                     got=f"shards of {size} and offset {offset}")

    @property
    def flat_numel(self) -> int:
        return self.world_size * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.flat_numel - sum(spec.numel for spec in self.parameters)

    @property
    def padding_ratio(self) -> float:
        """Padding per parameter element; 0 when there are no elements."""
        padding = self.padding
        return padding / (self.flat_numel - padding) if self.flat_numel > padding else 0.0

    def holders(self, index: int) -> range:
        """The ranks that hold any of parameter `index`."""
        numel, offset = self.parameters[index].numel, self.offsets[index]
        if not numel:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)

    def span(self, index: int, rank: int) -> Span:
        """What `rank` holds of parameter `index`: whole granules, empty if nothing."""
        if not 0 <= rank < self.world_size:
            raise ConfigurationError("layout: no such rank", rank=rank,
                                     expected=f"0 to {self.world_size - 1}")
        numel = self.parameters[index].numel
        ahead = rank * self.shard_numel - self.offsets[index]  # elements from its first to the shard's first
        start = min(max(ahead, 0), numel)
        stop = min(max(ahead + self.shard_numel, 0), numel)
        return Span(start, stop, start - ahead if start < stop else 0)


@dataclass(frozen=True)
class Offender:
    """Parameters whose common granule costs padding, and what finer granules would save."""

    granule: int
    fqns: tuple[str, ...]
    saving: int  # flat elements saved if these, and the offenders listed before, had granules of 1


def plan_layout(parameters: Sequence[ParameterSpec], world_size: int, itemsize: int) -> FlatLayout:
    """The layout with the smallest shard that the search finds; the same input gives the same layout."""
    _check_sizes(world_size, itemsize)
    specs = tuple(parameters)
    sizes = tuple((spec.numel, spec.granule) for spec in specs)
    offsets, shard_numel = pack(sizes, world_size, itemsize)
    return FlatLayout(specs, offsets, world_size, shard_numel, itemsize)


def find_offenders(layout: FlatLayout, threshold: float = 0.05) -> tuple[Offender, ...]:
    """Who causes the padding, when it is more than `threshold` of the parameters; else nobody.

    Plans again with the granule that costs most set to 1, until the rest is small or no granule helps.
    """
    found: list[Offender] = []
    while layout.padding_ratio > threshold:
        granules = sorted({spec.granule for spec in layout.parameters if spec.numel} - {1}, reverse=True)
        trials = [(_with_elements(layout, granule), granule) for granule in granules[:_OFFENDER_KINDS]]
        best, granule = min(trials, key=lambda trial: trial[0].shard_numel, default=(layout, 1))
        saving = layout.flat_numel - best.flat_numel
        if saving <= 0:
            break
        fqns = tuple(spec.fqn for spec in layout.parameters if spec.granule == granule and spec.numel)
        found.append(Offender(granule, fqns, saving))
        layout = best
    return tuple(found)


def _with_elements(layout: FlatLayout, granule: int) -> FlatLayout:
    specs = [replace(spec, granule=1) if spec.granule == granule else spec for spec in layout.parameters]
    return plan_layout(specs, layout.world_size, layout.itemsize)


def _check_sizes(world_size: int, itemsize: int) -> None:
    for name, value in (("world size", world_size), ("item size", itemsize)):
        if value < 1:
            raise ConfigurationError(f"layout: the {name} must be positive", expected="1 or more", got=value)
