"""Gathering a unit's flat parameters: one collective, whatever number there is.

One flat parameter is gathered straight into its buffer. Several travel together as bytes and
are copied to their buffers afterwards (shards and buffers have no history, so grad mode is of no account)::

    staging:  | r0: A | r0: B | r1: A | r1: B | ...      ->   A: | r0 | r1 |   B: | r0 | r1 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import DONE, Collectives, Handle
from ..comm.lanes import Lanes
from ..comm.neighbours import Neighbours
from ..storage.flat_buffer import FlatBuffer
from ..storage.flat_storage import FlatStorage

__all__ = ["Gather"]


class Gather:
    """Moves the parameters of one unit from shards into gathered buffers, and frees them."""

    __slots__ = ("_all", "_handle", "_held", "_kept", "_ready", "_staging", "comm", "keeping", "lanes", "small")

    def __init__(self, storages: Sequence[FlatStorage], comm: Collectives, lanes: Lanes) -> None:
        self.comm, self.lanes = comm, lanes
        self._all = storages  # the unit's own list: it may grow
        self._held: list[FlatBuffer] = []  # the buffers of the last gather
        self._staging: FlatBuffer | None = None
        self._handle: Handle = DONE
        self._ready: object = None
        self.small: Neighbours | None = None  #: after forward a part is kept, to be gathered among these
        self.keeping = False  #: keep such a part when the memory is freed next
        self._kept: list[Tensor] | None = None

    @property
    def _moving(self) -> list[FlatStorage]:
        """Those with a buffer of their own (an aliased one has nothing to move)."""
        return [storage for storage in self._all if storage.buffer is not None]

    @property
    def holds_memory(self) -> bool:
        """Are gathered buffers allocated?"""
        return any(storage.buffer is not None and storage.buffer.allocated for storage in self._all)

    @property
    def buffers(self) -> list[FlatBuffer]:
        return [storage.buffer for storage in self._all if storage.buffer is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the gathered buffers hold now."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def kept_nbytes(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(part.numel() * part.element_size() for part in self._kept or ())

    def start(self, tag: int) -> None:
        """Allocate and begin. The caller has ordered the gather lane behind what was freed."""
        moving: list[FlatStorage] = []
        held: list[FlatBuffer] = []
        for storage in self._all:
            if storage.buffer is not None:
                moving.append(storage)
                held.append(storage.buffer)
        self._held = held
        if not moving:
            return
        if moving[0].widened and moving[0].world_size > 1:
            for storage in moving:  # what the user sees inside a summon is what forward computes with
                storage.fill_leaves()
            return
        if self.lanes.immediate:
            self._begin(moving, tag)
            return
        lane, reads = self.lanes.gather, self._kept or [s.shard for s in moving]
        with lane:
            self._begin(moving, tag)
            lane.note("gather", reads=reads, writes=held)
            self._complete()
            self._ready = lane.mark()

    def _begin(self, moving: Sequence[FlatStorage], tag: int) -> None:
        for buffer in self._held:
            buffer.allocate()
        if self._kept is not None:
            self._handle = self._start_kept(moving)
        elif self.comm.size == 1:
            for storage in moving:
                storage.own_slot.copy_(storage.shard, non_blocking=True)
        elif len(moving) == 1:
            self._handle = self.comm.all_gather(moving[0].full, self._source(moving[0]), tag=tag)
        else:
            self._handle = self._start_staged(moving, tag)

    @staticmethod
    def _source(storage: FlatStorage) -> Tensor:
        """The shard itself where it can travel as it is, else what it is cast to or copied to in the buffer."""
        shard, full = storage.shard, storage.full
        if not storage.comm.in_place and shard.dtype is full.dtype and shard.device == full.device:
            return shard
        return storage.own_slot.copy_(shard, True)  # not blocking

    def _start_staged(self, moving: Sequence[FlatStorage], tag: int) -> Handle:
        world, sizes = self.comm.size, [s.own_slot.numel() * s.own_slot.element_size() for s in moving]
        chunk = sum(sizes)
        if self._staging is None or self._staging.tensor.numel() != chunk * world:
            self._staging = FlatBuffer(chunk * world, torch.uint8, moving[0].full.device, moving[0].pool)
        self._staging.allocate()
        self.lanes.gather.note("stage", writes=[self._staging])
        mine = self._staging.tensor.narrow(0, self.comm.rank * chunk, chunk)
        for storage, part in zip(moving, mine.split(sizes), strict=True):
            part.view(storage.full.dtype).copy_(storage.shard, non_blocking=True)
        return self.comm.all_gather(self._staging.tensor, mine, tag=tag)

    def _start_kept(self, moving: Sequence[FlatStorage]) -> Handle:
        """From the parts that were kept after forward, among the neighbours."""
        kept, self._kept, small = self._kept, None, self.small
        assert kept is not None and small is not None
        handles = [small.all_gather(storage.full, part)
                   for storage, part in zip(moving, kept, strict=True)]
        for handle in handles[:-1]:
            handle.wait()
        return handles[-1]

    def _keep_part(self, small: Neighbours) -> None:
        if self._kept is None and self._moving:
            with self.lanes.gather:
                self._kept = [s.full.view(small.size, -1)[small.rank].clone() for s in self._moving]
                self.lanes.gather.note("keep", reads=self.buffers, writes=self._kept)

    def forget(self) -> None:
        """What was kept after forward is out of date, or needed no longer."""
        self.keeping, self._kept = False, None

    def _complete(self) -> None:
        """Wait for the collective and spread staged bytes."""
        handle, self._handle = self._handle, DONE
        handle.wait()
        staging = self._staging
        if staging is not None and staging.allocated:
            moving = self._moving
            self.lanes.gather.note("spread", reads=[staging], writes=self.buffers)
            table = staging.tensor.view(self.comm.size, -1)
            sizes = [s.own_slot.numel() * s.own_slot.element_size() for s in moving]
            for storage, part in zip(moving, table.split(sizes, dim=1), strict=True):
                storage.full.view(self.comm.size, -1).copy_(part.view(storage.full.dtype))
            staging.free()

    def finish(self) -> None:
        """Make the gathered parameters visible to the compute lane."""
        if self.lanes.immediate:
            if self._handle is not DONE or self._staging is not None:
                self._complete()
        else:
            self.lanes.compute.wait(self._ready)

    def note_use(self) -> None:
        """State that compute read the gathered parameters."""
        self.lanes.compute.note("use", reads=self._held)

    def free(self, *, after: object = None) -> None:
        """Take the memory away: the next gather may have it, once compute has reached ``after``."""
        if not self.lanes.immediate:
            self.lanes.gather.wait(after if after is not None else self.lanes.compute.mark())
        if self.keeping:
            self.keeping = False
            if self.small is not None:
                self._keep_part(self.small)
        for buffer in self._held:
            buffer.free()
