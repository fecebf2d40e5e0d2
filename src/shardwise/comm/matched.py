"""Collectives for CPU tensors over gloo, made of messages that meet only where ranks mean the same.

gloo's own collectives check nothing, and a message of an unexpected length ends the process, so before each of
them ranks would have to compare what they are about to run, which costs a message. Here nothing is compared (see
``wire``). It is also faster: the reduction is not an all-reduce and a slice, no thread of gloo's has to be woken, and
all ranks send at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from . import exchanges
from .agreement import NO_UNIT, Call, Kind, gather_call, require_agreement, require_reducible, scatter_call, tensor_call
from .collectives import COMBINE, DONE, VARIANT, Collectives, Handle, Reduction, copy_alone
from .errands import HERE
from .exchanges import Messages, Steps
from .wire import Wire

__all__ = ["MatchedCollectives"]

_SIZED = frozenset({Kind.GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST})


class MatchedCollectives(Collectives):
    """Collectives of ``group``, which has gloo for the CPU. The first collective makes connections of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._wire = Wire.of(group)
        self._asked = False

    def compare_calls(self, on: bool) -> None:
        self._asked = on

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        call = gather_call(out, shard, self.size, tag)
        if self.size == 1:
            return copy_alone(out, shard)
        return self._start(call, partial(exchanges.gather, out=out, shard=shard))

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        call = scatter_call(out, full, self.size, tag)
        if self.size == 1:
            return copy_alone(out, full)
        require_reducible("reduce_scatter", full)
        return self._start(call, partial(exchanges.reduce_scatter, out=out, full=full, combine=torch.add))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        require_reducible("all_reduce", tensor)
        call = tensor_call(Kind.ALL_REDUCE, tensor, tag, VARIANT[reduction])
        return self._start(call, partial(exchanges.all_reduce, tensor=tensor, combine=COMBINE[reduction]))

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        call = tensor_call(Kind.BROADCAST, tensor, tag, source)
        return self._start(call, partial(exchanges.broadcast, tensor=tensor, source=source))

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = NO_UNIT
    ) -> Handle:
        if self.size == 1:
            return copy_alone(out, full)
        call = tensor_call(Kind.ALL_TO_ALL, full[:0], tag)  # the sizes differ between ranks
        return self._start(call, partial(exchanges.all_to_all, out=out, full=full, received=received, sent=sent))

    def barrier(self) -> None:
        self._start(Call(int(Kind.BARRIER)), exchanges.barrier).wait()

    def close(self, why: str = "it was closed") -> None:
        self._wire.close(why)

    def run(self, call: Call, steps: Callable[[Messages], Steps]) -> Handle:
        """A collective that the caller makes out of messages; all ranks give the same ``call``."""
        return self._wire.start(self, call, steps)

    def leave(self) -> None:
        """This rank failed in the middle of something and comes no more; the others hear of it at once."""
        self._wire.leave("this rank failed in the middle of a collective")

    def _start(self, call: Call, steps: Callable[[Messages], Steps]) -> Handle:
        if self.size == 1:
            return DONE
        if self._asked:
            self._compare(call)
        if not call.numel and call.kind in _SIZED:
            return DONE
        return self._wire.start(self, call, steps)

    def _compare(self, call: Call) -> None:
        mine = torch.tensor((*call, HERE.number), dtype=torch.int64)
        table = torch.empty(self.size * len(mine), dtype=torch.int64)
        comparison = tensor_call(Kind.GATHER, mine, -1)
        self._wire.start(self, comparison, partial(exchanges.gather, out=table, shard=mine)).wait()
        rows = table.view(self.size, len(mine)).tolist()
        require_agreement([Call(*row[:-1]) for row in rows], self.members, self.describe_tag,
                          errands=[row[-1] for row in rows])
