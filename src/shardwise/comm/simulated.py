"""One process plays rank r of N without a network.

For dry runs: plan, memory and order of a large world on one machine. Every buffer has its real
size; of the data only this rank's part is there (``real`` is False, so nobody checks values).
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ConfigurationError
from .agreement import gather_call, scatter_call
from .collectives import DONE, Collectives, Handle, Reduction

__all__ = ["SimulatedCollectives"]


class SimulatedCollectives(Collectives):
    """The group of ``size`` ranks as rank ``rank`` sees it when the peers never send anything.

    A gather fills this rank's slot and leaves the others as they are; a reduction gives this
    rank's own contribution; a broadcast keeps what is there.
    """

    def __init__(self, rank: int, size: int) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ConfigurationError("a simulated rank lies inside its group",
                                     expected=f"a rank from 0 to {size - 1}", got=f"rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.members = tuple(range(size))
        self.real = size == 1

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = 0) -> Handle:
        gather_call(out, shard, self.size, tag)
        _copy(self._own_slot(out), shard)
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = 0) -> Handle:
        scatter_call(out, full, self.size, tag)
        _copy(out, self._own_slot(full))
        return DONE

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = 0) -> Handle:
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = 0) -> Handle:
        return DONE

    def barrier(self) -> None:
        return None

    def _own_slot(self, full: Tensor) -> Tensor:
        return full.view(self.size, -1)[self.rank] if full.numel() else full.view(-1)


def _copy(out: Tensor, source: Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.view(-1).copy_(source.view(-1))
