"""Reducing: the collected gradients of all ranks, summed and divided, this rank's chunk kept.

    reduce-scatter in the shard group  ->  all-reduce over replicas  ->  division

A communication hook of the user's takes the place of the first step and of its share of the
division; where nothing is sharded, of the second.

Sums are divided after adding, where fp16 could overflow partly before (as large a power of
two as balances both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import DONE, Collectives, Handle
from ..comm.lanes import Lanes

__all__ = ["CommHook", "Groups", "Reduced", "Reducer", "balanced_divisor"]


def balanced_divisor(world: int) -> float:
    """The power of two next to the root of ``world``: as much is divided before a sum as after it."""
    factor = 1
    while world % factor == 0 and world / factor > factor:
        factor *= 2
    return float(factor)


@cache
def _scalar(value: float, like: torch.dtype) -> Tensor:
    """``value`` as a tensor: dividing by a Python number makes one at every call, which takes longer.

    Of a narrow dtype it would be rounded; the others would convert it at every call.
    """
    return torch.tensor(value, dtype=torch.float32 if like is torch.float32 else torch.float64)


def _real(tensor: Tensor) -> Tensor:
    """For the wire: a sum of complex numbers is one of their parts."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class CommHook:
    """``hook(state, gradient)`` where nothing is sharded, else ``hook(state, full, chunk)``.

    It leaves the mean over its group in its last argument, in place or by ``.data =``.
    """

    state: object
    hook: Callable[..., Any]


@dataclass(frozen=True)
class Groups:
    """The ranks that a unit's gradients are combined over."""

    shard: Collectives
    replicate: Collectives | None = None

    @cached_property
    def world_size(self) -> int:
        """Ranks with different data."""
        return self.shard.size * (self.replicate.size if self.replicate is not None else 1)

    @property
    def members(self) -> set[int]:
        """The ranks, as the default group numbers them."""
        return {rank for group in self.nontrivial for rank in group.members}

    @property
    def nontrivial(self) -> Iterator[Collectives]:
        """The groups with more than one rank."""
        if self.shard.size > 1:
            yield self.shard
        if self.replicate is not None and self.replicate.size > 1:
            yield self.replicate


@dataclass(slots=True)
class Reduced:
    """One chunk of gradients on its way, then ready. ``used``: which targets this rank filled."""

    chunk: Tensor
    source: Tensor | None  #: what is sent; held until compute has waited for the reduction
    used: list[bool]
    handle: Handle
    summed: bool = False
    final: bool = True  #: False: not yet combined over replicas
    mark: object = None  #: of the reduce lane, behind the sum: what uses the chunk waits for it
    arrived: bool = False  #: the parameters that this rank used have their gradients, or will after the backward

    def has_any(self, numbers: Sequence[int]) -> bool:
        """Did this rank fill any of these targets?"""
        return any(self.used[number] for number in numbers)


