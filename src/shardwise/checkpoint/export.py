"""Full parameters one bucket at a time, for export to inference engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..comm.errands import Errand
from ..storage.flat_storage import FlatStorage
from .model_tensors import ModelTensor, undivided_tensors

__all__ = ["iter_full_tensors"]


def iter_full_tensors(
    model: nn.Module, bucket_bytes: int = 256 * 2**20, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of (FQN, full tensor) that together hold at most ``bucket_bytes``, or one larger tensor.

    Every rank gets every tensor and must take part to the end: each bucket is gathered when it is
    asked for. Tied parameters come once. ``dtype``: of floating-point parameters (None: as stored);
    it is also what travels. Persistent buffers come last, as registered. The tensors are the caller's.
    """
    tensors = undivided_tensors(model)
    sharded: dict[FlatStorage, list[ModelTensor]] = {}
    for tensor in tensors:
        if tensor.storage is not None:
            sharded.setdefault(tensor.storage, []).append(tensor)
    for storage, members in sharded.items():
        in_order = sorted(members, key=lambda t, s=storage: s.layout.offsets[t.index])
        for bucket in _buckets(in_order, bucket_bytes, dtype):
            yield _gather(storage, bucket, _cast(storage.stored_dtype, dtype))
    rest = [tensor for tensor in tensors if tensor.storage is None]
    for bucket in _buckets(rest, bucket_bytes, dtype):
        wanted = [_cast(t.dtype, dtype if t.is_parameter else None) for t in bucket]
        yield [(t.fqn, t.values.to(one, copy=True)) for t, one in zip(bucket, wanted, strict=True)]


def _cast(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


def _buckets(tensors: list[ModelTensor], most: int, dtype: torch.dtype | None) -> Iterator[list[ModelTensor]]:
    bucket: list[ModelTensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel * _cast(tensor.dtype, dtype).itemsize
        if bucket and size + nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket


@torch.no_grad()
@Errand("iter_full_tensors")
def _gather(storage: FlatStorage, bucket: list[ModelTensor], dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """A stretch of the flat buffer. Each rank sends the part of it that lies in its shard, and no padding
    is made for ranks that have none."""
    layout, size = storage.layout, storage.layout.shard_numel
    start = layout.offsets[bucket[0].index]
    stop = max(layout.offsets[t.index] + t.numel for t in bucket)
    flat = torch.empty(max(stop - start, 0), dtype=dtype, device=storage.compute_device)
    for rank in range(storage.world_size):
        first, last = max(start, rank * size), min(stop, (rank + 1) * size)
        if first >= last:
            continue
        part = flat[first - start : last - start]
        if rank == storage.rank:
            part.copy_(storage.shard[first - rank * size : last - rank * size])
        if storage.world_size > 1:
            storage.comm.broadcast(part, rank).wait()
    return [(t.fqn, flat.as_strided(t.shape, storage.formats[t.index].strides(t.shape),
                                    layout.offsets[t.index] - start)) for t in bucket]
