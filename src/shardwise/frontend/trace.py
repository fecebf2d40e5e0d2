"""``with shardwise.trace(path):`` what each unit computes, gathers, reduces and copies, and when.

The moves of the engine are watched by standing in front of its methods for the time of the trace,
so that a step that is not traced pays nothing. On the CPU a span is the host's time. On an
accelerator it is the time between two events on the lane that does the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.lanes import Lane, Lanes
from ..engine.collect import Collector
from ..engine.reduce import Reducer
from ..engine.session import Session
from ..engine.unit import Unit
from ..plan.lifecycle import Residency
from .spans import Span, Summary, summarise, write

__all__ = ["Trace", "trace"]

Stamp = Any
"""A point in time: nanoseconds of the host, or an event of an accelerator."""


class _HostClock:
    """For lanes whose work is done when its call returns."""

    def __init__(self) -> None:
        self._zero = time.perf_counter_ns()

    def stamp(self, lane: Lane) -> Stamp:
        return time.perf_counter_ns()

    def microseconds(self, stamp: Stamp) -> float:
        return (stamp - self._zero) / 1e3


class _EventClock:
    """For lanes that are streams: an event behind the work issued so far."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        self._zero = self.stamp(lanes.compute)

    def stamp(self, lane: Lane) -> Stamp:
        event = self._api.Event(enable_timing=True)
        with lane:
            event.record()
        return event

    def microseconds(self, stamp: Stamp) -> float:
        stamp.synchronize()
        return self._zero.elapsed_time(stamp) * 1e3


@dataclass
class _Work:
    """A span whose ends are stamps."""

    kind: str
    unit: Unit
    lane: str
    begin: Stamp
    phase: str
    nbytes: int
    end: Stamp = None


@dataclass
class Trace:
    """What was seen; ``print`` it for a table. ``spans`` and ``summary`` are there when the context has been left."""

    path: Path
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def summary(self) -> Summary:
        """Totals of each unit, and ``share``: the part of communication that was not hidden."""
        return summarise(self.spans)

    def __str__(self) -> str:
        return f"{self.path}\n{self.summary}"


