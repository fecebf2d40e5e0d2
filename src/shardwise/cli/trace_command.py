"""``shardwise trace``: what a trace says, without a viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..frontend.spans import read
from ..frontend.trace import Trace

__all__ = ["trace"]


def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that shardwise.trace wrote.", exists=True)],
) -> None:
    """Milliseconds of each unit, and the share of communication that is not hidden.

    Make a trace with `with shardwise.trace("step.json"):` around one step; ui.perfetto.dev shows it.
    """
    for path in files:
        typer.echo(str(Trace(path, read(path))))
