"""Saving: each rank writes its own byte ranges of the files; a folder appears whole or not at all."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.peers import Peers
from ..errors import CheckpointError, ConfigurationError
from .folder import aside, commit, create_file, discard, prepare, prune, require_numbered, write_text
from .manifest import MANIFEST, Manifest
from .ranged_io import BLOCK_BYTES, Block, Staging, checksum, slabs, write_exactly
from .snapshot import Snapshot, take_snapshot
from .together import Words, together

__all__ = ["save", "wait"]

_REMEDY = "Nothing was replaced: the checkpoint that was there before is still whole."


class _Background:
    """The one save that may be under way."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, job: SaveJob) -> None:
        def work() -> None:
            try:
                job.run()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=work, name="shardwise save")
        self.thread.start()

    def join(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error


_background = _Background()


def save(  # noqa: PLR0913 - each argument is a choice of its own
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    keep: int | None = None,
    wait: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint folder of safetensors files. Every rank calls it.

    Args:
        path: the folder. A checkpoint that is there is replaced, once the new one is complete.
        model: sharded or not. Files hold full shapes under the names of the unwrapped module.
        optimizer: its state goes into ``optimizer.safetensors``.
        extra: anything made of numbers, text, tensors, arrays, lists, tuples, sets and dicts, such as
            the state dicts of a scheduler, a scaler or a sampler. It may differ between ranks.
        dtype: of floating-point parameters in the file; None: as stored.
        max_shard_bytes: larger models are split into numbered files with an index.
        keep: how many checkpoints to keep whose names differ only in their numbers, this one included.
        wait: False copies the shards to the host and returns; a thread writes them. The next ``save``,
            ``load`` or ``wait()`` waits for it and raises its error.
        process_group: the ranks that hold the model; None: all.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any of them; nothing was replaced.
        ConfigurationError: bad arguments.
    """
    _background.join()
    target = Path(path).absolute()
    require_numbered(target, keep)
    if max_shard_bytes < 1:
        raise ConfigurationError("max_shard_bytes must be positive", expected="1 or more",
                                 got=max_shard_bytes)
    peers = Peers.of(process_group)
    snapshot = take_snapshot(model, optimizer, extra, peers, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if wait:
        SaveJob(target, snapshot, peers, keep).run()
    else:
        _background.start(SaveJob(target, snapshot.on_host(), peers, keep))


def wait() -> None:
    """Return when no save is under way on this rank; raises the error of the last one."""
    _background.join()


@dataclass(eq=False)
class SaveJob:
    """One save from the folder's beginning to its rename."""

    path: Path
    snapshot: Snapshot
    peers: Peers
    keep: int | None = None
    staging: Staging = field(default_factory=Staging)

    def run(self) -> None:
        """A collective, on this thread. Raises ``CheckpointError``; nothing is replaced then."""
        lead = self.peers.rank == 0
        try:
            with self._step():
                if lead:
                    self._begin()
            with self._step() as words:
                words.mine = self._write_pieces()
            with self._step():
                if lead:
                    self._finish(words.all)
        except CheckpointError:
            if lead:
                _discard_quietly(self.path)
            raise

    def _step(self) -> AbstractContextManager[Words]:
        return together(self.peers, f"saving {self.path}", _REMEDY)

    def _begin(self) -> None:
        folder = prepare(self.path)
        for file in self.snapshot.files:
            create_file(folder / file.name, file.header, file.nbytes)

    def _write_pieces(self) -> dict[str, list[Block]]:
        """This rank's ranges, flushed to the disk; their checksums by file."""
        blocks: dict[str, list[Block]] = {}
        open_files: dict[str, int] = {}
        try:
            for piece, file, first, entry in self.snapshot.pieces():
                if file not in open_files:
                    open_files[file] = os.open(aside(self.path) / file, os.O_WRONLY)
                size = entry.dtype.itemsize
                offset = first + piece.start * size
                for part in slabs(piece.values, self.staging.limit // size):
                    data = self.staging.pack(part, entry.dtype)
                    write_exactly(open_files[file], data, offset)
                    blocks.setdefault(file, []).extend(blocks_of(data, offset))
                    offset += len(data)
            for fd in open_files.values():
                os.fsync(fd)
        finally:
            for fd in open_files.values():
                os.close(fd)
        return blocks

    def _finish(self, everyone: list[dict[str, list[Block]]]) -> None:
        """The small files, the manifest, and the rename."""
        folder = aside(self.path)
        files: dict[str, list[Block]] = {}
        for file in self.snapshot.files:
            written = {block for blocks in everyone for block in blocks.get(file.name, ())}
            files[file.name] = [*blocks_of(memoryview(file.header), 0),
                                *sorted(written, key=lambda block: block.start)]
            if files[file.name][-1].stop != file.nbytes:
                raise CheckpointError(f"a part of {file.name} was written by no rank", expected=file.nbytes,
                                      got=files[file.name][-1].stop)
        for name, text in self.snapshot.texts.items():
            write_text(folder / name, text)
            files[name] = blocks_of(memoryview(text.encode()), 0)
        manifest = Manifest(self.peers.size, files)
        manifest.require_whole()
        write_text(folder / MANIFEST, manifest.encode())
        commit(self.path)
        if self.keep is not None:
            prune(self.path, self.keep)


def blocks_of(data: memoryview, offset: int) -> list[Block]:
    """Checksums of ``data``, which lies at ``offset`` of its file."""
    return [Block(offset + at, offset + at + len(part), checksum(part))
            for at in range(0, len(data), BLOCK_BYTES) if (part := data[at : at + BLOCK_BYTES])]


def _discard_quietly(path: Path) -> None:
    """Remove what a failed save wrote; the next save will, where this fails."""
    try:
        discard(path)
    except OSError:
        return
