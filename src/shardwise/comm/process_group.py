"""Collectives over a c10d process group: NCCL and its like, and gloo for tensors of an accelerator.

NCCL's ranks note what they run in a logbook, and a thread compares the books every two seconds: ranks that run
different things wait for each other on the device for ever, or mix data of equal sizes without a word.

Gloo is told apart, tensor device by tensor device, for three reasons. Its reduce-scatter is an
all-reduce and a slice (twice the bytes, a few times slower), so an all-to-all and a local sum
in rank order stand in for it. It checks nothing, and a message of an unexpected length ends the
process, so the ranks first compare what they are about to run (``check_tags``, one gather of a
few integers). And empty messages are not worth a round trip. (CPU tensors have ``MatchedCollectives``.)
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from ..torch_private import quick_gather, quick_reduce_scatter
from .agreement import (
    NO_UNIT,
    REDUCIBLE,
    Call,
    Kind,
    gather_call,
    require_agreement,
    require_reducible,
    scatter_call,
    tensor_call,
)
from .collectives import DONE, VARIANT, Collectives, Handle, Reduction, copy_alone
from .errands import HERE
from .failures import explained
from .logbook import Logbook, own_store
from .underway import Waiting
from .watch import watch

__all__ = ["ProcessGroupCollectives", "backends_by_device"]

_OPERATION = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.MIN: dist.ReduceOp.MIN,
}

_ROUND_S = 2.0  # between two comparisons of logbooks …
_LOOKS_PER_S = 128  # … in groups of up to 256 ranks; the store of the group serves so many ranks in a second

_KEPT = 2048  # calls: ranks may be some steps apart, since the host does not wait


def _c10d(*names: str) -> Callable[..., Any]:
    """The first of these functions that this torch has: 2.13 renamed two and warns of the old names."""
    return next(found for name in names if (found := getattr(dist, name, None)) is not None)


_gather = _c10d("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _c10d("reduce_scatter_single", "reduce_scatter_tensor")


class ProcessGroupCollectives(Collectives):
    """Collectives over ``group``, which stays the caller's: it is neither kept alive nor closed.

    ``check_tags``: compare tags, sizes and dtypes of all ranks before data moves. By default
    only for gloo, where it costs 0.1 to 0.2 ms and a mismatch would otherwise corrupt data.
    """

    def __init__(self, group: dist.ProcessGroup, *, check_tags: bool | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._group = weakref.ref(group)
        self._backends = backends_by_device(group)
        self._check_gloo = check_tags is not False
        self._check_others = check_tags is True

        # NCCL and its like: what the engine passes fits by construction, and nothing is compared
        self._quick = not self._check_others and "gloo" not in self._backends.values() and self.size > 1
        self._trusting, self._asked = self._quick, False
        self._gathers, self._scatters = _QuickCalls(Kind.GATHER), _QuickCalls(Kind.REDUCE_SCATTER)
        self._book: Logbook | None = None
        self._verdict: CommunicationError | None = None
        self._next_round = 0.0

    def compare_calls(self, on: bool) -> None:
        self._asked = on
        self._trusting = self._quick and not on

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        if self._trusting and out.dtype in REDUCIBLE:
            return self._launch(self._gathers[tag], quick_gather, out, shard, quick=True)
        call = gather_call(out, shard, self.size, tag)
        if self.size == 1:
            return copy_alone(out, shard)
        if not self._agreed(call, out):
            return DONE
        return self._launch(call, _gather, _wire(out), _wire(shard))

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        if self._trusting and not self.rank_order and full.dtype in REDUCIBLE:
            return self._launch(self._scatters[tag], quick_reduce_scatter, out, full, quick=True)
        call = scatter_call(out, full, self.size, tag)
        if self.size == 1:
            return copy_alone(out, full)
        require_reducible("reduce_scatter", full)
        if not self._agreed(call, out):
            return DONE
        if not self._is_gloo(full) and not self.rank_order:
            return self._launch(call, _reduce_scatter, out, full)
        arrived = torch.empty_like(full)
        pending = self._launch(call, dist.all_to_all_single, arrived, full)
        return _SumWhenArrived(pending, out, arrived, self.size)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        require_reducible("all_reduce", tensor)
        call = tensor_call(Kind.ALL_REDUCE, tensor, tag, VARIANT[reduction])
        if self.size == 1 or not self._agreed(call, tensor):
            return DONE
        if self.rank_order and reduction is Reduction.SUM:
            arrived = tensor.new_empty(self.size * tensor.numel())
            pending = self._launch(call, _gather, arrived, tensor.contiguous().view(-1))
            return _SumWhenArrived(pending, tensor, arrived, self.size)
        return self._launch(call, dist.all_reduce, tensor, op=_OPERATION[reduction])

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        call = tensor_call(Kind.BROADCAST, tensor, tag, source)
        if self.size == 1 or not self._agreed(call, tensor):
            return DONE
        return self._launch(call, dist.broadcast, _wire(tensor), group_src=source)

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = NO_UNIT
    ) -> Handle:
        call = Call(Kind.ALL_TO_ALL, tag)  # the sizes differ between ranks
        if self.size == 1:
            return copy_alone(out, full)
        self._agreed(call, full)
        return self._launch(call, dist.all_to_all_single, _wire(out), _wire(full),
                            output_split_sizes=list(received), input_split_sizes=list(sent))

    def barrier(self) -> None:
        if self.size == 1:
            return
        call = Call(Kind.BARRIER)
        if self._check_gloo and self._backends.get("cpu") == "gloo":
            self._compare(call, torch.device("cpu"))  # a gather of one message per rank is a barrier
        else:
            self._launch(call, dist.barrier).wait()  # ranks that do other things meanwhile show in what comes next

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) == "gloo"

    def _agreed(self, call: Call, tensor: Tensor) -> bool:
        """Compare calls where that is wanted; False when there is nothing left to move."""
        gloo = self._is_gloo(tensor)
        if self._asked or (self._check_gloo if gloo else self._check_others):
            self._compare(call, torch.device("cpu") if gloo else tensor.device)
        else:
            self._note(call, tensor.device)
        return not gloo or tensor.numel() > 0

    def _compare(self, call: Call, device: torch.device) -> None:
        mine = torch.tensor((*call, HERE.number), dtype=torch.int64, device=device)
        table = torch.empty(self.size * len(mine), dtype=torch.int64, device=device)
        self._launch(call, _gather, table, mine).wait()
        rows = table.view(self.size, len(mine)).tolist()
        require_agreement([Call(*row[:-1]) for row in rows], self.members, self.describe_tag,
                          errands=[row[-1] for row in rows])

    def look(self, after_s: float) -> None:
        """Now and then: show what this rank ran, and compare it with what another did. Of large groups more seldom."""
        book, now = self._book, time.monotonic()
        if book is None or self._verdict is not None or now < self._next_round:
            return
        try:
            book.publish()
            if not book.compare(self.describe_tag, self.passes.recently_left):
                self._next_round = now + max(_ROUND_S, self.size / _LOOKS_PER_S)
        except CommunicationError as error:
            self._verdict = error  # for the next collective; until then the device may wait
            print(error, file=sys.stderr, flush=True)
            group = self._group()
            if group is not None:
                with suppress(RuntimeError):
                    group.abort()

    def _launch(self, call: Call, function: Callable[..., Any], *tensors: Tensor, quick: bool = False,
                **options: object) -> Handle:
        group = self._group()
        if group is None:
            raise CommunicationError(
                f"the process group was destroyed before {call.subject(self.describe_tag)}",
                remedy="Call dist.destroy_process_group() after the last use of the model.")
        if (verdict := self._verdict) is not None:
            raise verdict
        try:
            if quick:
                (self._book or self._open(group, tensors[0].device)).note(call)
                work = function(group, *tensors)
            else:
                work = function(*tensors, group=group, async_op=True, **options)
        except RuntimeError as error:
            raise self.failed(error, call) from error
        return _Pending(self, call, work)

    def failed(self, error: RuntimeError, call: Call) -> CommunicationError:
        """What to raise for c10d's ``error``, which may be the consequence of a verdict."""
        if self._verdict is None and self._book is not None:
            self._verdict = self._book.verdict()
        return self._verdict or explained(error, call, self)

    def _note(self, call: Call, device: torch.device) -> None:
        group = self._group()
        if group is None or self._verdict is not None:
            return
        try:
            (self._book or self._open(group, device)).note(call)
        except RuntimeError as error:
            raise self.failed(error, call) from error

    def _open(self, group: Any, device: torch.device) -> Logbook:
        self._book = Logbook(own_store(group, "calls", device), self.rank, self.members, _KEPT)
        watch(self)
        return self._book


