"""From the parts that ranks wrote on disks of their own to one checkpoint in standard files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .folder import commit, create_file, discard, prepare, replaced, write_text
from .manifest import MANIFEST, Manifest, read_manifest
from .parts import DATA, LAYOUT
from .ranged_io import Block, Staging, read_exactly, write_exactly
from .source import Source
from .writing import blocks_of

__all__ = ["consolidate"]

Progress = Callable[[int], object]
"""Called with a number of bytes: all of them at the start, or those just done."""


@dataclass(frozen=True)
class _Part:
    folder: Path
    manifest: Manifest
    layout: dict[str, Any]


def consolidate(
    sources: Sequence[Path], target: Path, *, started: Progress = bool, progress: Progress = bool
) -> None:
    """Write the checkpoint ``target`` from parts in ``sources`` (folders that hold ``part-*`` folders).

    Every block is checked; the target appears whole or not at all. Raises ``CheckpointError``.
    """
    parts = _complete_save(sources)
    target = target.absolute()
    try:
        folder = prepare(target)
        files = parts[0].layout["files"]
        for name, (header, nbytes) in files.items():
            create_file(folder / name, _header_bytes(header), nbytes)
        started(sum(part.manifest.file_bytes(DATA) for part in parts))
        blocks = {name: blocks_of(_header_bytes(header), 0) for name, (header, _) in files.items()}
        staging = Staging()
        for part in parts:
            _copy(part, folder, blocks, staging, progress)
        for name, text in parts[0].layout["texts"].items():
            write_text(folder / name, text)
            blocks[name] = blocks_of(text.encode(), 0)
        for found in blocks.values():
            found.sort(key=lambda block: block.start)
        manifest = Manifest(len(parts), blocks, {"consolidated": True})
        manifest.require_whole()
        write_text(folder / MANIFEST, manifest.encode())
        commit(target)
    except BaseException:
        discard(target)
        raise


def _header_bytes(text: str) -> bytes:
    header = text.encode()
    return len(header).to_bytes(8, "little") + header


def _complete_save(sources: Sequence[Path]) -> list[_Part]:
    """The parts of the newest save of which all are there."""
    saves: dict[str, dict[int, tuple[Path, Manifest]]] = {}
    for source in sources:
        replaced_ones = source.glob(f"{replaced(Path('part-')).name}*")
        for folder in sorted([*source.glob("part-*-of-*"), *replaced_ones]):
            manifest = read_manifest(folder)
            if manifest is not None:
                saves.setdefault(manifest.facts["save"], {})[manifest.facts["rank"]] = (folder, manifest)
    whole = [found for found in saves.values() if len(found) == next(iter(found.values()))[1].world_size]
    if not whole:
        best = max(saves.values(), key=len, default={})
        size = next(iter(best.values()))[1].world_size if best else "all"
        raise CheckpointError(
            f"there are not all parts of one save in {', '.join(map(str, sources))}",
            expected=f"{size} parts",
            got=f"{len(best)} (of ranks {', '.join(map(str, sorted(best))) or 'none'})",
            remedy="Copy the parts of all ranks into one folder, or name all folders.")
    newest = max(whole, key=lambda found: max((f / MANIFEST).stat().st_mtime_ns for f, _ in found.values()))
    return [_read(*newest[rank]) for rank in sorted(newest)]


def _read(folder: Path, manifest: Manifest) -> _Part:
    with Source(folder) as source:
        text = source.text(LAYOUT)
        source.require_size(DATA)
    return _Part(folder, manifest, json.loads(text or "{}"))


def _copy(part: _Part, folder: Path, blocks: dict[str, list[Block]], staging: Staging,
          progress: Progress) -> None:
    """A part's pieces to their places, checked block by block."""
    with Source(part.folder) as source:
        source.check_whole(DATA, staging)
    at = 0
    source_fd = os.open(part.folder / DATA, os.O_RDONLY)
    try:
        for file, offset, nbytes in part.layout["pieces"]:
            data = staging.bytes(nbytes)
            read_exactly(source_fd, data, at, part.folder / DATA)
            fd = os.open(folder / file, os.O_WRONLY)
            try:
                write_exactly(fd, data, offset)
                os.fsync(fd)
            finally:
                os.close(fd)
            blocks[file] += blocks_of(data, offset)
            at += nbytes
            progress(nbytes)
    finally:
        os.close(source_fd)
