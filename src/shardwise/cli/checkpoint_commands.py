"""``shardwise checkpoint``: look at checkpoint files, check them, put them together, convert them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..checkpoint.consolidation import consolidate
from ..checkpoint.conversion import KINDS, convert
from ..checkpoint.inspection import Inspection, inspect, verify

__all__ = ["commands"]

commands = typer.Typer(no_args_is_help=True, help="Look at checkpoint files, check, join and convert them.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
AnyPath = Annotated[Path, typer.Argument(help="A checkpoint folder, or one safetensors file.", exists=True)]


@commands.command("inspect")
def inspect_command(path: AnyPath, as_json: AsJson = False) -> None:
    """Tensors, shapes, dtypes, bytes and checksums, and what wrote them."""
    found = inspect(path)
    if as_json:
        _print_json(found.as_dict())
    else:
        _print_inspection(found)


@commands.command("verify")
def verify_command(path: AnyPath, as_json: AsJson = False) -> None:
    """Read all files and compare their checksums. Exit code 1 if anything is damaged."""
    with _progress(quiet=as_json) as progress:
        bar = progress.add_task("verify", total=None)
        result = verify(path, started=lambda total: progress.update(bar, total=total),
                        progress=lambda nbytes: progress.advance(bar, nbytes))
    if as_json:
        _print_json({"path": str(path), "ok": not result.faults, "bytes": result.nbytes,
                     "checksums": result.has_checksums, "faults": list(result.faults)})
    else:
        for fault in result.faults:
            typer.echo(f"damaged: {fault}")
        how = "every checksum is right" if result.has_checksums else "headers and sizes fit, no checksums"
        typer.echo(f"{len(result.faults)} faults" if result.faults else f"ok: {_size(result.nbytes)}, {how}")
    sys.exit(1 if result.faults else 0)


@commands.command("consolidate")
def consolidate_command(
    target: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
    sources: Annotated[list[Path], typer.Argument(help="Folders with the parts of the ranks.", exists=True)],
    as_json: AsJson = False,
) -> None:
    """Make standard files of the parts that ranks wrote on disks of their own."""
    with _progress(quiet=as_json) as progress:
        bar = progress.add_task("consolidate", total=None)
        consolidate(sources, target, started=lambda total: progress.update(bar, total=total),
                    progress=lambda nbytes: progress.advance(bar, nbytes))
    found = inspect(target)
    if as_json:
        _print_json({"path": str(target), "tensors": len(found.tensors), "bytes": found.nbytes})
    else:
        typer.echo(f"wrote {target}: {len(found.tensors)} tensors, {_size(found.nbytes)}")


@commands.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="What to read; its format is found out.", exists=True)],
    target: Annotated[Path, typer.Argument(help="What to write.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}.")] = "safetensors",
    prefix: Annotated[str | None, typer.Option(help="Of names in the source, taken away.")] = None,
    optimizer: Annotated[bool, typer.Option(help="The optimizer's state too, if it is there.")] = True,
    max_shard_bytes: Annotated[int, typer.Option(help="Split larger models into several files.")] = 5 * 10**9,
    as_json: AsJson = False,
) -> None:
    """Weights and optimizer state from DCP, torch.save, DeepSpeed ZeRO or safetensors into another format."""
    with _progress(quiet=as_json) as progress:
        bar = progress.add_task("convert", total=None)
        done = convert(source, target, to, prefix=prefix, optimizer=optimizer, max_shard_bytes=max_shard_bytes,
                       started=lambda total: progress.update(bar, total=total),
                       progress=lambda nbytes: progress.advance(bar, nbytes))
    if as_json:
        _print_json({"path": str(target), "format": to, "tensors": done.tensors, "bytes": done.nbytes,
                     "optimizer": done.has_optimizer, "left_out": list(done.left_out)})
        return
    typer.echo(f"wrote {target}: {done.tensors} tensors, {_size(done.nbytes)}"
               + (", with the optimizer's state" if done.has_optimizer else ""))
    if done.left_out:
        typer.echo(f"left out {len(done.left_out)}: {', '.join(done.left_out[:4])}"
                   + (" …" if len(done.left_out) > 4 else ""))


# ---------------------------------------------------------------------- printing
def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_inspection(found: Inspection) -> None:
    for label, value in found.facts.items():
        typer.echo(f"{label}: {value}")
    typer.echo(f"tensors: {len(found.tensors)}, {_size(found.nbytes)}")
    table = Table("tensor", "dtype", "shape", "bytes", "file", "checksum", box=None, pad_edge=False)
    for tensor in found.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "0-d"
        table.add_row(tensor.name, tensor.dtype, shape, f"{tensor.nbytes:,}", tensor.file,
                      tensor.checksum or "–")
    Console(width=None if Console().is_terminal else 200).print(table)


def _progress(*, quiet: bool) -> Progress:
    """A bar on the error stream, only where a person looks at it."""
    console = Console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                    console=console, transient=True, disable=quiet or not console.is_terminal)


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.2f} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"
