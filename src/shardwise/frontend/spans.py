"""Spans of time, on lanes: how long, how much of it at once, and as a file for a trace viewer.

All times are microseconds since the trace began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

__all__ = ["KINDS", "Span", "Summary", "covered", "read", "summarise", "write"]

#: what a span can be; the first is computation, the last two kinds of communication
KINDS = ("compute", "copy", "gather", "reduce")
_LANES = ("compute", "gather", "reduce")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """``kind`` of work of one unit, on a lane (``compute``, ``gather`` or ``reduce``)."""

    kind: str
    unit: str
    lane: str
    begin: float
    end: float
    phase: str = ""  #: forward or backward
    nbytes: int = 0


@dataclass(frozen=True)
class Summary:
    """Totals; ``print`` it for a table. ``exposed``: the part of ``communication`` in which nothing is computed."""

    by_unit: dict[str, dict[str, float]]  #: unit -> kind -> microseconds
    communication: float
    exposed: float

    @property
    def share(self) -> float:
        """The share of communication that is not hidden behind computation, 0 to 1."""
        return self.exposed / self.communication if self.communication else 0.0

    def __str__(self) -> str:
        width = max(map(len, ("unit", *self.by_unit)))
        heads = [f"{kind} ms" for kind in KINDS]
        lines = ["  ".join([f"{'unit':<{width}}", *heads])]
        for unit, totals in self.by_unit.items():
            cells = [f"{totals[kind] / 1e3:>{len(head)}.2f}" for kind, head in zip(KINDS, heads, strict=True)]
            lines.append("  ".join([f"{unit:<{width}}", *cells]))
        lines.append(f"communication {self.communication / 1e3:.2f} ms, "
                     f"of which not hidden {self.exposed / 1e3:.2f} ms ({self.share:.0%})")
        return "\n".join(lines)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > begin:
            result.append((begin, end))
    return result


def covered(intervals: Iterable[Interval], by: Iterable[Interval]) -> float:
    """How much of the time in ``intervals`` is in ``by`` too."""
    others = joined(by)
    return sum(max(0.0, min(end, stop) - max(begin, start))
               for begin, end in joined(intervals) for start, stop in others)


def summarise(spans: Sequence[Span]) -> Summary:
    """Totals of each unit, and the share of communication that is not hidden."""
    by_unit: dict[str, dict[str, float]] = {}
    for span in spans:
        totals = by_unit.setdefault(span.unit, dict.fromkeys(KINDS, 0.0))
        totals[span.kind] += span.end - span.begin
    moved = joined((s.begin, s.end) for s in spans if s.kind in ("gather", "reduce"))
    busy = [(s.begin, s.end) for s in spans if s.kind in ("compute", "copy")]
    total = sum(end - begin for begin, end in moved)
    return Summary(by_unit, total, total - covered(moved, busy))


def write(path: Path, spans: Sequence[Span], rank: int) -> None:
    """Write the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing read."""
    summary = summarise(spans)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    events += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": _LANES.index(lane), "args": {"name": lane}}
               for lane in _LANES]
    events += [{"ph": "X", "name": f"{s.kind} {s.unit}", "cat": s.kind, "pid": rank, "tid": _LANES.index(s.lane),
                "ts": s.begin, "dur": s.end - s.begin,
                "args": {"unit": s.unit, "phase": s.phase, "bytes": s.nbytes}} for s in spans]
    other = {"communication_us": summary.communication, "exposed_us": summary.exposed, "exposed_share": summary.share}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n")


def read(path: Path) -> list[Span]:
    """The spans of a file that ``write`` made. Raises ``ConfigurationError`` for another file."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        return [Span(e["cat"], e["args"]["unit"], _LANES[e["tid"]], e["ts"], e["ts"] + e["dur"],
                     e["args"]["phase"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"{path} is no trace of shardwise", expected="a file from shardwise.trace",
                                 got=f"{type(error).__name__}: {error}") from error
