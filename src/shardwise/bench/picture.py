"""The picture: step time, host work and memory of each contender, as bars with their spread."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .results import Report, spread

__all__ = ["draw", "require_matplotlib"]

_OURS, _OTHERS = "#1b6ca8", "#b8b8b8"


def require_matplotlib() -> None:
    """Raise ``ConfigurationError`` where no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("a picture needs matplotlib, which is not installed",
                                 remedy="Install matplotlib, or leave --picture out: the table and --json stay.")


def draw(report: Report, path: Path) -> None:
    """Write the picture to ``path``; its ending chooses the format."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 0.9 + 0.45 * len(report.rows)), sharey=True)
    names = [row.name for row in report.rows][::-1]
    rows = report.rows[::-1]
    colors = [_OURS if name in ("wrapper", "fully_shard") else _OTHERS for name in names]
    steps = [spread(row.seconds) for row in rows]
    errors = [[step.median - step.low for step in steps], [step.high - step.median for step in steps]]
    _bars(axes[0], "step, ms (median, quartiles)", names, [1e3 * step.median for step in steps], colors)
    axes[0].errorbar([1e3 * step.median for step in steps], names, fmt="none", ecolor="black", capsize=3,
                     xerr=[[1e3 * value for value in side] for side in errors])
    _bars(axes[1], "peak memory of a rank, MB", names, [row.peak_bytes / 1e6 for row in rows], colors)
    _bars(axes[2], "function calls of the host in a step", names, [float(row.calls) for row in rows], colors)
    figure.suptitle(f"{report.workload}; {report.world} ranks, {report.device}, {report.precision}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axis: Any, title: str, names: list[str], values: list[float], colors: list[str]) -> None:
    axis.barh(names, values, color=colors, height=0.6)
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
