"""Counting: which collectives ran, over how much, and what that puts on the wire.

``wire_bytes`` is what one rank has to receive in the best algorithm, so that a step can be
compared with the formula: (N−1)/N of the gathered, scattered or exchanged bytes, twice that
for an all-reduce, and for a broadcast the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import wire
from shardwise.comm.collectives import Collectives, Handle, Reduction

__all__ = ["Collective", "CountingCollectives", "Traffic", "count_collectives", "count_messages"]


@dataclass(frozen=True)
class Collective:
    """One call: the operation, its full tensor's size (all ranks' parts together), and its cost."""

    operation: str
    numel: int
    dtype: torch.dtype | None
    wire_bytes: float
    tag: int = 0


@dataclass
class Traffic:
    """The calls in their order."""

    calls: list[Collective] = field(default_factory=list)

    @property
    def operations(self) -> list[str]:
        """The names in call order."""
        return [call.operation for call in self.calls]

    def count(self, *operations: str) -> int:
        """How many calls of these operations; of all where none is named."""
        return len(self._of(operations))

    def numel(self, *operations: str) -> int:
        """Elements of the full tensors of these operations."""
        return sum(call.numel for call in self._of(operations))

    def wire_bytes(self, *operations: str) -> float:
        """Bytes one rank receives in these operations."""
        return sum(call.wire_bytes for call in self._of(operations))

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def _of(self, operations: tuple[str, ...]) -> list[Collective]:
        return [call for call in self.calls if not operations or call.operation in operations]

    def record(self, operation: str, full: Sequence[Tensor], ranks: int, tag: int = 0) -> None:
        """Note one call; its full tensor may come in parts."""
        passes = 2 if operation == "all_reduce" else 1
        size = sum(part.numel() * part.element_size() for part in full)
        self.calls.append(Collective(
            operation, numel=sum(part.numel() for part in full), dtype=full[0].dtype if full else None,
            wire_bytes=passes * size * (ranks - 1) / ranks, tag=tag))


class CountingCollectives(Collectives):
    """Any transport, with its calls noted in ``traffic``."""

    def __init__(self, transport: Collectives, traffic: Traffic | None = None) -> None:
        self.transport = transport
        self.traffic = Traffic() if traffic is None else traffic
        self.rank, self.size = transport.rank, transport.size
        self.members, self.real = transport.members, transport.real

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.transport.allocate(numel, dtype, device)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.transport.zeros(numel, dtype, device)

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = 0) -> Handle:
        self.traffic.record("all_gather", [out], self.size, tag)
        return self.transport.all_gather(out, shard, tag=tag)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = 0) -> Handle:
        self.traffic.record("reduce_scatter", [full], self.size, tag)
        return self.transport.reduce_scatter(out, full, tag=tag)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = 0) -> Handle:
        self.traffic.record("all_reduce", [tensor], self.size, tag)
        return self.transport.all_reduce(tensor, reduction, tag=tag)

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = 0) -> Handle:
        self.traffic.record("broadcast", [tensor], self.size, tag)
        return self.transport.broadcast(tensor, source, tag=tag)

    def all_to_all(
        self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int], *, tag: int = 0
    ) -> Handle:
        self.traffic.record("all_to_all", [full], self.size, tag)
        return self.transport.all_to_all(out, full, received, sent, tag=tag)

    def compare_calls(self, on: bool) -> None:
        self.transport.compare_calls(on)

    def barrier(self) -> None:
        self.traffic.record("barrier", [], self.size)
        self.transport.barrier()

    def close(self) -> None:
        self.transport.close()


#: method of a process group -> the operation, and which argument is the full tensor (or lists of its
#: parts). Releases of torch differ in the names; those that the installed one lacks are passed over.
_METHODS: dict[str, tuple[str, int | None]] = {
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", None),
}


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Note every collective of every process group, by whoever starts it and under whatever name.

    The group's own methods are watched, since functions of ``torch.distributed`` may have been
    bound before. A collective on objects shows as those on the tensors that carry them.
    """
    traffic = Traffic()
    with ExitStack() as stack:
        for method in _METHODS.keys() & set(dir(dist.ProcessGroup)):
            counted = _counted(method, getattr(dist.ProcessGroup, method), traffic)
            stack.enter_context(patch.object(dist.ProcessGroup, method, counted))
        yield traffic


@contextmanager
def count_messages() -> Iterator[list[int]]:
    """The number of elements of each message that this rank sends over gloo, for collectives of ours."""
    sent, original = list[int](), wire.Post.send

    def send(self: wire.Post, part: Tensor, place: int, sort: int = 0) -> Any:
        sent.append(part.numel())
        return original(self, part, place, sort)

    with patch.object(wire.Post, "send", send):
        yield sent


def _counted(method: str, original: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    operation, position = _METHODS[method]

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        traffic.record(operation, [] if position is None else _tensors(args[position]), group.size())
        return original(group, *args, **kwargs)

    return call


def _tensors(full: Tensor | list[Any]) -> list[Tensor]:
    """A tensor, or lists of tensors at any depth, as one list."""
    return [full] if isinstance(full, Tensor) else [tensor for part in full for tensor in _tensors(part)]