class _QuickCalls(dict[int, Call]):
    """The call of each tag. Sizes are left out: on the quick path they fit by construction."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = int(kind)

    def __missing__(self, tag: int) -> Call:
        self[tag] = call = Call(self._kind, tag)
        return call


class _Pending(Handle):
    """A c10d work under way."""

    def __init__(self, owner: ProcessGroupCollectives, call: Call, work: dist.Work | None) -> None:
        self._owner, self._call, self._work = owner, call, work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        owner = self._owner
        try:
            if owner._trusting:  # on streams: this only orders them
                work.wait()
            else:
                with Waiting(self._call, owner.describe_tag, owner.members):
                    work.wait()
        except RuntimeError as error:
            raise owner.failed(error, self._call) from error


class _SumWhenArrived(Handle):
    """The second half of gloo's reduce-scatter: out = slot 0 + slot 1 + …, in their dtype."""

    def __init__(self, pending: Handle, out: Tensor, slots: Tensor, size: int) -> None:
        self._pending, self._out, self._size = pending, out, size
        self._slots: Tensor | None = slots

    def wait(self) -> None:
        slots, self._slots = self._slots, None
        if slots is None:
            return
        self._pending.wait()
        out, parts = self._out.view(-1), slots.view(self._size, -1)
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}``"""
    pairs = (item.partition(":") for item in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _wire(tensor: Tensor) -> Tensor:
    """The tensor as transports can move it: as it is, or as bytes where the dtype is unusual."""
    return tensor if tensor.dtype in REDUCIBLE else tensor.view(torch.uint8)
