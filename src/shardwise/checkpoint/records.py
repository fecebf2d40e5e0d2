"""The sharded record: this rank's rows of a tensor, and where they lie in the whole.

A record is a ``torch.Tensor`` that states the global shape and holds only local rows, so that
state dicts of records pass through ``torch.distributed.checkpoint``, ``torch.save``, ``copy`` and
``.to(...)`` as those of tensors do. It computes nothing: use ``to_local()`` or ``full_tensor()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..comm.collectives import Collectives
from ..comm.errands import Errand
from ..engine.traverse import tensors_in
from ..errors import CheckpointError
from ..storage.saved_rows import tell_of_rows
from ..storage.tensor_parallel import ParallelPart
from ..torch_private import bare_tensor, no_torch_function

__all__ = ["Placement", "ShardedRecord", "rebuild_record"]


@dataclass(frozen=True)
class Placement:
    """Which rows of a tensor each rank of a group holds.

    ``bounds[r]``: the first row of rank ``r`` and the one behind its last. A 0-d tensor counts
    as one row. ``comm`` is None for a record that was read from a file.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    rank: int
    comm: Collectives | None = field(default=None, compare=False, repr=False)
    device: torch.device | None = field(default=None, compare=False, repr=False)  #: on which ``comm`` works
    part: ParallelPart | None = None  #: of what ``shape`` is this rank's part, by tensor parallelism
    apart: bool = False  #: rows are tensors that each rank has for itself, stacked for a checkpoint's sake
    fqn: str | None = field(default=None, compare=False, repr=False)  #: of the parameter, in ``unit``
    unit: str | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's."""
        return self.bounds[self.rank]

    @property
    def told(self) -> str:
        """``rows 0 to 20 of shape (40, 8), those of rank 0 of 2``, for messages."""
        first, last = self.rows
        return f"rows {first} to {last} of shape {self.shape}, those of rank {self.rank} of {len(self.bounds)}"

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape over all dims of all meshes."""
        return self.shape if self.part is None else self.part.shape

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return prod(self.shape[1:])

    def same_rows(self, other: Placement) -> bool:
        """Does every rank hold the same rows in both?"""
        return (self.shape, self.bounds, self.rank, self.part) == (
            other.shape, other.bounds, other.rank, other.part)

    def with_trailing(self, trailing: tuple[int, ...]) -> Placement:
        """The same rows of a tensor with other dims behind dim 0."""
        shape = (*self.shape[:1], *trailing) if self.shape else trailing
        if self.part is not None and shape != self.shape:
            raise CheckpointError("state that is shaped otherwise than its tensor-parallel parameter has no place",
                                  expected=f"shape {self.shape}", got=f"shape {shape}",
                                  remedy="Use an optimizer whose state is shaped like its parameters.")
        return replace(self, shape=shape)

    def one_each(self, shape: tuple[int, ...]) -> Placement:
        """A tensor of ``shape`` for each rank, as the rows of one."""
        if self.part is not None:
            self.with_trailing(shape)  # raises
        ranks = len(self.bounds)
        bounds = tuple((rank, rank + 1) for rank in range(ranks))
        return replace(self, shape=(ranks, *shape), bounds=bounds, part=None, apart=True)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's rows of ``whole``, a view; 1-D for a 0-d tensor."""
        first, last = self.rows
        return (whole if self.shape else whole.reshape(1))[first:last]

    def cut_whole(self, whole: Tensor) -> Tensor:
        """The same of a tensor of ``whole_shape``."""
        return self.cut(whole if self.part is None else self.part.cut(whole))

    def gather_whole(self, local: Tensor) -> Tensor:
        """The tensor of ``whole_shape`` from every rank's rows (a collective of all meshes)."""
        gathered = self.gather(local)
        return gathered if self.part is None else self.part.whole(gathered)

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor, in new memory, from every rank's rows (a collective of the group)."""
        if prod(self.shape) == 0:
            return local.new_empty(self.shape)
        comm = self.comm
        if comm is None and len(self.bounds) > 1:
            raise CheckpointError(
                "a record that was read from a file cannot be gathered, since it belongs to no group", fqn=self.fqn,
                unit=self.unit, expected="the whole tensor, or the file of this rank", got=self.told, remedy=_WHOLE)
        if comm is None or comm.size == 1:
            return local.detach().clone().reshape(self.shape)
        device = self.device or local.device
        slot = max(last - first for first, last in self.bounds) * self.row_numel
        mine = torch.zeros(slot, dtype=local.dtype, device=device)
        mine[: local.numel()] = local.detach().reshape(-1)
        everyone = torch.empty(slot * comm.size, dtype=local.dtype, device=device)
        comm.all_gather(everyone, mine).wait()
        pieces = [everyone[rank * slot : rank * slot + (last - first) * self.row_numel]
                  for rank, (first, last) in enumerate(self.bounds)]
        return torch.cat(pieces).reshape(self.shape)


_WHOLE = ("It was written by torch.save on that rank, and loads there, into a model sharded over as many ranks. Whole "
          "files: shardwise.checkpoint.save, or a full state dict (StateDictOptions(full_state_dict=True)).")


def _remedy(place: Placement, func: Any) -> str:
    if place.comm is None and len(place.bounds) > 1:
        return _WHOLE
    if str(func).startswith("c10d."):
        return ("Use shardwise.checkpoint.set_model_state_dict and set_optimizer_state_dict, which take records, or "
                "record.full_tensor() on every rank.")
    return "Use record.to_local() for this rank's rows, or record.full_tensor() on every rank."


