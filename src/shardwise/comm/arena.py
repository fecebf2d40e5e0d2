"""Shared memory of one process: a sparse file in memory that peers map once and read in place.

The file (``memfd_create``) has no name, so nothing is left in /dev/shm however a process ends,
and it is not bounded by the size of /dev/shm, which containers like to set to 64 MB. It is as
large as the machine's memory but sparse: only pages that were written exist. So a peer maps all
of it when the group is set up, and an allocation is an offset: no registration, no descriptor
for each buffer, and ranks may allocate and free in different orders.

Fresh pages are dear (the kernel zeroes them), so freed blocks are kept for reuse up to a bound,
beyond which their pages go back to the system.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

__all__ = ["Arena", "Blocks", "Segment"]

_PAGE = 4096
_LARGEST = 4 << 40  # bytes of address space; 16 ranks of it still fit in 47 bits
_KEEP = 256 << 20  # free bytes that stay resident
# Linux advice that the mmap module of Python 3.11 does not name.
_DONT_DUMP = 16
_POPULATE_WRITE = 23


class Segment:
    """One process's file, mapped here. Tensors made from it keep the mapping alive."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.capacity = capacity
        self.map = mmap.mmap(descriptor, capacity)
        self.map.madvise(_DONT_DUMP)
        self.address = torch.frombuffer(self.map, dtype=torch.uint8, count=1).data_ptr()

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The bytes at ``offset`` as a 1-D tensor; not empty."""
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)

    def words(self, offset: int, count: int) -> memoryview[int]:
        """``count`` 64-bit integers at ``offset``."""
        return memoryview(self.map)[offset : offset + 8 * count].cast("q")


@dataclass
class _Block:
    start: int
    length: int
    #: all its pages exist
    ready: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class Blocks:
    """Which bytes of an arena are free, by address: some with pages, which are used first, some without.

    Neighbours are joined when both have pages or neither has.
    """

    def __init__(self, capacity: int) -> None:
        self._free = [_Block(0, capacity, ready=False)]
        self._used: dict[int, int] = {}
        #: free bytes that have pages
        self.resident = 0

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return sum(self._used.values())

    def take(self, length: int) -> tuple[int, bool] | None:
        """The start of ``length`` bytes, and whether their pages exist; None when there is no room."""
        fitting = [block for block in self._free if block.length >= length]
        block = next((block for block in fitting if block.ready), fitting[0] if fitting else None)
        if block is None:
            return None
        start = block.start
        block.start += length
        block.length -= length
        if not block.length:
            self._free.remove(block)
        self._used[start] = length
        self.resident -= length if block.ready else 0
        return start, block.ready

    def give_back(self, start: int, *, ready: bool = True) -> None:
        """Free what ``take`` gave at ``start``."""
        block = _Block(start, self._used.pop(start), ready)
        self.resident += block.length if ready else 0
        index = bisect_left(self._free, start, key=lambda free: free.start)
        self._free.insert(index, block)
        self._join(index)
        self._join(index - 1)

    def surplus(self, keep: int) -> list[tuple[int, int]]:
        """Free (start, length) whose pages shall go so that at most ``keep`` bytes stay; highest first."""
        surplus: list[tuple[int, int]] = []
        if self.resident <= keep:
            return surplus
        for block in reversed(self._free):
            if self.resident > keep and block.ready:
                self.resident -= block.length
                block.ready = False
                surplus.append((block.start, block.length))
        for index in reversed(range(len(self._free))):
            self._join(index)
        return surplus

    def _join(self, index: int) -> None:
        if 0 <= index < len(self._free) - 1:
            block, following = self._free[index], self._free[index + 1]
            if block.end == following.start and block.ready == following.ready:
                block.length += following.length
                del self._free[index + 1]


class Arena:
    """The shared memory that this process writes.

    A tensor from ``allocate`` owns its block until its storage dies. Raises ``OSError`` where
    the system has no such memory. In a forked child the arena hands out nothing and frees
    nothing: the memory is its parent's.
    """

    def __init__(self, capacity: int | None = None, *, keep: int = _KEEP) -> None:
        wanted = capacity or min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _LARGEST)
        size = _whole_pages(wanted)
        self.descriptor = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        os.ftruncate(self.descriptor, size)
        self.segment = Segment(self.descriptor, size)
        self._blocks = Blocks(size)
        self._keep = keep
        self._dead: deque[int] = deque()
        self._lock = Lock()
        self._owner = os.getpid()

    @property
    def used(self) -> int:
        """Bytes in blocks that are handed out."""
        with self._lock:
            self._reclaim()
            return self._blocks.used

    def allocate(self, numel: int, dtype: torch.dtype, *, zeroed: bool = False) -> Tensor | None:
        """A 1-D tensor in shared memory, uninitialised unless ``zeroed``; None when there is no room for it."""
        if not numel or os.getpid() != self._owner:
            return None
        taken = self._take(numel * dtype.itemsize)
        if taken is None:
            return None
        start, fresh = taken
        memory = memoryview(self.segment.map)[start : start + numel * dtype.itemsize]
        weakref.finalize(memory, self._on_death, start).atexit = False
        tensor = torch.frombuffer(memory, dtype=dtype)
        return tensor.zero_() if zeroed and not fresh else tensor

    def reserve(self, size: int) -> int | None:
        """The offset of ``size`` bytes that are never freed, or None when there is no room."""
        taken = self._take(size)
        return None if taken is None else taken[0]

    def _take(self, size: int) -> tuple[int, bool] | None:
        """The offset of a block, and whether its pages are new, which are zeros."""
        length = _whole_pages(size)
        with self._lock:
            self._reclaim()
            taken = self._blocks.take(length)
            if taken is None:
                self._trim(0)  # room may be in pieces, some with pages and some without
                taken = self._blocks.take(length)
            if taken is None:
                return None
            start, ready = taken
            if ready or self._populate(start, length):
                return start, not ready
            self._blocks.give_back(start, ready=False)
            return None

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the arena the tensor begins, or None when it lies elsewhere."""
        offset = tensor.data_ptr() - self.segment.address
        return offset if 0 <= offset < self.segment.capacity else None

    def _populate(self, start: int, length: int) -> bool:
        """Make the pages now: lack of memory is then an answer, and not a bus error at the first write."""
        try:
            self.segment.map.madvise(_POPULATE_WRITE, start, length)
        except OSError as error:
            return error.errno == errno.EINVAL  # an older kernel: pages come at the first write
        return True

    def _on_death(self, start: int) -> None:
        """A storage died; on any thread, perhaps in the middle of ``allocate``, so never wait here."""
        self._dead.append(start)
        if os.getpid() == self._owner and self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        if not self._dead:
            return
        while self._dead:
            self._blocks.give_back(self._dead.popleft())
        self._trim(self._keep)

    def _trim(self, keep: int) -> None:
        for start, length in self._blocks.surplus(keep):
            self.segment.map.madvise(mmap.MADV_REMOVE, start, length)


def _whole_pages(size: int) -> int:
    return max(-(-size // _PAGE), 1) * _PAGE