class Reducer:
    """Sends a unit's gradients; at most one chunk is on its way. To be used without grad mode."""

    __slots__ = ("_lanes", "all_reduce_hook", "comm_hook", "divide_factor", "groups", "partial")

    def __init__(self, groups: Groups, lanes: Lanes) -> None:
        self.groups, self._lanes = groups, lanes
        self.divide_factor: float | None = None
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self.comm_hook: CommHook | None = None
        self.partial: tuple[Tensor, list[bool]] | None = None  #: waits for the replicas: a chunk, as ``Reduced.used``

    def pre_divisor(self, wire: torch.dtype) -> float:
        """What gradients are divided by before the sum."""
        if wire is not torch.float16 or self.divide_factor is not None or self.comm_hook is not None:
            return 1.0
        return balanced_divisor(self.groups.world_size)

    def _post_divisor(self, wire: torch.dtype) -> float:
        if self.comm_hook is not None:
            replicate = self.groups.replicate
            return float(replicate.size) if replicate is not None and self.groups.shard.size > 1 else 1.0
        total = self.divide_factor if self.divide_factor is not None else float(self.groups.world_size)
        return total if wire is not torch.float16 else total / self.pre_divisor(wire)

    def start(self, full: Tensor, used: list[bool], tag: int) -> Reduced:
        """Begin to send ``full`` [N * C] (overwritten); the chunk [C] is new memory."""
        lanes = self._lanes
        if lanes.immediate:
            chunk, handle = self._begin(full, tag)
        else:
            lanes.reduce.wait(lanes.compute.mark())
            with lanes.reduce:
                chunk, handle = self._begin(full, tag)
                lanes.reduce.note("reduce", reads=[full], writes=[chunk])
        return Reduced(chunk, full, used, handle)

    def _begin(self, full: Tensor, tag: int) -> tuple[Tensor, Handle]:
        shard = self.groups.shard
        if shard.size == 1:
            return full.clone(), DONE
        chunk = full.new_empty(full.numel() // shard.size)
        if self.comm_hook is not None:
            self.comm_hook.hook(self.comm_hook.state, full.detach(), chunk)
            return chunk, DONE
        if full.is_complex():
            return chunk, shard.reduce_scatter(_real(chunk), _real(full), tag=tag)
        return chunk, shard.reduce_scatter(chunk, full, tag=tag)

    def _all_reduce(self, chunk: Tensor, tag: int) -> None:
        replicate = self.groups.replicate
        if self.comm_hook is not None and self.groups.shard.size == 1:
            self.comm_hook.hook(self.comm_hook.state, chunk)
        elif replicate is not None and replicate.size > 1:
            replicate.all_reduce(_real(chunk), tag=tag).wait()

    def finish(self, reduced: Reduced, tag: int, *, all_reduce: bool) -> None:
        """Complete the sum, once, and divide it. Not ``final`` where replicas are left for later."""
        lane = self._lanes.reduce
        if self._lanes.immediate:
            self._combine(reduced, tag, all_reduce)
        else:
            with lane:
                self._combine(reduced, tag, all_reduce)
                lane.note("combine", writes=[reduced.chunk])
            reduced.mark = lane.mark()
        reduced.summed = True

    def _combine(self, reduced: Reduced, tag: int, all_reduce: bool) -> None:
        if reduced.handle is not DONE:
            reduced.handle.wait()
        replicate = self.groups.replicate
        partial = replicate is not None and replicate.size > 1 and not all_reduce
        if partial or self.partial is not None:
            self._add_earlier(reduced, keep=partial)
        if partial:
            reduced.final = False
            return
        if replicate is not None or self.comm_hook is not None:
            self._all_reduce(reduced.chunk, tag)
        divisor = self._post_divisor(reduced.chunk.dtype)
        if divisor != 1.0:
            reduced.chunk.div_(_scalar(divisor, reduced.chunk.dtype))
        if self.all_reduce_hook is not None:
            self.all_reduce_hook(reduced.chunk)

    def _add_earlier(self, reduced: Reduced, *, keep: bool) -> None:
        """Add what waits for the replicas to ``reduced``; ``keep``: let the sum wait, in fp32 at least."""
        wire, total = reduced.chunk.dtype, reduced.chunk
        if self.partial is not None:
            earlier, flags = self.partial
            total = earlier.add_(total)
            reduced.used = [a or b for a, b in zip(reduced.used, flags, strict=True)]
            self.partial = None
        if keep:
            self.partial = (total.to(torch.promote_types(wire, torch.float32)), reduced.used)
        else:
            reduced.chunk = total.to(wire)

    def wait(self, reduced: Reduced) -> None:
        """Make the finished chunk visible to the compute lane."""
        if reduced.mark is not None:
            self._lanes.compute.wait(reduced.mark)
        reduced.source = None

    def drop(self) -> None:
        """Forget partial sums."""
        self.partial = None
