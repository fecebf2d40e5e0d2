"""The picture: the loss, and one rank's memory over one step with a band for each gathered unit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from measure import MB, Bytes, in_mb
from torch import nn

from shardwise import memory_of

__all__ = ["Recorder", "Span", "draw"]

Span = tuple[float, float, int]  # from and to in ms, bytes


@dataclass
class Recorder:
    """Remembers one step: when each unit was gathered and freed, and where the phases begin.

    An instance is the callback of ``shardwise.observe``. ``begin`` forgets the step before, and after
    ``phase("end")`` nothing is recorded. Times are nanoseconds since ``begin``.
    """

    model: nn.Module | None = None
    recording: bool = False
    begun: int = 0
    events: list[tuple[int, str, str, int]] = field(default_factory=list)  # time, event, unit, bytes
    gradients: list[tuple[int, int, int]] = field(default_factory=list)  # time, bytes kept, bytes on the way
    phases: list[tuple[int, str]] = field(default_factory=list)  # time, name

    def __call__(self, event: str, unit: str, nbytes: int, time_ns: int) -> None:
        if self.recording:
            self.events.append((time_ns - self.begun, event, unit, nbytes))
            self._weigh()

    def begin(self) -> None:
        for remembered in (self.events, self.gradients, self.phases):
            remembered.clear()
        self.recording, self.begun = True, time.perf_counter_ns()

    def phase(self, name: str) -> None:
        """From here on this step does ``name``."""
        self.phases.append((time.perf_counter_ns() - self.begun, name))
        self._weigh()
        self.recording = name != "end"

    def _weigh(self) -> None:
        if self.model is not None:
            now = memory_of(self.model)
            self.gradients.append((time.perf_counter_ns() - self.begun, now.gradients, now.unsent))

    def peak(self) -> int:
        """The most that a step needed at one moment beside what the rank keeps: parameters and gradients."""
        spans = [span for unit in self.bands().values() for span in unit]
        moments = [(at / 1e6, unsent) for at, _, unsent in self.gradients]
        return max((unsent + _gathered(spans, at) for at, unsent in moments), default=0)

    def bands(self) -> dict[str, list[Span]]:
        """For each unit, in the order of first use, when it was in memory."""
        bands: dict[str, list[Span]] = {}
        since: dict[str, tuple[int, int]] = {}
        for at, event, unit, nbytes in self.events:
            if event == "gather":
                bands.setdefault(unit, [])
                since.setdefault(unit, (at, nbytes))
            elif event == "free" and unit in since:
                begun, size = since.pop(unit)
                bands[unit].append((begun / 1e6, at / 1e6, size))
        end = max((at for at, _ in self.phases), default=0)
        for unit, (begun, size) in since.items():  # still there
            bands[unit].append((begun / 1e6, end / 1e6, size))
        return bands


def draw(path: Path, recorder: Recorder, held: Bytes, whole: Bytes,
         curves: Mapping[str, Sequence[float]]) -> None:
    """Write the picture aside, then rename: nobody ever finds half a file."""
    figure = Figure(figsize=(10, 11), layout="constrained")
    loss, memory, units = figure.subplots(3, 1, height_ratios=[3, 4, 3])
    _draw_loss(loss, curves)
    _draw_memory(memory, recorder, held, whole)
    _draw_units(units, recorder)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(aside, dpi=130, format="png")
    aside.replace(path)


def _draw_loss(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    styles: list[dict[str, Any]] = [
        {"color": "tab:blue", "lw": 3}, {"color": "black", "lw": 1.2, "ls": (0, (4, 3))}
    ]
    for (name, values), style in zip(curves.items(), styles, strict=False):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set(title="Loss while training", xlabel="step", ylabel="nats per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, recorder: Recorder, held: Bytes, whole: Bytes) -> None:
    edges, layers = _layers(recorder, held)
    heights = [[height / MB for height in layer.heights] for layer in layers]
    axes.stackplot(edges, heights, colors=[layer.color for layer in layers], step="post")
    top, end = whole.total / MB, edges[-1]
    axes.axhline(top, color="black", ls="--", lw=1.2)
    axes.text(end, top * 0.985, f"unsharded: {in_mb(whole.total)} on every rank ", ha="right", va="top")
    below = 0.0
    for layer in layers:
        if layer.label:
            height = max(layer.heights) / MB
            right = layer.label.startswith("gradients")
            axes.text(end * (0.99 if right else 0.01), below + height / 2, layer.label, va="center",
                      ha="right" if right else "left")
            below += height
    for (at, name), (until, _) in pairwise(recorder.phases):
        axes.axvline(at / 1e6, color="0.4", lw=0.8, ls=":")
        if until - at > 0.07e6 * end:
            axes.text((at + until) / 2e6, top * 1.04, name, ha="center", va="bottom", color="0.3")
    axes.set(title="Memory of rank 0 over one step: its own shards (grey), gradients on the way (dark), "
                   "gathered units",
             ylabel="MB", xlim=(0, end), ylim=(0, top * 1.15))


def _draw_units(axes: Axes, recorder: Recorder) -> None:
    bands = recorder.bands()
    for row, (spans, color) in enumerate(zip(bands.values(), _colors(len(bands)), strict=True)):
        axes.broken_barh([(begun, freed - begun) for begun, freed, _ in spans], (row - 0.4, 0.8), color=color)
    for at, _ in recorder.phases:
        axes.axvline(at / 1e6, color="0.4", lw=0.8, ls=":")
    sizes = [max((size for *_, size in spans), default=0) for spans in bands.values()]
    labels = [f"{unit or 'root'}  {in_mb(size)}" for unit, size in zip(bands, sizes, strict=True)]
    axes.set_yticks(range(len(bands)), labels, fontsize=min(9, 240 / max(1, len(bands))))
    axes.invert_yaxis()
    axes.set(title="When each unit is gathered", xlabel="time in the step (ms)",
             xlim=(0, recorder.phases[-1][0] / 1e6))


def _colors(count: int) -> list[Any]:
    return [matplotlib.colormaps["turbo"](0.05 + 0.9 * (number + 0.5) / count) for number in range(count)]


@dataclass(frozen=True)
class _Layer:
    label: str
    color: Any
    heights: list[int]


def _layers(recorder: Recorder, held: Bytes) -> tuple[list[float], list[_Layer]]:
    """The moments in ms at which something changes, and what is held from each one on, bottom up."""
    bands = recorder.bands()
    moments = {0.0, *(at / 1e6 for at, _ in recorder.phases), *(at / 1e6 for at, *_ in recorder.gradients)}
    for spans in bands.values():
        moments.update(at for span in spans for at in span[:2])
    edges = sorted(moments)
    layers = [
        _Layer("optimizer state", "0.60", [held.optimizer] * len(edges)),
        _Layer("parameters", "0.72", [held.parameters] * len(edges)),
        _Layer("gradients", "0.84", [_latest(recorder.gradients, edge)[0] for edge in edges]),
        _Layer("", "0.30", [_latest(recorder.gradients, edge)[1] for edge in edges]),
    ]
    for spans, color in zip(bands.values(), _colors(len(bands)), strict=True):
        layers.append(_Layer("", color, [_gathered(spans, edge) for edge in edges]))
    return edges, layers


def _gathered(spans: Sequence[Span], at: float) -> int:
    return sum(size for begun, freed, size in spans if begun <= at < freed)


def _latest(samples: Sequence[tuple[int, int, int]], at_ms: float) -> tuple[int, int]:
    """The last bytes known at this time: gradients kept, gradients on the way."""
    known = [sample[1:] for sample in samples if sample[0] / 1e6 <= at_ms]
    return known[-1] if known else (0, 0)
