"""Memory that comes and goes while views of it stay: the gathered parameters of a unit.

Autograd saves views of parameters in forward and reads them in backward, so the memory behind
them may be freed in between only if backward refills *the same storage*. A ``FlatBuffer`` is
one storage for life; ``allocate`` gives it bytes, ``free`` takes them away. What one buffer
gives back, the next one of the same size takes (``BufferPool``): equal units reuse two pieces
of memory instead of asking the system for pages at every gather.

``tensor`` and the views made from it have version counters of their own, so that refilling
the memory is not mistaken by autograd for a change of a saved parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..torch_private import swap_storage

__all__ = ["BufferPool", "FlatBuffer", "TransportPool", "ZeroedPool"]


class BufferPool:
    """Memory given back by buffers of one device, for the next one of the same size.

    At most ``keep`` times the largest piece is kept, however many sizes there are; what was
    given back longest ago goes first. For the CPU: an accelerator's allocator does this by itself.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self.nbytes = 0  #: bytes kept for reuse
        self._free: dict[int, list[torch.UntypedStorage]] = {}  # by size; that given back last comes last
        self._last = -1  # that size
        self._empty: list[torch.UntypedStorage] = []  # shells without memory, for what is given back next

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give the empty ``storage`` ``nbytes`` of uninitialised memory."""
        if pieces := self._free.get(nbytes):
            swap_storage(storage, piece := pieces.pop())
            self.nbytes -= nbytes
            self._empty.append(piece)
        else:
            self._take_new(storage, nbytes)

    def _take_new(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def give(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Take the ``nbytes`` of memory of ``storage``, which is empty afterwards."""
        swap_storage(storage, piece := self._empty.pop() if self._empty else torch.UntypedStorage(0))
        if nbytes != self._last:
            self._last = nbytes
            self._free[nbytes] = self._free.pop(nbytes, [])
        self._free[nbytes].append(piece)
        self.nbytes += nbytes
        if self.nbytes > self.keep * nbytes:
            self._trim()

    def _trim(self) -> None:
        """Return to the system what is beyond ``keep`` times the largest piece."""
        while self.nbytes > self.keep * max(nbytes for nbytes, pieces in self._free.items() if pieces):
            nbytes, pieces = next(item for item in self._free.items() if item[1])
            self.nbytes -= nbytes
            pieces.pop()

    def clear(self) -> None:
        """Return all kept memory to the system."""
        self._free.clear()
        self.nbytes, self._last = 0, -1


class ZeroedPool(BufferPool):
    """Memory that begins as zeros, for a dry run: what no gather fills must not be computed with as it happens to be.

    Left-over bits are often denormal numbers, with which a processor is many times slower, or not numbers.
    """

    def _take_new(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super()._take_new(storage, nbytes)
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()  # pyright: ignore[reportArgumentType]


class TransportPool(BufferPool):
    """Memory of a transport, which its peers may read in place: nothing is copied before a reduction."""

    def __init__(self, transport: Collectives) -> None:
        super().__init__(keep=1)
        self._transport = weakref.ref(transport)

    @classmethod
    def of(cls, transport: Collectives) -> TransportPool:
        """The one of ``transport``."""
        if transport not in _TRANSPORT_POOLS:
            _TRANSPORT_POOLS[transport] = cls(transport)
        return _TRANSPORT_POOLS[transport]

    def _take_new(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        transport = self._transport()
        if transport is None or not nbytes:
            super()._take_new(storage, nbytes)
            return
        swap_storage(storage, piece := transport.allocate(nbytes, torch.uint8, storage.device).untyped_storage())
        self._empty.append(piece)


_TRANSPORT_POOLS: weakref.WeakKeyDictionary[Collectives, TransportPool] = weakref.WeakKeyDictionary()


class FlatBuffer:
    """A 1-D tensor whose memory is allocated and freed in place."""

    __slots__ = ("_nbytes", "_pool", "_storage", "allocated", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool) -> None:
        with torch.inference_mode(mode=False):
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._pool = pool if device.type == "cpu" and swap_storage is not None else None
        self._storage.resize_(0)
        self.allocated = False

    def allocate(self) -> None:
        """Give the buffer uninitialised memory, unless it has memory already."""
        if not self.allocated:
            if self._pool is not None:
                self._pool.take(self._storage, self._nbytes)
            else:
                self._storage.resize_(self._nbytes)
            self.allocated = True

    def free(self) -> None:
        """Take the memory away. The views stay, and must not be read until the next refill."""
        if self.allocated:
            if self._pool is not None:
                self._pool.give(self._storage, self._nbytes)
            else:
                self._storage.resize_(0)
            self.allocated = False

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._storage.nbytes()

    def view(self, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A view for life, with a version counter of its own. The buffer need not be allocated."""
        was = self.allocated
        self.allocate()  # a view of an empty storage is refused
        with torch.inference_mode(mode=False), torch.no_grad():
            made = self.tensor.as_strided(size, stride, offset).data
        if not was:
            self.free()
        return made
