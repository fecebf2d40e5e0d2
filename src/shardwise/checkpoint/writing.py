"""One save, step by step, on all ranks; where the bytes go is its destination's affair."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..comm.peers import Peers
from ..errors import CheckpointError
from .checksums import BLOCK_BYTES, checksum
from .folder import aside, commit, create_file, discard, prepare, prune, write_text
from .manifest import MANIFEST, Manifest
from .ranged_io import Block, Staging, slabs, write_exactly
from .snapshot import Snapshot
from .together import Words, together

__all__ = ["Destination", "SaveJob", "SharedFolder", "blocks_of"]

_REMEDY = "No half of it is left there: a checkpoint that was there before is still whole."

Written = dict[str, list[Block]]
"""File -> the blocks that a rank wrote there."""


class Destination(ABC):
    """Where one rank of a save writes. Nobody sees anything of it before ``publish``."""

    @abstractmethod
    def begin(self, snapshot: Snapshot, peers: Peers) -> None:
        """Before any rank writes."""

    @abstractmethod
    def place(self, file: str, offset: int, nbytes: int) -> tuple[int, int]:
        """An open file and the place in it for bytes that belong at ``offset`` of ``file``."""

    @abstractmethod
    def flush(self) -> None:
        """All that was written is on the disk after this, and the files are closed."""

    @abstractmethod
    def publish(self, snapshot: Snapshot, peers: Peers, everyone: Sequence[Written]) -> None:
        """After all ranks have flushed: make the checkpoint appear."""

    @abstractmethod
    def clean_up(self, peers: Peers) -> None:
        """Remove what is not the last good checkpoint. Called after success and after failure."""


@dataclass(eq=False)
class SaveJob:
    """One save from the folder's beginning to its rename."""

    path: Path
    snapshot: Snapshot
    peers: Peers
    destination: Destination
    staging: Staging = field(default_factory=Staging)

    def run(self) -> None:
        """A collective, on this thread. Raises ``CheckpointError``; nothing is replaced then."""
        try:
            with self._step():
                self.destination.begin(self.snapshot, self.peers)
            with self._step() as words:
                words.mine = self._write_pieces()
            with self._step():
                self.destination.publish(self.snapshot, self.peers, words.all)
        except CheckpointError:
            self._clean_up_quietly()
            raise
        with self._step():
            self.destination.clean_up(self.peers)

    def _step(self) -> AbstractContextManager[Words]:
        return together(self.peers, f"saving {self.path}", _REMEDY)

    def _write_pieces(self) -> Written:
        """This rank's ranges, flushed to the disk; their checksums by file."""
        blocks: Written = {}
        try:
            for piece, file, first, entry in self.snapshot.pieces():
                size = entry.dtype.itemsize
                offset = first + piece.start * size
                for part in slabs(piece.values, self.staging.limit // size):
                    data = self.staging.pack(part, entry.dtype)
                    fd, place = self.destination.place(file, offset, len(data))
                    write_exactly(fd, data, place)
                    blocks.setdefault(file, []).extend(blocks_of(data, offset))
                    offset += len(data)
        finally:
            self.destination.flush()
        return blocks

    def _clean_up_quietly(self) -> None:
        """The next save cleans up where this fails."""
        try:
            self.destination.clean_up(self.peers)
        except OSError:
            return


def blocks_of(data: Any, offset: int) -> list[Block]:
    """Checksums of ``data``, which lies at ``offset`` of its file."""
    data = memoryview(bytearray(data) if isinstance(data, bytes) else data)
    return [Block(offset + at, offset + at + len(part), checksum(part))
            for at in range(0, len(data), BLOCK_BYTES) if (part := data[at : at + BLOCK_BYTES])]


class SharedFolder(Destination):
    """A folder that all ranks see: they write ranges of the same files, and rank 0 does the rest."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self._path, self._keep = path, keep
        self._open: dict[str, int] = {}

    def begin(self, snapshot: Snapshot, peers: Peers) -> None:
        if peers.rank == 0:
            folder = prepare(self._path)
            for file in snapshot.files:
                create_file(folder / file.name, file.header, file.nbytes)

    def place(self, file: str, offset: int, nbytes: int) -> tuple[int, int]:
        if file not in self._open:
            self._open[file] = os.open(aside(self._path) / file, os.O_WRONLY)
        return self._open[file], offset

    def flush(self) -> None:
        while self._open:
            fd = self._open.popitem()[1]
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def publish(self, snapshot: Snapshot, peers: Peers, everyone: Sequence[Written]) -> None:
        if peers.rank != 0:
            return
        folder = aside(self._path)
        files: Written = {}
        for file in snapshot.files:
            written = {block for blocks in everyone for block in blocks.get(file.name, ())}
            files[file.name] = [*blocks_of(file.header, 0), *sorted(written, key=lambda block: block.start)]
            if files[file.name][-1].stop != file.nbytes:
                raise CheckpointError(f"a part of {file.name} was written by no rank", expected=file.nbytes,
                                      got=files[file.name][-1].stop)
        for name, text in snapshot.texts.items():
            write_text(folder / name, text)
            files[name] = blocks_of(text.encode(), 0)
        manifest = Manifest(peers.size, files)
        manifest.require_whole()
        write_text(folder / MANIFEST, manifest.encode())
        commit(self._path)
        if self._keep is not None:
            prune(self._path, self._keep)

    def clean_up(self, peers: Peers) -> None:
        if peers.rank == 0:
            discard(self._path)
