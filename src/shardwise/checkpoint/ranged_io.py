"""Tensors to and from ranges of files, through one buffer of bounded size.

Every block that is written gets a checksum; every block that is read can be checked against it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["BLOCK_BYTES", "BUFFER_BYTES", "Block", "Staging", "checksum", "read_exactly", "slabs",
           "write_exactly"]

#: host memory that a rank needs to write or read a checkpoint of any size
BUFFER_BYTES = 64 * 2**20
#: bytes under one checksum: what a reader of one row has to read at most
BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Block:
    """Bytes ``[start, stop)`` of a file, and their CRC-32."""

    start: int
    stop: int
    crc: int


def checksum(data: Any, before: int = 0) -> int:
    """CRC-32 of ``data``, going on from ``before``."""
    return zlib.crc32(data, before)


class Staging:
    """The buffer between tensors and files. It grows to what is asked for, up to ``limit``."""

    def __init__(self, limit: int = BUFFER_BYTES) -> None:
        self.limit = limit
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Host memory held now, which is the most that was held so far."""
        return self._memory.numel()

    def bytes(self, count: int) -> memoryview:
        """``count`` bytes of the buffer."""
        return self._take(count).numpy().data

    def _take(self, count: int) -> Tensor:
        if count > self.limit:
            raise CheckpointError("more bytes than the buffer holds", expected=self.limit, got=count)
        if count > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(count, dtype=torch.uint8)
        return self._memory[:count]

    def pack(self, values: Tensor, dtype: torch.dtype) -> memoryview:
        """``values`` in ``dtype`` as row-major bytes, wherever and in whatever order they lie."""
        raw = self._take(values.numel() * dtype.itemsize)
        with torch.no_grad():
            raw.view(dtype).view(values.shape).copy_(values)
        return raw.numpy().data

    def unpack(self, values: Tensor, dtype: torch.dtype) -> None:
        """Fill ``values`` from what was read to the front of the buffer, in ``dtype``."""
        raw = self._take(values.numel() * dtype.itemsize)
        with torch.no_grad():
            values.copy_(raw.view(dtype).view(values.shape))


def slabs(values: Tensor, most: int) -> Iterator[Tensor]:
    """``values`` in parts of at most ``most`` elements, in row-major order."""
    if values.numel() <= most:
        if values.numel():
            yield values
        return
    row = values[0].numel()
    if row > most:
        for part in values:
            yield from slabs(part, most)
    else:
        yield from values.split(most // row)


def write_exactly(fd: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at ``offset``."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def read_exactly(fd: int, into: memoryview, offset: int, path: object) -> None:
    """Fill ``into`` from ``offset`` on. Raises ``CheckpointError`` at the end of the file."""
    left = into
    while left:
        count = os.preadv(fd, [left], offset)
        if not count:
            raise CheckpointError(f"a file of the checkpoint ends too early: {path}", got=f"{offset} bytes",
                                  expected=f"{offset + len(left)} bytes", remedy="Take another checkpoint.")
        left, offset = left[count:], offset + count
