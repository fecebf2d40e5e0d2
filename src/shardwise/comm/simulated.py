"""One process plays rank r of N without a network.

For dry runs: plan, memory and order of a large world on one machine. Every buffer has its real
size; of the data only this rank's part is there (``real`` is False, so nobody checks values). It
also stands in for torch's ``fake`` backend, which fills every slot one by one: there a dry run of
a large world would spend its time copying.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ConfigurationError
from .agreement import NO_UNIT, require_fit
from .collectives import DONE, Collectives, Handle, Reduction

__all__ = ["SimulatedCollectives"]


class SimulatedCollectives(Collectives):
    """The group of ``size`` ranks as rank ``rank`` sees it when the peers never send anything.

    A gather fills this rank's slot and leaves the others as they are; a reduction gives this
    rank's own contribution; a broadcast keeps what is there.
    """

    in_place = True

    def __init__(self, rank: int, size: int, members: Sequence[int] | None = None) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ConfigurationError("a simulated rank lies inside its group",
                                     expected=f"a rank from 0 to {size - 1}", got=f"rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.members = tuple(range(size) if members is None else members)
        self.real = size == 1

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        require_fit("all_gather", out, shard, self.size)
        if shard.data_ptr() != out.data_ptr() + self.rank * shard.nbytes:
            _slot(out, shard, self.rank).copy_(shard)
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        require_fit("reduce_scatter", full, out, self.size)
        out.copy_(_slot(full, out, self.rank))
        return DONE

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        return DONE

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = NO_UNIT
    ) -> Handle:
        out.split(list(received))[self.rank].copy_(full.split(list(sent))[self.rank])
        return DONE

    def barrier(self) -> None:
        return None


def _slot(full: Tensor, part: Tensor, rank: int) -> Tensor:
    """The part of ``full`` that is ``rank``'s, shaped like ``part``."""
    count = part.numel()
    if full.dim() > 1:
        return full.view(-1)[rank * count : (rank + 1) * count].view_as(part)
    return full[rank * count : (rank + 1) * count]
