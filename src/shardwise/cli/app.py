"""The program ``shardwise``: its groups of commands, and how an error ends it.

A group of commands is a module with a ``commands`` object; ``_GROUPS`` names it.
"""

from __future__ import annotations

import sys

import typer

from ..errors import ShardwiseError
from . import checkpoint_commands
from .bench_command import bench
from .doctor_command import doctor
from .trace_command import trace

__all__ = ["app", "main"]

_GROUPS = {"checkpoint": checkpoint_commands.commands}

app = typer.Typer(name="shardwise", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False, help="Tools for models that are trained with shardwise.")
for _name, _group in _GROUPS.items():
    app.add_typer(_group, name=_name)
for _command in (bench, doctor, trace):
    app.command()(_command)


@app.callback()
def program() -> None:
    """Tools for models that are trained with shardwise."""


def main() -> None:
    """Run the program. Exit codes: 0 done, 1 an error or a damaged checkpoint, 2 wrong usage."""
    try:
        app()
    except (ShardwiseError, OSError) as error:
        print(f"error: {str(error).removeprefix('shardwise: ')}", file=sys.stderr)
        sys.exit(1)
