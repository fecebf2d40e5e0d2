"""From the meta device to memory: a shard gets room, then the rows of whole values, one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from .flat_storage import FlatStorage
from .sharded_parameter import give_memory

__all__ = ["leave_meta", "put_rows"]


def leave_meta(storage: FlatStorage, device: torch.device) -> None:
    """Zeros on ``device`` for a shard on the meta device. The user's objects stay what they are."""
    with torch.inference_mode(mode=False), torch.no_grad():
        fresh = storage.new_shard(storage.stored_dtype, device)
    for seen in (*storage.visible, *storage.hidden):
        give_memory(seen.parameter, storage.local_view(seen, fresh).data)
    storage.settle_in(fresh)


def put_rows(storage: FlatStorage, index: int, whole: Tensor) -> None:
    """Keep this rank's rows of a ``whole`` value of parameter ``index``."""
    span = storage.layout.span(index, storage.rank)
    with torch.no_grad():
        storage.shard[span.shard_offset : span.shard_offset + span.numel].copy_(storage.rows_of(index, whole))
