"""Collectives for CPU ranks of one host: peers read each other's memory in place.

Each rank copies or sums what it needs straight from its peers' arenas into its own private
output: a gather copies every byte once, a reduction reads each contribution once, and nothing
is packed, sent or received. A buffer from ``allocate`` is read where it lies; any other input
is first copied into the arena. Sums are made in rank order, in the dtype of the buffers.

    meet     all ranks have published the same call and where their input lies
    read     peers' inputs into the own output
    cross    all ranks have read, so inputs may change at once

Work is done when a call returns. Copying on another thread would only take the cores from the
computation that it is meant to overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, DivergenceError, LeftPassError
from .agreement import NO_UNIT, Call, Kind, gather_call, require_reducible, scatter_call, tensor_call
from .arena import Arena
from .collectives import COMBINE, DONE, VARIANT, Collectives, Handle, Reduction
from .gate import CONTROL_BYTES, Gate, Sources
from .rendezvous import Offer, meet

__all__ = ["SharedMemoryCollectives"]

#: bytes of output that are combined at a time, so that they stay in the core's cache
_BITE = 128 << 10
#: up to this many bytes each rank combines a whole all-reduce for itself, which saves a crossing
_WHOLE = 64 << 10


class SharedMemoryCollectives(Collectives):
    """Collectives of ``group``, whose ranks are processes of one host. Making it is collective.

    ``arena``: this process's shared memory, for groups that shall read each other's buffers in
    place; without it the group has its own. ``timeout_s``: how long a rank is waited for.
    Raises ``SharedMemoryUnavailable``, on all ranks or on none.
    """

    overlaps = False

    def __init__(self, group: dist.ProcessGroup, arena: Arena | None = None, *,
                 timeout_s: float = dist.default_pg_timeout.total_seconds()) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        offer = _offer(arena)
        peers = meet(group, offer)
        assert offer.arena is not None
        self._arena = offer.arena
        self._segments = [peer.segment for peer in peers]
        self._gate = Gate(self.rank, peers, timeout_s)
        weakref.finalize(self, self._gate.shut, "it was closed")
        self._attendance = _Attendance(self._gate, self)
        # Own part first, then the next ranks, so that not all ranks read from one at a time.
        self._turns = [(self.rank + step) % self.size for step in range(self.size)]

    @property
    def arena(self) -> Arena:
        """The shared memory of this process."""
        return self._arena

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that peers read in place; private memory where no shared memory is left.

        Its storage cannot be resized. It is free when its storage dies.
        """
        shared = self._arena.allocate(numel, dtype) if device.type == "cpu" else None
        return super().allocate(numel, dtype, device) if shared is None else shared

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As ``allocate``."""
        shared = self._arena.allocate(numel, dtype, zeroed=True) if device.type == "cpu" else None
        return super().zeros(numel, dtype, device) if shared is None else shared

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        call = gather_call(out, shard, self.size, tag)
        with self._attendance:
            opened = self._lay_open(shard)
            sources = self._gate.meet(call, Sources(self._offset(opened)))
            if call.numel:
                slots = out.view(self.size, call.numel).unbind()
                if slots[self.rank].data_ptr() != shard.data_ptr():
                    slots[self.rank].copy_(shard.view(-1))
                for place in self._turns[1:]:
                    slots[place].copy_(self._read(place, sources[place].data, call.numel, shard.dtype))
            self._gate.cross(call)
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        return self.reduce_after(None, out, full, tag=tag)

    def reduce_after(self, before: Tensor | None, out: Tensor, full: Tensor,
                     reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        """The same, with ``before`` [n] ahead of the contribution of rank 0 (``before ∘ 0 ∘ 1 …``)."""
        call = scatter_call(out, full, self.size, tag)
        require_reducible("reduce_scatter", full)
        begin, end = self.rank * call.numel, (self.rank + 1) * call.numel
        with self._attendance:
            opened = self._lay_open(full, (begin, end))
            sources = self._gate.meet(call, Sources(self._offset(opened)))
            if call.numel:
                shift = begin * full.itemsize
                parts = [self._read(place, source.data + shift, call.numel, full.dtype)
                         for place, source in enumerate(sources)]
                parts[self.rank] = full.view(-1)[begin:end]
                _combine(out.view(-1), [before, *parts] if before is not None else parts, COMBINE[reduction])
            self._gate.cross(call)
        return DONE

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        require_reducible("all_reduce", tensor)
        call = tensor_call(Kind.ALL_REDUCE, tensor, tag, VARIANT[reduction])
        with self._attendance:
            if call.numel * tensor.itemsize <= _WHOLE:
                self._combine_whole(call, tensor, COMBINE[reduction])
            else:
                self._combine_ranges(call, tensor, COMBINE[reduction])
            self._gate.cross(call)
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        call = tensor_call(Kind.BROADCAST, tensor, tag, source)
        with self._attendance:
            opened = self._lay_open(tensor) if self.rank == source else None
            sources = self._gate.meet(call, Sources(self._offset(opened)))
            if call.numel and self.rank != source:
                tensor.view(-1).copy_(self._read(source, sources[source].data, call.numel, tensor.dtype))
            self._gate.cross(call)
        return DONE

    def barrier(self) -> None:
        with self._attendance:
            self._gate.meet(Call(Kind.BARRIER))

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = NO_UNIT
    ) -> Handle:
        call = Call(Kind.ALL_TO_ALL, tag)
        starts = torch.tensor([0, *sent], dtype=torch.int64).cumsum(0)[:-1]  # where each rank's slot begins
        with self._attendance:
            directory, data = self._staged(starts), self._lay_open(full)
            sources = self._gate.meet(call, Sources(self._offset(data), self._offset(directory)))
            slots = out.split(list(received))
            for place in self._turns:
                if received[place]:
                    begin = int(self._read(place, sources[place].scratch, self.size, torch.int64)[self.rank])
                    offset = sources[place].data + begin * full.itemsize
                    slots[place].copy_(self._read(place, offset, received[place], full.dtype))
            self._gate.cross(call)
        return DONE

    def close(self, why: str = "it was closed") -> None:
        self._gate.shut(why)
        self._segments.clear()

    def _combine_whole(self, call: Call, tensor: Tensor, operation: Callable[..., Tensor]) -> None:
        opened = self._staged(tensor)  # peers read the copy while this rank writes the tensor
        sources = self._gate.meet(call, Sources(self._offset(opened)))
        if call.numel:
            parts = [self._read(place, source.data, call.numel, tensor.dtype)
                     for place, source in enumerate(sources)]
            _combine(tensor.view(-1), parts, operation)

    def _combine_ranges(self, call: Call, tensor: Tensor, operation: Callable[..., Tensor]) -> None:
        """Each rank combines one range for all, then takes the ranges of the others."""
        flat, share = tensor.view(-1), -(-call.numel // self.size)
        ranges = [(min(place * share, call.numel), min((place + 1) * share, call.numel))
                  for place in range(self.size)]
        opened, scratch = self._lay_open(tensor), self._memory(share, tensor.dtype)
        sources = self._gate.meet(call, Sources(self._offset(opened), self._offset(scratch)))
        begin, end = ranges[self.rank]
        if end > begin:
            parts = [self._read(place, source.data + begin * tensor.itemsize, end - begin, tensor.dtype)
                     for place, source in enumerate(sources)]
            _combine(scratch[: end - begin], parts, operation)
        self._gate.cross(call)
        for place in self._turns:
            begin, end = ranges[place]
            if end > begin:
                flat[begin:end].copy_(self._read(place, sources[place].scratch, end - begin, tensor.dtype))

    def _lay_open(self, tensor: Tensor, private: tuple[int, int] = (0, 0)) -> Tensor | None:
        """The tensor itself where peers can read it, or a copy; they do not need the range ``private``."""
        return tensor if self._arena.offset_of(tensor) is not None else self._staged(tensor, private)

    def _staged(self, tensor: Tensor, private: tuple[int, int] = (0, 0)) -> Tensor | None:
        if not tensor.numel():
            return None
        flat, (begin, end) = tensor.view(-1), private
        copy = self._memory(tensor.numel(), tensor.dtype)
        copy[:begin].copy_(flat[:begin])
        copy[end:].copy_(flat[end:])
        return copy

    def _memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self._arena.allocate(numel, dtype)
        if memory is None:
            raise CommunicationError(f"no shared memory left for {numel * dtype.itemsize} bytes",
                                     rank=self.members[self.rank],
                                     remedy="Free memory, or choose the process group as the transport.")
        return memory

    def _offset(self, tensor: Tensor | None) -> int:
        offset = None if tensor is None else self._arena.offset_of(tensor)
        return -1 if offset is None else offset

    def _read(self, place: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._segments[place].tensor(offset, numel, dtype)


class _Attendance:
    """Around a collective: whoever fails in the middle leaves the group, so that no peer waits for it."""

    def __init__(self, gate: Gate, owner: SharedMemoryCollectives) -> None:
        self._gate, self._owner = gate, weakref.ref(owner)

    def __enter__(self) -> None:
        owner = self._owner()
        if owner is not None:
            self._gate.describe_tag, self._gate.passes = owner.describe_tag, owner.passes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # All ranks have a divergence at the same place, and may go on; so may they after a pass that one of them left.
        if kind is not None and not issubclass(kind, (DivergenceError, LeftPassError)):
            self._gate.shut(f"it failed with {error or kind.__name__}")


def _offer(arena: Arena | None) -> Offer:
    """This process's part in a new group; a failure travels with it, for all ranks must hear of it."""
    try:
        arena = arena or Arena()
    except (OSError, ValueError) as error:
        return Offer(None, -1, str(error) or type(error).__name__)
    control = arena.reserve(CONTROL_BYTES)
    if control is None:
        return Offer(arena, -1, "no shared memory left")
    words = arena.segment.words(control, CONTROL_BYTES // 8)
    for place in range(len(words)):  # the memory may have held a tensor
        words[place] = 0
    return Offer(arena, control)


def _combine(out: Tensor, parts: Sequence[Tensor], operation: Callable[..., Tensor]) -> None:
    """out = part 0 ∘ part 1 ∘ …, bite by bite."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    bite = _BITE // out.itemsize if len(parts) > 2 else out.numel()
    for begin in range(0, out.numel(), bite):
        piece = slice(begin, begin + bite)
        operation(parts[0][piece], parts[1][piece], out=out[piece])
        for part in parts[2:]:
            operation(out[piece], part[piece], out=out[piece])
