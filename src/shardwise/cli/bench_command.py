"""``shardwise bench``: this library beside DDP and its peers on the user's own machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from ..bench.contenders import Setup, contenders_for, lacking_peers
from ..bench.measuring import Rounds, measure
from ..bench.picture import draw, require_matplotlib
from ..bench.results import Report, spread
from ..bench.workload import built_in, of_user

__all__ = ["bench"]


class Precision(Enum):
    """The dtype of forward and backward; gradients are reduced in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Strategy(Enum):
    """When parameters are freed: after forward, or after backward."""

    FULL = "full"
    GRAD_OP = "grad-op"


Size = Annotated[int, typer.Option(min=1)]


def bench(
    contenders: Annotated[str, typer.Option(help="Names with commas; ratios are to the first.")] = "",
    contender: Annotated[list[str] | None, typer.Option(help="One more, as name=module:function.")] = None,
    model: Annotated[str, typer.Option(help="Your own, as module:function; it gives (build, batch).")] = "",
    width: Size = 512, layers: Size = 6, heads: Size = 8, context: Size = 64, vocabulary: Size = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one rank.")] = 2,
    precision: Precision = Precision.FP32,
    strategy: Strategy = Strategy.FULL,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of one optimizer step.")] = 1,
    rounds: Size = 9, warmup: Annotated[int, typer.Option(min=1)] = 2, seed: int = 0,
    to_json: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw bars here; needs matplotlib.")] = None,
) -> None:
    """Train the same model with every contender in turn and compare. Start it with torchrun.

    torchrun --nproc-per-node 2 -m shardwise bench

    A contender that raises is left out, and the report says why. Exit code 1 if the contenders' losses differ, or one
    that was named did not run.
    """
    if picture is not None:
        require_matplotlib()
    workload = of_user(model) if model else built_in(width=width, layers=layers, heads=heads, context=context,
                                                     vocabulary=vocabulary, batch=batch)
    named = [name for name in contenders.split(",") if name]
    chosen = contenders_for(named, contender or [])
    with _group() as device:
        setup = Setup(workload.kinds, device, torch.bfloat16 if precision is Precision.BF16 else None,
                      strategy is Strategy.FULL)
        report = measure(workload, chosen, setup, Rounds(rounds, warmup, accumulate, seed))
        if dist.get_rank() == 0:
            _show(report)
            if not named and (text := lacking_peers()):
                typer.echo(text)
            if to_json is not None:
                to_json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
            if picture is not None:
                draw(report, picture)
    asked = {*named, *(pair.partition("=")[0] for pair in contender or [])}
    sys.exit(0 if report.agrees and not asked & {one.name for one in report.left_out} else 1)


@contextmanager
def _group() -> Iterator[torch.device]:
    """The ranks that torchrun started, or this process alone."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if accelerator is None else dist.get_default_backend_for_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _show(report: Report) -> None:
    base = report.rows[0].name
    table = Table("", "step ms", "quartiles", f"× {base}", f"{report.unit_of_items}/s", "calls/step",
                  "wire MB", "peak MB", "loss", box=None, pad_edge=False)
    for row in report.rows:
        step, ratio = spread(row.seconds), report.ratio(row.name, base)
        table.add_row(row.name, f"{1e3 * step.median:.1f}", f"{1e3 * step.low:.1f}–{1e3 * step.high:.1f}",
                      f"{ratio.median:.2f}", f"{report.rate(row.name):,.0f}", f"{row.calls:,}",
                      f"{row.wire_bytes / 1e6:,.2f}", f"{row.peak_bytes / 1e6:,.1f}", f"{row.losses[-1]:.5f}")
    typer.echo(f"{report.workload}; {report.world} ranks, {report.device}, {report.precision}, {report.strategy}, "
               f"{report.accumulation} batches a step")
    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)
    for one in report.left_out:
        typer.echo(f"{one.name} did not run: {one.error}")
    if report.device != "cpu":
        issue = ", ".join(f"{row.name} {1e3 * spread(row.issue_seconds).median:.1f}" for row in report.rows)
        typer.echo(f"host time of a step, ms: {issue}")
    verdict = "agree" if report.agrees else "DIFFER"
    typer.echo(f"losses {verdict}: at most {report.disagreement():.1e} apart, {report.tolerance:.0e} allowed")
