"""Reducing: the collected gradients of all ranks, summed and divided, this rank's chunk kept.

    reduce-scatter in the shard group  ->  all-reduce over replicas  ->  division

Sums are divided after adding, where fp16 could overflow partly before (as large a power of
two as balances both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import DONE, Collectives, Handle
from ..comm.lanes import Lanes

__all__ = ["Groups", "Reduced", "Reducer"]


@dataclass(frozen=True)
class Groups:
    """The ranks that a unit's gradients are combined over."""

    shard: Collectives
    replicate: Collectives | None = None

    @property
    def world_size(self) -> int:
        """Ranks with different data."""
        return self.shard.size * (self.replicate.size if self.replicate is not None else 1)

    @property
    def nontrivial(self) -> Iterator[Collectives]:
        """The groups with more than one rank."""
        if self.shard.size > 1:
            yield self.shard
        if self.replicate is not None and self.replicate.size > 1:
            yield self.replicate


@dataclass
class Reduced:
    """One chunk of gradients on its way, then ready. ``used``: which targets this rank filled."""

    chunk: Tensor
    used: list[bool]
    handle: Handle
    summed: bool = False
    final: bool = True  #: False: not yet combined over replicas
    mark: object = None
    bound: bool = False  #: the parameters that this rank used have their gradients


class Reducer:
    """Sends a unit's gradients; at most one chunk is on its way."""

    def __init__(self, groups: Groups, lanes: Lanes) -> None:
        self.groups, self._lanes = groups, lanes
        self.divide_factor: float | None = None
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self._partial: tuple[Tensor, list[bool]] | None = None

    def pre_divisor(self, wire: torch.dtype) -> float:
        """What gradients are divided by before the sum."""
        if wire is not torch.float16 or self.divide_factor is not None:
            return 1.0
        factor, world = 1, self.groups.world_size
        while world % factor == 0 and world / factor > factor:
            factor *= 2
        return float(factor)

    def _post_divisor(self, wire: torch.dtype) -> float:
        total = self.divide_factor if self.divide_factor is not None else float(self.groups.world_size)
        return total / self.pre_divisor(wire)

    def start(self, full: Tensor, used: list[bool], tag: int) -> Reduced:
        """Begin to send ``full`` [N * C] (overwritten); the chunk [C] is new memory."""
        lanes, shard = self._lanes, self.groups.shard
        lanes.reduce.wait(lanes.compute.mark())
        lanes.reduce.note("reduce", reads=[full])
        with lanes.reduce, torch.no_grad():
            if shard.size == 1:
                return Reduced(full.clone(), used, DONE)
            chunk = torch.empty(full.numel() // shard.size, dtype=full.dtype, device=full.device)
            return Reduced(chunk, used, shard.reduce_scatter(chunk, full, tag=tag))

    def finish(self, reduced: Reduced, tag: int, *, all_reduce: bool) -> None:
        """Complete the sum and divide it. Not ``final`` where replicas are left for later."""
        if reduced.summed:
            return
        with self._lanes.reduce, torch.no_grad():
            reduced.handle.wait()
            if self._partial is not None:
                earlier, flags = self._partial
                reduced.chunk.add_(earlier)
                reduced.used = [a or b for a, b in zip(reduced.used, flags, strict=True)]
                self._partial = None
            replicate = self.groups.replicate
            if replicate is not None and replicate.size > 1:
                if not all_reduce:
                    self._partial = (reduced.chunk, reduced.used)
                    reduced.summed, reduced.final = True, False
                    return
                replicate.all_reduce(reduced.chunk, tag=tag).wait()
            divisor = self._post_divisor(reduced.chunk.dtype)
            if divisor != 1.0:
                reduced.chunk.div_(divisor)
            if self.all_reduce_hook is not None:
                self.all_reduce_hook(reduced.chunk)
        reduced.mark = self._lanes.reduce.mark()
        reduced.summed = True

    def wait(self, reduced: Reduced) -> None:
        """Make the finished chunk visible to the compute lane."""
        self._lanes.compute.wait(reduced.mark)

    def drop(self) -> None:
        """Forget partial sums."""
        self._partial = None