class ShardedRecord(torch.Tensor):
    """This rank's rows of a tensor of global ``shape``."""

    _local: Tensor
    _placement: Placement

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls: type[ShardedRecord], local: Tensor, placement: Placement, requires_grad: bool = False
    ) -> ShardedRecord:
        record = bare_tensor(cls, local, placement.whole_shape, requires_grad)
        record._local, record._placement = local, placement
        return record

    @property
    def placement(self) -> Placement:
        """Which rows each rank holds."""
        return self._placement

    def to_local(self) -> Tensor:
        """This rank's rows; shares memory with the record."""
        return self._local

    @Errand("full_tensor")
    def full_tensor(self) -> Tensor:
        """The whole tensor, gathered from all ranks of the group (a collective), in new memory."""
        return self._placement.gather_whole(self._local)

    def _with(self, local: Tensor) -> ShardedRecord:
        return ShardedRecord(local, self._placement, self.requires_grad)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            place = next(t for t in tensors_in((args, kwargs)) if isinstance(t, ShardedRecord)).placement
            raise CheckpointError(
                f"a sharded record computes nothing, and {func} was called on one", fqn=place.fqn, unit=place.unit,
                expected="an ordinary tensor", got=place.told, remedy=_remedy(place, func))
        return handler(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedRecord:
        return self._with(self._local.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self._placement
        if place.part is not None:
            raise CheckpointError("the record of a tensor-parallel parameter cannot be pickled",
                                  remedy="Use torch.distributed.checkpoint, or full_tensor().")
        if place.comm is not None:
            tell_of_rows(len(place.bounds))
        return rebuild_record, (self._local.detach().clone(), place.shape, place.bounds, place.rank, place.apart,
                                place.fqn, place.unit)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, last = self._placement.rows
        return (f"ShardedRecord(rows {first} to {last} of shape {tuple(self.shape)}, {self.dtype}, "
                f"device={self.device})")

    # ------------------------------------------------------------------ torch.distributed.checkpoint
    def _box(self) -> ChunkStorageMetadata | None:
        """This rank's rows as the one box that it reads and writes; None where it has none."""
        place = self._placement
        first, last = place.rows
        empty = prod(place.shape) == 0
        if first == last and not (empty and place.rank == 0):
            return None
        if not place.shape or empty:
            return ChunkStorageMetadata(torch.Size([0] * len(place.shape)), torch.Size(place.shape))
        starts = [0] * len(place.shape) if place.part is None else place.part.offsets
        return ChunkStorageMetadata(torch.Size([starts[0] + first, *starts[1:]]),
                                    torch.Size([last - first, *place.shape[1:]]))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        box = self._box()
        if box is None:
            return []
        properties = TensorProperties.create_from_tensor(self._local)
        data = TensorWriteData(chunk=box, properties=properties, size=torch.Size(self._placement.whole_shape))
        return [WriteItem(index=MetadataIndex(fqn, box.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        box = self._box()
        return [] if box is None else [box]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        shape = self._placement.shape
        return self._local.reshape(shape) if not shape or prod(shape) == 0 else self._local


def rebuild_record(
    local: Tensor, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...], rank: int, apart: bool = False,
    *names: str | None,
) -> ShardedRecord:
    """A record as it comes from a file: without a group. ``names``: its FQN and unit; old files have none."""
    fqn, unit = names or (None, None)
    return ShardedRecord(local, Placement(shape, bounds, rank, apart=apart, fqn=fqn, unit=unit))


# ---------------------------------------------------------------------- what a record can do
def _on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedRecord:
    """Copies and casts: done to the rows."""
    record = cast("ShardedRecord", args[0])
    local = func(record.to_local(), *args[1:], **kwargs)
    return ShardedRecord(local, record.placement)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """New memory; a record where the shape is the record's."""
    record = cast("ShardedRecord", args[0])
    local, place = record.to_local(), record.placement
    if len(args) > 1 and tuple(args[1]) != place.whole_shape:
        return func(local, *args[1:], **kwargs)
    return ShardedRecord(func(local, *([local.shape] if len(args) > 1 else []), **kwargs), place)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``record.copy_(other record of the same rows)``, or ``record.copy_(whole tensor)``."""
    target, source = args[:2]
    if not isinstance(target, ShardedRecord):
        place = source.placement
        raise CheckpointError("a plain tensor cannot take in a sharded record", fqn=place.fqn, unit=place.unit,
                              expected="a whole tensor", got=place.told,
                              remedy=_remedy(place, func))
    place = target.placement
    if isinstance(source, ShardedRecord):
        if not source.placement.same_rows(place):
            raise CheckpointError("the two records hold other rows", expected=place, got=source.placement,
                                  remedy="Copy source.full_tensor() instead.")
        rows = source.to_local()
    else:
        rows = place.cut_whole(source.expand(place.whole_shape))
    target.to_local().copy_(rows.reshape(target.to_local().shape), *args[2:], **kwargs)
    return target


_aten: Any = torch.ops.aten
_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.detach.default: _on_rows,
    _aten.alias.default: _on_rows,
    _aten.clone.default: _on_rows,
    _aten._to_copy.default: _on_rows,
    _aten._pin_memory.default: _on_rows,
    _aten.new_empty.default: _like,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.copy_.default: _copy,
}

torch.serialization.add_safe_globals([rebuild_record])
