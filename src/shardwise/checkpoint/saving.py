"""Saving: each rank writes its own byte ranges of the files; a folder appears whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.errands import Errand
from ..comm.peers import Peers
from ..errors import ConfigurationError
from .arguments import adopt_alike, require_path_and_model
from .folder import require_numbered
from .parts import PartFolder
from .snapshot import take_snapshot
from .writing import SaveJob, SharedFolder

__all__ = ["save", "wait"]


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


@Errand("checkpoint.save")
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
    shared_disk: bool = True,
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
        shared_disk: False where the ranks do not see one folder: each writes its part on its own disk, and
            ``shardwise checkpoint consolidate`` makes the standard files of them.
        process_group: the ranks that hold the model; None: all.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any of them; nothing was replaced.
        ConfigurationError: bad arguments.
    """
    require_path_and_model("checkpoint.save", path, model)
    _background.join()
    target = Path(path).absolute()
    require_numbered(target, keep)
    if max_shard_bytes < 1:
        raise ConfigurationError("max_shard_bytes must be positive", expected="1 or more",
                                 got=max_shard_bytes)
    if keep is not None and not shared_disk:
        raise ConfigurationError("keep needs a common disk", expected="keep=None with shared_disk=False",
                                 got=keep)
    peers = Peers.of(process_group)
    adopt_alike(peers, optimizer, f"saving {path}")
    snapshot = take_snapshot(model, optimizer, extra, peers, dtype=dtype, max_shard_bytes=max_shard_bytes)
    destination = SharedFolder(target, keep) if shared_disk else PartFolder(target, peers)
    if wait:
        SaveJob(target, snapshot, peers, destination).run()
    else:
        _background.start(SaveJob(target, snapshot.on_host(), peers, destination))


def wait() -> None:
    """Return when no save is under way on this rank; raises the error of the last one."""
    _background.join()
