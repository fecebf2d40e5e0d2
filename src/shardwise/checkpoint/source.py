"""Reading a checkpoint: where each tensor lies, and its ranges, checked against the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .checksums import checksum
from .folder import present
from .manifest import MANIFEST, Manifest, read_manifest
from .ranged_io import Staging, bytes_of, lies_as_in_file, read_exactly, slabs
from .safetensors_header import Entry, read_header

__all__ = ["Located", "Source", "Target", "nothing_to_read"]


@dataclass(frozen=True)
class Located:
    """A tensor in a file; ``first`` is its first byte there."""

    file: str
    first: int
    entry: Entry


@dataclass(frozen=True, eq=False)
class Target:
    """Where the elements from ``start`` on of a tensor in a file go."""

    located: Located
    start: int
    values: Tensor

    @property
    def byte_range(self) -> tuple[int, int]:
        size = self.located.entry.dtype.itemsize
        first = self.located.first + self.start * size
        return first, first + self.values.numel() * size


def nothing_to_read(folder: Path, expected: str = "a checkpoint folder or a safetensors file") -> CheckpointError:
    """The error for a ``folder`` without safetensors files."""
    if (folder / ".metadata").is_file():
        return CheckpointError(f"a folder of torch.distributed.checkpoint: {folder}", expected=expected,
                               remedy="Load it with dcp.load, or convert it: shardwise checkpoint convert FROM TO")
    return CheckpointError(f"there are no safetensors files in {folder}", expected=expected,
                           remedy="Give the folder that has them, or one file's path.")


class Source:
    """A folder of safetensors files, ours or any other, or one such file."""

    def __init__(self, path: Path) -> None:
        path = present(path.absolute())
        self._only = path.name if path.is_file() else None
        self.folder = path.parent if path.is_file() else path
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}", remedy="Check the path.")
        self.manifest: Manifest | None = None if self._only else read_manifest(path)
        if self.manifest is None and not self._only and any(path.glob(f"part-*/{MANIFEST}")):
            raise CheckpointError(f"the checkpoint is in the parts that its ranks wrote: {path}",
                                  remedy="Run: shardwise checkpoint consolidate PATH")
        self._open: dict[str, int] = {}

    # ------------------------------------------------------------------ what is there
    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return str(self.folder)

    def tensors(self, base: str) -> tuple[dict[str, Located], dict[str, str]]:
        """The tensors of ``base.safetensors`` or its numbered files, and other names: alias -> name."""
        found: dict[str, Located] = {}
        aliases: dict[str, str] = {}
        for file in self.files(base):
            self.require_size(file)
            header = read_header(self.folder / file)
            for entry in header.entries:
                found[entry.name] = Located(file, header.data_start + entry.start, entry)
            aliases |= {a: kept for a, kept in header.metadata.items() if kept in found and a not in found}
        return found, aliases

    def files(self, base: str) -> list[str]:
        """The safetensors files of ``base``, in order; none where there are none."""
        if self._only is not None:
            return [self._only] if base == "model" else []
        index = self.folder / f"{base}.safetensors.index.json"
        if index.is_file():
            self.check_whole(index.name)
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"the index is damaged: {index}", got=str(error)) from error
            if not all(isinstance(n, str) and n.isprintable() and Path(n).name == n for n in names):
                raise CheckpointError(f"the index is damaged: {index}", got=names[:2],
                                      expected="names of files in this folder")
            return names
        listed = self.manifest is not None and f"{base}.safetensors" in self.manifest.files
        return [f"{base}.safetensors"] if listed or (self.folder / f"{base}.safetensors").is_file() else []

    def text(self, name: str) -> str | None:
        """A small file's text, checked; None if the checkpoint has no such file."""
        listed = self.manifest is not None and name in self.manifest.files
        if not listed and not (self.folder / name).is_file():
            return None
        self.check_whole(name)
        return (self.folder / name).read_text(encoding="utf-8")

    # ------------------------------------------------------------------ is it whole
    def require_size(self, file: str) -> None:
        """Raise ``CheckpointError`` if a file is missing or has another size than when it was written."""
        path = self.folder / file
        if not path.is_file():
            raise CheckpointError(f"a file of the checkpoint is missing: {path}",
                                  remedy="Copy the whole folder, or take another checkpoint.")
        if self.manifest is not None and file in self.manifest.files:
            expected, got = self.manifest.file_bytes(file), path.stat().st_size
            if expected != got:
                raise CheckpointError(f"a file of the checkpoint was cut or altered: {path}",
                                      got=f"{got} bytes", expected=f"{expected} bytes",
                                      remedy="Take another checkpoint.")

    def check_whole(self, file: str, staging: Staging | None = None) -> None:
        """All of a file against its checksums."""
        self.require_size(file)
        if self.manifest is not None and file in self.manifest.files:
            self.check(file, 0, self.manifest.file_bytes(file), staging or Staging(), set())

    def check(self, file: str, start: int, stop: int, staging: Staging,
              done: set[tuple[str, int]]) -> None:
        """Bytes ``[start, stop)`` against the checksums of their blocks, except those ``done``."""
        if self.manifest is None:
            return
        for block in self.manifest.covering(file, start, stop):
            if (file, block.start) in done:
                continue
            done.add((file, block.start))
            data = staging.bytes(block.stop - block.start)
            read_exactly(self._descriptor(file), data, block.start, self.folder / file)
            if checksum(data) != block.checksum:
                raise CheckpointError(
                    f"a file of the checkpoint was altered: {self.folder / file}",
                    got=f"another checksum of bytes {block.start} to {block.stop}",
                    expected="what was written", remedy="Take another checkpoint.")

    # ------------------------------------------------------------------ values
    def check_targets(self, targets: Iterable[Target], staging: Staging) -> None:
        """Every block that the targets need. Raises ``CheckpointError``."""
        done: set[tuple[str, int]] = set()
        for target in targets:
            self.check(target.located.file, *target.byte_range, staging, done)

    def fill(self, targets: Iterable[Target], staging: Staging) -> None:
        """Read every target, through the buffer or straight into its memory."""
        for target in targets:
            located, dtype = target.located, target.located.entry.dtype
            fd, offset = self._descriptor(located.file), target.byte_range[0]
            for part in slabs(target.values, staging.limit // dtype.itemsize):
                count = part.numel() * dtype.itemsize
                direct = lies_as_in_file(part, dtype)
                into = bytes_of(part) if direct else staging.bytes(count)
                read_exactly(fd, into, offset, self.folder / located.file)
                if not direct:
                    staging.unpack(part, dtype)
                offset += count

    def whole(self, located: Located, staging: Staging) -> Tensor:
        """All of one tensor, checked, in host memory."""
        values = torch.empty(located.entry.shape, dtype=located.entry.dtype)
        target = Target(located, 0, values)
        self.check_targets([target], staging)
        self.fill([target], staging)
        return values

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self.folder / file, os.O_RDONLY)
        return self._open[file]

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
