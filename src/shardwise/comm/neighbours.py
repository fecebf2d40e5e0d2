"""An all-gather among a few neighbouring ranks of a group, over the group itself.

A process group of its own would have to be made by every rank of the world, or under a name that
ranks with different groups do not agree on. Sending to each neighbour needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from .collectives import Collectives, Handle

__all__ = ["Neighbours"]


class Neighbours:
    """``size`` consecutive ranks of the group of ``comm``, this rank among them.

    ``group`` carries the messages; where ``comm`` is simulated, nothing is sent.
    """

    def __init__(self, comm: Collectives, group: dist.ProcessGroup | None, size: int) -> None:
        first = comm.rank // size * size
        self.rank, self.size = comm.rank - first, size
        self.members = comm.members[first : first + size]
        self._group = group if comm.real else None

    def all_gather(self, out: Tensor, part: Tensor) -> Handle:
        """Gather ``part`` [n] of every neighbour into ``out`` [size * n], in rank order. Same dtype."""
        slots = out.view(self.size, -1)
        slots[self.rank].copy_(part, non_blocking=True)
        if self._group is None or self.size == 1:
            return _Messages(self, ())
        operations: list[dist.P2POp] = []
        for place, peer in enumerate(self.members):
            if place != self.rank:
                operations.append(dist.P2POp(dist.isend, part.view(torch.uint8), peer, self._group))
                operations.append(dist.P2POp(dist.irecv, slots[place].view(torch.uint8), peer, self._group))
        return _Messages(self, dist.batch_isend_irecv(operations))


class _Messages(Handle):
    """Messages under way."""

    def __init__(self, owner: Neighbours, works: Sequence[dist.Work]) -> None:
        self._owner, self._works = owner, works

    def wait(self) -> None:
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(
                "a neighbour did not send what it kept after forward", got=str(error).splitlines()[0],
                rank=self._owner.members[self._owner.rank],
                expected=f"ranks {', '.join(map(str, self._owner.members))}",
            ) from error
