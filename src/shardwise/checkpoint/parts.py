"""Where ranks share no disk, each writes a folder of its own; ``consolidate`` makes the files of them.

    NAME/part-00001-of-00004/
        data.bin        this rank's bytes, one piece behind the other
        layout.json     the files they belong to (headers, sizes) and where: [file, offset there, bytes]
        manifest.json   checksums, and the save that it was
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from ..comm.peers import Peers
from ..errors import CheckpointError
from .folder import aside, discard, prepare, replaced, sync_folder, write_text
from .manifest import MANIFEST, Manifest
from .ranged_io import Block
from .snapshot import Snapshot
from .writing import Destination, Written, blocks_of

__all__ = ["DATA", "LAYOUT", "PartFolder"]

DATA, LAYOUT = "data.bin", "layout.json"


class PartFolder(Destination):
    """This rank's part. The part that it replaces is removed once every rank has its new one."""

    def __init__(self, path: Path, peers: Peers) -> None:
        self._path = path / f"part-{peers.rank + 1:05d}-of-{peers.size:05d}"
        self._fd = -1
        self._end = 0
        self._pieces: list[tuple[str, int, int]] = []
        self._save = peers.gather(uuid.uuid4().hex)[0]

    def begin(self, snapshot: Snapshot, peers: Peers) -> None:
        if (self._path.parent / MANIFEST).exists():
            raise CheckpointError(f"there is a checkpoint in standard files at {self._path.parent}",
                                  expected="parts, or nothing", remedy="Choose another path.")
        folder = prepare(self._path)
        self._fd = os.open(folder / DATA, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def place(self, file: str, offset: int, nbytes: int) -> tuple[int, int]:
        at, self._end = self._end, self._end + nbytes
        self._pieces.append((file, offset, nbytes))
        return self._fd, at

    def flush(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def publish(self, snapshot: Snapshot, peers: Peers, everyone: Sequence[Written]) -> None:
        folder = aside(self._path)
        files = {file.name: [file.header[8:].decode(), file.nbytes] for file in snapshot.files}
        layout = json.dumps({"files": files, "texts": snapshot.texts, "pieces": self._pieces})
        write_text(folder / LAYOUT, layout)
        blocks = {DATA: _moved(everyone[peers.rank], self._pieces), LAYOUT: blocks_of(layout.encode(), 0)}
        facts = {"save": self._save, "rank": peers.rank}
        write_text(folder / MANIFEST, Manifest(peers.size, blocks, facts).encode())
        sync_folder(folder)
        if self._path.exists():
            self._path.rename(replaced(self._path))
        folder.rename(self._path)
        sync_folder(self._path.parent)

    def clean_up(self, peers: Peers) -> None:
        discard(self._path)


def _moved(written: Written, pieces: Sequence[tuple[str, int, int]]) -> list[Block]:
    """The blocks at their places in the part's own file."""
    by_start = {(file, block.start): block for file, blocks in written.items() for block in blocks}
    moved: list[Block] = []
    for file, offset, nbytes in pieces:
        at = offset
        while at < offset + nbytes:
            block, end = by_start[file, at], moved[-1].stop if moved else 0
            moved.append(Block(end, end + block.stop - block.start, block.checksum))
            at = block.stop
    return moved
