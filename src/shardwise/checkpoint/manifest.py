"""The manifest: every file of a checkpoint with the checksums of its blocks, and who wrote it."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .checksums import text_checksum
from .ranged_io import Block

__all__ = ["MANIFEST", "Manifest", "read_manifest"]

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "shardwise checkpoint", 1


@dataclass(frozen=True)
class Manifest:
    """``files``: name -> blocks that cover it without gaps."""

    world_size: int
    files: Mapping[str, Sequence[Block]]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def encode(self) -> str:
        """Its text; the last line's checksum is over all before it."""
        files = {name: [[b.start, b.stop, b.checksum] for b in blocks] for name, blocks in self.files.items()}
        body = json.dumps({
            "format": _FORMAT, "version": _VERSION, "world_size": self.world_size, "torch": torch.__version__,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self.facts, "files": files,
        })
        return f'{body}\n{{"sha256": "{text_checksum(body.encode())}"}}\n'

    def file_bytes(self, name: str) -> int:
        """The size that the file had when it was written."""
        blocks = self.files[name]
        return blocks[-1].stop if blocks else 0

    def covering(self, name: str, start: int, stop: int) -> Sequence[Block]:
        """The blocks of a file that hold any of its bytes ``[start, stop)``."""
        blocks = self.files[name]
        first = bisect_right(blocks, start, key=lambda block: block.start) - 1
        last = bisect_right(blocks, stop - 1, key=lambda block: block.start)
        return blocks[max(first, 0) : last] if start < stop else ()

    def require_whole(self) -> None:
        """Raise ``CheckpointError`` unless every byte of every file was written, once."""
        for name, blocks in self.files.items():
            end = 0
            for block in blocks:
                if block.start != end:
                    raise CheckpointError(
                        f"the ranks' parts of {name} do not fit together", expected=f"a part at byte {end}",
                        got=f"one at {block.start}", remedy="Build the same model on every rank.")
                end = block.stop


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None where there is none. Raises ``CheckpointError`` if damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    body, _, seal = path.read_text(errors="replace").partition("\n")
    try:
        if json.loads(seal)["sha256"] != text_checksum(body.encode()):
            raise _damaged(path, "another checksum")
        table = json.loads(body)
        if table.pop("format") != _FORMAT or table.pop("version") != _VERSION:
            raise CheckpointError(f"the checkpoint has another format: {path}",
                                  expected=f"version {_VERSION}",
                                  remedy="Read it with the version that wrote it.")
        files = {name: [Block(*b) for b in blocks] for name, blocks in table.pop("files").items()}
        return Manifest(table.pop("world_size"), files, table)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(f"the manifest is damaged: {path}", got=got, expected="what was written",
                           remedy="Take another checkpoint.")
