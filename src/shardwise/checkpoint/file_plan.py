"""Which tensor lies at which byte of which file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .safetensors_header import Entry, encode_header

__all__ = ["FilePlan", "PlannedFile", "plan_files"]


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file before it exists: its header, and its whole size."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class FilePlan:
    """A set of files; ``index`` is the text of its index file, where there are several."""

    files: tuple[PlannedFile, ...]
    index: tuple[str, str] | None = None  # name, text

    def places(self) -> dict[str, tuple[str, int, Entry]]:
        """Tensor name -> file, first byte there, entry."""
        return {entry.name: (file.name, len(file.header) + entry.start, entry)
                for file in self.files for entry in file.entries}


def plan_files(
    base: str, entries: Sequence[Entry], aliases: Mapping[str, str], max_bytes: int
) -> FilePlan:
    """``base.safetensors``, or numbered files of at most ``max_bytes`` with an index.

    A tensor is never cut, so one that is larger has a file of its own. Within a file the widest
    dtypes come first, which aligns every tensor without gaps.
    """
    groups: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not groups or entry.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(entry)
        room -= entry.nbytes
    many = len(groups) > 1
    files = tuple(
        _plan_file(f"{base}-{number:05d}-of-{len(groups):05d}.safetensors" if many else f"{base}.safetensors",
                   group, aliases)
        for number, group in enumerate(groups, 1))
    if not many:
        return FilePlan(files)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)},
             "weight_map": dict(sorted(weight_map.items()))}
    return FilePlan(files, (f"{base}.safetensors.index.json", json.dumps(index, indent=2) + "\n"))


def _plan_file(name: str, group: Sequence[Entry], aliases: Mapping[str, str]) -> PlannedFile:
    placed: list[Entry] = []
    offset = 0
    for entry in sorted(group, key=lambda entry: -entry.dtype.itemsize):
        placed.append(replace(entry, start=offset))
        offset += entry.nbytes
    here = {entry.name for entry in group}
    metadata = {"format": "pt"} | {dropped: kept for dropped, kept in aliases.items() if kept in here}
    return PlannedFile(name, encode_header(placed, metadata), tuple(placed))
