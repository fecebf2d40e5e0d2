"""Tensors to and from ranges of files, through one buffer of bounded size.

Every block that is written gets a checksum; every block that is read can be checked against it. Tensors
that lie in host memory as the file has them are written and read where they are, without the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["BUFFER_BYTES", "Block", "Staging", "bytes_of", "lies_as_in_file", "read_exactly", "slabs",
           "write_exactly"]

#: host memory that a rank needs to write or read a checkpoint of any size
BUFFER_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Block:
    """Bytes ``[start, stop)`` of a file, and their checksum."""

    start: int
    stop: int
    checksum: str


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
        """``values`` in ``dtype`` as row-major bytes, wherever and in whatever order they lie.

        They are the tensor's own memory where it lies so; else they are in the buffer until its next use.
        """
        if lies_as_in_file(values, dtype):
            return bytes_of(values)
        raw = self._take(values.numel() * dtype.itemsize)
        with torch.no_grad():
            raw.view(dtype).view(values.shape).copy_(values)
        return raw.numpy().data

    def unpack(self, values: Tensor, dtype: torch.dtype) -> None:
        """Fill ``values`` from what was read to the front of the buffer, in ``dtype``."""
        raw = self._take(values.numel() * dtype.itemsize)
        with torch.no_grad():
            values.copy_(raw.view(dtype).view(values.shape))


def lies_as_in_file(values: Tensor, dtype: torch.dtype) -> bool:
    """Are the bytes of ``values`` in host memory those of a file that holds it in ``dtype``?"""
    return values.device.type == "cpu" and values.dtype == dtype and values.is_contiguous()


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


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
