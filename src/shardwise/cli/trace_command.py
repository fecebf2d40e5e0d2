"""``shardwise trace``: what a trace says, without a viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..frontend.spans import KINDS, read, summarise

__all__ = ["trace"]


def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that shardwise.trace wrote.", exists=True)],
) -> None:
    """Milliseconds of each unit, and the share of communication that is not hidden.

    Make a trace with `with shardwise.trace("step.json"):` around one step; ui.perfetto.dev shows it.
    """
    for path in files:
        summary = summarise(read(path))
        table = Table("unit", *(f"{kind} ms" for kind in KINDS), box=None, pad_edge=False)
        for unit, totals in summary.by_unit.items():
            table.add_row(unit, *(f"{totals[kind] / 1e3:.2f}" for kind in KINDS))
        typer.echo(f"{path}")
        console = Console()
        Console(width=None if console.is_terminal else 120).print(table)
        typer.echo(f"communication {summary.communication / 1e3:.2f} ms, "
                   f"of which not hidden {summary.exposed / 1e3:.2f} ms ({summary.share:.0%})")
