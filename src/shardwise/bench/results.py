"""What was measured: medians, quartiles, ratios."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["LeftOut", "Report", "Row", "Spread", "spread"]


class Spread(NamedTuple):
    """The middle half of some values."""

    median: float
    low: float  #: first quartile
    high: float  #: third quartile


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


@dataclass
class Row:
    """One contender. Lists have an entry for each round; times are those of the slowest rank."""

    name: str
    seconds: list[float] = field(default_factory=list[float])
    issue_seconds: list[float] = field(default_factory=list[float])  #: until the host was done; accelerators
    losses: list[float] = field(default_factory=list[float])  #: means over ranks, warm-up included
    wire_bytes: float = 0.0  #: received by one rank in one step, by the best algorithm
    peak_bytes: int = 0  #: held at most in one step by the rank that holds most
    calls: int = 0  #: Python and C functions called in one step


@dataclass
class LeftOut:
    """A contender that raised, on one rank at least."""

    name: str
    error: str  #: ``ValueError: …``, the first line
    trace: str = ""  #: of the rank that raised, the first of several


@dataclass
class Report:
    """A run. ``items``: tokens or samples of one step, of all ranks together."""

    workload: str
    items: int
    unit_of_items: str
    world: int
    device: str
    precision: str
    strategy: str
    accumulation: int
    tolerance: float
    rows: list[Row]  #: of the contenders that ran
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])

    def ratio(self, name: str, base: str) -> Spread:
        """Step time of ``name`` over that of ``base``, round by round."""
        pairs = zip(self._row(name).seconds, self._row(base).seconds, strict=True)
        return spread([mine / other for mine, other in pairs])

    def rate(self, name: str) -> float:
        """Items a second."""
        return self.items / spread(self._row(name).seconds).median

    def disagreement(self) -> float:
        """The largest difference of two contenders' losses in any step, relative to the loss."""
        return max((max(step) - min(step)) / max(abs(min(step)), 1e-12)
                   for step in zip(*(row.losses for row in self.rows), strict=True))

    @property
    def agrees(self) -> bool:
        """Do all contenders compute the same?"""
        return self.disagreement() <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every sample, and where it was made."""
        base = self.rows[0].name
        found = asdict(self)
        for row in found["rows"]:
            row |= {"step": spread(row["seconds"])._asdict(), "per_second": self.rate(row["name"]),
                    f"ratio_to_{base}": self.ratio(row["name"], base)._asdict()}
        return found | {"disagreement": self.disagreement(), "torch": torch.__version__,
                        "python": platform.python_version(), "machine": platform.platform(),
                        "threads": torch.get_num_threads()}

    def _row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)
