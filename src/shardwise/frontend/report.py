"""What was planned, and what is held: ``plan_of``, ``memory_of`` and ``observe``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ..engine.build import session_of, units_below
from ..engine.unit import Unit
from ..errors import LifecycleError
from ..plan.layout import FlatLayout, find_offenders

__all__ = ["Memory", "ParameterPlan", "Plan", "UnitPlan", "memory_of", "observe", "plan_of", "told"]


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter of a unit."""

    fqn: str
    shape: tuple[int, ...]
    stored: torch.dtype
    compute: torch.dtype
    trained: bool
    layout: FlatLayout = field(repr=False)
    index: int = field(repr=False)  #: in ``layout``

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of its rows (elements for 0-d and 1-d) on each rank."""
        return self.rows_of(range(self.layout.world_size))

    def rows_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The same for some ranks, as there may be thousands."""
        granule = self.layout.parameters[self.index].granule
        return tuple(self.layout.span(self.index, rank).numel // granule for rank in ranks)


@dataclass(frozen=True)
class UnitPlan:
    """One unit. ``shard_bytes``: at rest, stored dtype; ``gathered_bytes``: in use, compute dtype."""

    name: str
    ranks: int
    parameters: tuple[ParameterPlan, ...]
    shard_bytes: int
    gathered_bytes: int
    padding: float  #: share of the gathered elements that belong to no parameter
    offenders: tuple[str, ...]  #: parameters that cost the padding, where it is large


@dataclass(frozen=True)
class Plan:
    """The units of a model; ``print`` it for a table."""

    units: tuple[UnitPlan, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        for unit in self.units:
            lines.append(
                f"{unit.name}: {len(unit.parameters)} parameters over {unit.ranks} ranks, "
                f"{unit.shard_bytes:,} B at rest, {unit.gathered_bytes:,} B in use, "
                f"padding {unit.padding:.2%}"
            )
            lines.extend(_line(parameter) for parameter in unit.parameters)
            if unit.offenders:
                lines.append(f"  large padding, because of {', '.join(unit.offenders)}")
        shard, gathered = (sum(getattr(u, name) for u in self.units) for name in ("shard_bytes", "gathered_bytes"))
        lines.append(f"total: {len(self.units)} units, {shard:,} B at rest on each rank, "
                     f"{gathered:,} B if all were gathered")
        return "\n".join(lines)


def _line(p: ParameterPlan) -> str:
    world = p.layout.world_size
    rows = " ".join(map(str, p.rows_of(range(min(world, 8))))) + (" …" if world > 8 else "")
    dtype = str(p.stored).removeprefix("torch.")
    if p.compute is not p.stored:
        dtype += "->" + str(p.compute).removeprefix("torch.")
    return f"  {p.fqn:40s} {tuple(p.shape)!s:20s} {dtype:18s} {'trained' if p.trained else 'frozen':8s} rows {rows}"


def plan_of(model: nn.Module) -> Plan:
    """The units at and below ``model``, their parameters, rows for each rank, and padding."""
    return Plan(tuple(_unit_plan(name, unit) for name, unit in _named_units(model)))


def _named_units(model: nn.Module) -> list[tuple[str, Unit]]:
    units = units_below(model)
    if not units:
        raise LifecycleError("the model has no sharded units", unit=type(model).__name__,
                             remedy="Apply fully_shard or FullyShardedDataParallel first.")
    return units


def _unit_plan(name: str, unit: Unit) -> UnitPlan:
    parameters: list[ParameterPlan] = []
    offenders: list[str] = []
    numel = padding = 0
    for storage in unit.storages:
        numel += storage.layout.flat_numel
        padding += storage.layout.padding
        offenders += [fqn for offender in find_offenders(storage.layout) for fqn in offender.fqns]
        for index, spec in enumerate(storage.layout.parameters):
            parameters.append(ParameterPlan(
                f"{name}.{spec.fqn}" if name else spec.fqn, spec.shape, storage.stored_dtype,
                storage.compute_dtype, storage.leaves[index].requires_grad,
                storage.layout, index,
            ))
    return UnitPlan(
        name or "(root)", unit.groups.shard.size, tuple(parameters),
        sum(s.shard.numel() * s.shard.element_size() for s in unit.storages),
        sum(s.layout.flat_numel * s.compute_dtype.itemsize for s in unit.storages),
        padding / numel if numel else 0.0, tuple(offenders),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that the units of a model hold on this rank now."""

    shards: int  #: parameters at rest
    gathered: int  #: parameters in use
    gradients: int  #: ``.grad`` of the user's parameters
    unsent: int  #: gradients collected and not reduced yet


def memory_of(model: nn.Module) -> Memory:
    """Count the bytes held on this rank for parameters and gradients of ``model``'s units."""
    units = [unit for _, unit in _named_units(model)]
    storages = [storage for unit in units for storage in unit.storages]
    gradients = {
        g.untyped_storage().data_ptr(): g.untyped_storage().nbytes()
        for storage in storages for seen in storage.visible if (g := seen.parameter.grad) is not None
    }
    return Memory(
        shards=sum(s.shard.numel() * s.shard.element_size() for s in storages),
        gathered=sum(unit.gather.nbytes + unit.gather.kept_nbytes for unit in units),
        gradients=sum(gradients.values()),
        unsent=sum(unit.collector.nbytes for unit in units),
    )


@contextmanager
def observe(model: nn.Module, callback: Callable[[str, str, int, int], None]) -> Iterator[None]:
    """Inside, call ``callback(event, unit, nbytes, time_ns)`` when a unit's memory comes or goes.

    ``event`` is ``gather`` (nbytes are allocated), ``free``, or ``reduce`` (nbytes are sent).
    ``unit`` is the unit's FQN; ``time_ns`` is ``time.perf_counter_ns()``.
    """
    with ExitStack() as stack:
        for name, unit in _named_units(model):
            session = session_of(unit)
            label = (unit.fqn if session is not None else name) or "(root)"

            def tell(event: str, nbytes: int, label: str = label) -> None:
                callback(event, label, nbytes, time.perf_counter_ns())

            stack.enter_context(told(unit, tell))
        yield


@contextmanager
def told(unit: Unit, listener: Callable[[str, int], None]) -> Iterator[None]:
    """Inside, ``listener`` is told what ``unit`` does, after whoever is told already."""
    before = unit.observer

    def tell(event: str, nbytes: int) -> None:
        if before is not None:
            before(event, nbytes)
        listener(event, nbytes)

    unit.observer = tell
    try:
        yield
    finally:
        unit.observer = before
