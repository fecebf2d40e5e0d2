"""The one seam to the network: 1-D tensors, ranks, sums. It has never heard of a parameter.

Every transport (c10d process group, shared memory, simulated) is a ``Collectives``. A
collective carries a ``tag``, a small integer that all ranks must agree on; a transport that
can compare tags at no real cost does so and raises ``DivergenceError`` before data is mixed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from .agreement import NO_UNIT
from .passes import Passes

__all__ = ["COMBINE", "DONE", "VARIANT", "Collectives", "Handle", "Reduction", "copy_alone"]


class Reduction(Enum):
    """How contributions of the ranks are combined."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


#: the operation of a reduction, and its number in a call
COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}
VARIANT = {Reduction.SUM: 0, Reduction.MAX: 1, Reduction.MIN: 2}


class Handle(ABC):
    """A collective under way; ``wait`` makes its result visible to the caller's stream."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the result. Safe to call twice. Raises ``CommunicationError``."""


class _Done(Handle):
    def wait(self) -> None:
        return None


DONE = _Done()


def copy_alone(out: Tensor, source: Tensor) -> Handle:
    """A group of one: nothing to combine."""
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return DONE


class Collectives(ABC):
    """Collectives over one group of ranks. ``rank`` is this rank's place in the group."""

    rank: int
    size: int
    #: group ranks -> global ranks, for messages
    members: tuple[int, ...]
    #: False where no real data arrives (a dry run), so that results must not be checked
    real: bool = True
    #: False where a collective is finished when its call returns, so that starting it early gains nothing
    overlaps: bool = True
    #: True: a shard that lies in its own slot of the output already need not be copied
    in_place: bool = False
    #: True: sums are made in rank order, even where that costs more (``shardwise.deterministic``)
    rank_order: bool = False
    #: turns a tag into words for messages; set by the engine
    describe_tag: Callable[[int], str] | None = None
    #: of the ranks of this group; counted by the engine where a model runs on it
    passes: Passes = Passes()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer that this transport moves without a further copy. Uninitialised."""
        return torch.empty(numel, dtype=dtype, device=device)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, zeroed; not again where the system's new pages are zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        """Concatenate ``shard`` [n] of every rank into ``out`` [size*n], in rank order.

        ``shard`` may be this rank's own slot of ``out`` (in place). Same dtype.
        """

    @abstractmethod
    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        """Sum slot ``rank`` of every rank's ``full`` [size*n] into ``out`` [n].

        ``full`` may be overwritten. ``out`` may not alias ``full``. Same dtype; the sum is
        made in that dtype, in rank order where the transport can.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        """Combine ``tensor`` of every rank in place."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        """Give every rank the ``tensor`` of group rank ``source``, in place."""

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = NO_UNIT
    ) -> Handle:
        """Send slot ``r`` of ``full`` (``sent[r]`` elements) to rank ``r``, for each rank.

        Slot ``r`` of ``out`` (``received[r]`` elements) comes from there. Same dtype, 1-D. A transport
        that has nothing better gathers everything on every rank.
        """
        table = torch.zeros(self.size * self.size, dtype=torch.int64, device=full.device)
        self.all_gather(table, torch.tensor(sent, dtype=torch.int64, device=full.device), tag=tag).wait()
        counts = [table[place * self.size : (place + 1) * self.size].tolist() for place in range(self.size)]
        longest = max(sum(row) for row in counts)
        mine, everyone = full.new_zeros(longest), full.new_zeros(longest * self.size)
        mine[: full.numel()].copy_(full)
        self.all_gather(everyone, mine, tag=tag).wait()
        slots = out.split(list(received))
        for place, row in enumerate(counts):
            begin = place * longest + sum(row[: self.rank])
            slots[place].copy_(everyone[begin : begin + row[self.rank]])
        return DONE

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    def compare_calls(self, on: bool) -> None:
        """Compare what ranks are about to run, where this transport does not always do so."""

    def close(self, why: str = "it was closed") -> None:
        """Give back what the transport holds (memory, sockets, threads). Safe to call twice."""