@contextmanager
def trace(path: str | Path) -> Iterator[Trace]:
    """Write what the units of all models do inside as a trace for ui.perfetto.dev or chrome://tracing.

    One step is a good length. Each rank writes a file of its own: among several ranks, the rank's
    number comes before the ending of ``path`` (``step.json`` gives ``step.rank0.json`` …). Nothing
    is written if the step raises.

    On the CPU a gather or reduction that goes on while the host computes is taken to last until
    it was waited for, for nobody tells when it was done.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    path = Path(path)
    result = Trace(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if world > 1 else path)
    watcher = _Watcher()
    with ExitStack() as stack:
        for owner, name, stand_in in watcher.stand_ins():
            stack.enter_context(patch.object(owner, name, stand_in(getattr(owner, name))))
        yield result
    result.spans = watcher.spans()
    write(result.path, result.spans, rank)


class _Watcher:
    """Makes spans of the calls that it stands in front of."""

    def __init__(self) -> None:
        self._clocks: dict[int, _HostClock | _EventClock] = {}
        self._done: list[_Work] = []
        self._under_way: dict[tuple[str, Unit], _Work] = {}
        self._entered: list[tuple[Unit, str]] = []  # units in use with their phase; the innermost computes
        self._computing: _Work | None = None
        self._pauses = 0
        self._owners: dict[int, Unit] = {}  # by the id of a collector or reducer

    def stand_ins(self) -> list[tuple[type, str, Callable[[Any], Any]]]:
        """(class, method, what makes the method that stands in front of it)"""
        return [(Unit, "unshard", self._unshard), (Unit, "wait", self._wait), (Reducer, "start", self._start),
                (Reducer, "finish", self._finish), (Session, "use", self._use), (Session, "unuse", self._unuse),
                (Collector, "_flush", self._flush)]

    def spans(self) -> list[Span]:
        """All that has ended."""
        return [Span(w.kind, w.unit.name, w.lane, self._clock(w.unit).microseconds(w.begin),
                     self._clock(w.unit).microseconds(w.end), w.phase, w.nbytes) for w in self._done]

    # ------------------------------------------------------------------ time
    def _clock(self, unit: Unit) -> _HostClock | _EventClock:
        clock = self._clocks.get(id(unit.lanes))
        if clock is None:
            device = unit.storages[0].compute_device if unit.storages else torch.device("cpu")
            clock = _HostClock() if unit.lanes.immediate else _EventClock(unit.lanes, device)
            self._clocks[id(unit.lanes)] = clock
        return clock

    def _begin(self, kind: str, unit: Unit, lane: str, phase: str, nbytes: int = 0) -> _Work:
        return _Work(kind, unit, lane, self._clock(unit).stamp(getattr(unit.lanes, lane)), phase, nbytes)

    def _end(self, work: _Work | None) -> None:
        if work is not None:
            work.end = self._clock(work.unit).stamp(getattr(work.unit.lanes, work.lane))
            self._done.append(work)

    def _leave_under_way(self, unit: Unit, work: _Work) -> None:
        """It goes on until it is waited for, where the transport works beside the host."""
        if unit.groups.shard.overlaps or not unit.lanes.immediate:
            self._under_way[work.kind, unit] = work
        else:
            self._end(work)

    @contextmanager
    def _paused(self, *, host_works: bool = False) -> Iterator[None]:
        """Nothing is computed inside. ``host_works``: not on streams, where computation goes on meanwhile."""
        if host_works and self._entered and not self._entered[-1][0].lanes.immediate:
            yield
            return
        if not self._pauses:
            self._end(self._computing)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._computing = self._begin("compute", self._entered[-1][0], "compute",
                                              self._entered[-1][1]) if self._entered else None

    # ------------------------------------------------------------------ communication
    def _unshard(self, original: Any) -> Any:
        def unshard(unit: Unit) -> None:
            if unit.residency is Residency.SHARDED:
                with self._paused(host_works=True):
                    work = self._begin("gather" if unit.groups.shard.size > 1 else "copy", unit, "gather", "")
                    original(unit)
                    work.nbytes = unit.gather.nbytes
                    if unit.lanes.immediate:
                        self._leave_under_way(unit, work)
                    else:
                        self._end(work)  # on its stream, all of it was issued
        return unshard

    def _wait(self, original: Any) -> Any:
        def wait(unit: Unit) -> None:
            if unit.residency is Residency.UNSHARDING:
                with self._paused(host_works=True):
                    original(unit)
                    for kind in ("gather", "copy"):
                        self._end(self._under_way.pop((kind, unit), None))
        return wait

    def _start(self, original: Any) -> Any:
        def start(reducer: Reducer, full: Tensor, *args: Any, **kwargs: Any) -> Any:
            unit = self._owners.get(id(reducer))
            if unit is None or unit.groups.world_size == 1:
                return original(reducer, full, *args, **kwargs)
            with self._paused(host_works=True):
                unit.lanes.reduce.wait(unit.lanes.compute.mark())  # not under way before its input is computed
                work = self._begin("reduce", unit, "reduce", "backward", full.numel() * full.element_size())
                reduced = original(reducer, full, *args, **kwargs)
                self._leave_under_way(unit, work)
                return reduced
        return start

    def _finish(self, original: Any) -> Any:
        def finish(reducer: Reducer, *args: Any, **kwargs: Any) -> None:
            with self._paused(host_works=True):
                original(reducer, *args, **kwargs)
                unit = self._owners.get(id(reducer))
                if unit is not None:
                    self._end(self._under_way.pop(("reduce", unit), None))
        return finish

    # ------------------------------------------------------------------ computation
    def _use(self, original: Any) -> Any:
        def use(session: Session, unit: Unit) -> None:
            for owner in (unit, *unit.needs):
                self._owners |= {id(owner.collector): owner, id(owner.reducer): owner}
            with self._paused():
                original(session, unit)
                self._entered.append((unit, session.pass_.name.lower()))
        return use

    def _unuse(self, original: Any) -> Any:
        def unuse(session: Session, unit: Unit, *, free: bool) -> None:
            with self._paused():
                self._entered = [entry for entry in self._entered if entry[0] is not unit]
                original(session, unit, free=free)
        return unuse

    def _flush(self, original: Any) -> Any:
        def flush(collector: Collector) -> None:
            unit = self._owners.get(id(collector))
            if unit is None:
                original(collector)
                return
            with self._paused(host_works=True):
                work = self._begin("copy", unit, "compute", "backward", collector.nbytes)
                original(collector)
                self._end(work)
        return flush
