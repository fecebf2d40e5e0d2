"""What the demo shows: a progress bar while it trains; a table, a picture and a file of figures after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from launch import Job
from measure import Bytes, in_mb, span

try:
    from picture import Recorder, draw
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TaskID, TextColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as missing:
    raise SystemExit(
        f"train_gpt: the demo shows its results with rich and matplotlib, but {missing.name} is not "
        "installed. Remedy: pip install rich matplotlib"
    ) from None

__all__ = ["Run", "Screen", "finish"]


@dataclass
class Run:
    """One training run and what came of it."""

    name: str
    recorder: Recorder
    losses: list[float] = field(default_factory=list)
    held: Bytes = field(default_factory=Bytes)
    held_out: float = float("nan")


class Screen:
    """Rank 0's output: a live bar on a terminal, plain lines elsewhere. The other ranks are silent."""

    def __init__(self, rank: int, console: Console | None = None, every: int = 8) -> None:
        self.console = console or Console(quiet=rank != 0, highlight=False)
        self.live = rank == 0 and self.console.is_terminal
        self.every = every

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def header(self, job: Job, parameters: int) -> None:
        args, corpus = job.args, job.corpus
        ranks = f"{job.world} {job.device.type} ranks" if job.world > 1 else f"1 {job.device.type} rank"
        size = (len(corpus.train) + len(corpus.held_out)) / 1e6
        self.say(f"model    GPT of {parameters / 1e6:.1f} M parameters in {args.depth} blocks")
        self.say(f"text     {size:.1f} MB of Python, {corpus.files} files of {corpus.root}")
        self.say(f"ranks    {ranks}, {args.front_end}, {args.strategy}, {args.precision}")
        self.say(f"batch    {job.rows} sequences of {args.context} bytes per step")

    def sample(self, text: str) -> None:
        readable = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
        panel = Panel(Text(readable), title="the trained model continues 'def '", title_align="left")
        self.console.print(panel)

    @contextmanager
    def progress(self, name: str, done: int, steps: int) -> Iterator[Callable[..., None]]:
        """Yield ``show(step, loss=…, speed=…, memory=[bytes per rank])``."""
        if not self.live:
            yield lambda step, **facts: self._line(name, step, steps, **facts)
            return
        shown = TextColumn("{task.completed}/{task.total}  {task.fields[facts]}")
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), shown]
        with Progress(*columns, console=self.console, expand=True) as bar:
            task = bar.add_task(name, total=steps, completed=done, facts="")
            yield lambda step, **facts: self._advance(bar, task, step, **facts)

    def _advance(self, bar: Progress, task: TaskID, step: int, **facts: Any) -> None:
        shown = _facts(**facts)
        while len(shown) > 1 and len("  ".join(shown)) > self.console.width - 40:
            shown.pop()  # a narrow terminal keeps the loss and drops the rest, last first
        bar.update(task, completed=step, facts="  ".join(shown))

    def _line(self, name: str, step: int, steps: int, **facts: Any) -> None:
        if step % self.every == 0 or step in (1, steps):
            self.say(f"{name}  {step}/{steps}  " + "  ".join(_facts(**facts)))


def _facts(loss: float, speed: float, memory: Sequence[int]) -> list[str]:
    return [f"loss {loss:.4f}", f"{speed:,.0f} tokens/s", f"model memory {span(memory)} per rank"]


def finish(job: Job, screen: Screen, sharded: Run, unsharded: Run | None, whole: Bytes) -> None:
    """Collect every rank's bytes; rank 0 shows the table and leaves the picture and the figures."""
    held: list[Bytes] = [Bytes()] * job.world
    dist.all_gather_object(held, sharded.held)
    if job.rank != 0:
        return
    screen.console.print(size_table(held, unsharded.held if unsharded else whole, unsharded is not None))
    screen.console.print(loss_table(sharded, unsharded))
    if unsharded and job.args.precision != "fp32":
        screen.say(f"The unsharded run computes in fp32, the sharded one in {job.args.precision}.")
    out, runs = job.args.out, [run for run in (sharded, unsharded) if run]
    draw(out / "demo.png", sharded.recorder, sharded.held, whole, {run.name: run.losses for run in runs})
    write_json(out / "demo.json", {
        "settings": job.settings(),
        "bytes per rank": [vars(rank) for rank in held],
        "bytes unsharded": vars(whole),
        "runs": {run.name: {"held-out loss": run.held_out, "losses": run.losses} for run in runs},
    })
    screen.say(f"picture {out / 'demo.png'}, figures {out / 'demo.json'}, checkpoint {out / 'checkpoint'}")


def size_table(held: Sequence[Bytes], whole: Bytes, measured: bool) -> Table:
    """What each rank holds, sharded against unsharded."""
    table = Table("", title="Bytes held by each rank", title_justify="left")
    for title in (f"sharded over {len(held)}", "unsharded" if measured else "unsharded (computed)", "ratio"):
        table.add_column(title, justify="right")
    for name in ("parameters", "gradients", "optimizer", "total"):
        each, full = [getattr(rank, name) for rank in held], getattr(whole, name)
        if name == "total":
            table.add_section()
        table.add_row(name, span(each), in_mb(full), f"{max(each) / full:.2f}")
    return table


def loss_table(sharded: Run, unsharded: Run | None) -> Table:
    """How close the two runs ended."""
    table = Table("", title="Loss in nats per byte", title_justify="left")
    for title in ("sharded", "unsharded", "relative difference"):
        table.add_column(title, justify="right")
    rows = {"last training step": lambda run: run.losses[-1], "held-out files": lambda run: run.held_out}
    for label, value in rows.items():
        if unsharded is None:
            table.add_row(label, f"{value(sharded):.6f}", "no --reference", "")
            continue
        apart = abs(value(sharded) - value(unsharded)) / abs(value(unsharded))
        table.add_row(label, f"{value(sharded):.6f}", f"{value(unsharded):.6f}", f"{apart:.1e}")
    return table


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write aside, then rename: nobody ever finds half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(facts, indent=2) + "\n")
    aside.replace(path)
