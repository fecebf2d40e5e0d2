"""Rows of parameters: where they lie, what they are now, and how a new value gets into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..plan.layout import row_granule
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import home_of
from .model_tensors import local_rows
from .records import Placement, ShardedRecord

__all__ = ["placement_of", "record_of", "require_shape", "rows_from", "rows_now", "write_rows"]


def placement_of(storage: FlatStorage, index: int) -> Placement:
    """Which rows of parameter ``index`` each rank of the shard group holds."""
    shape = storage.layout.parameters[index].shape
    row = row_granule(shape)
    spans = [storage.layout.span(index, rank) for rank in range(storage.world_size)]
    bounds = tuple((span.start // row, span.stop // row) for span in spans)
    return Placement(shape, bounds, storage.rank, storage.comm, storage.compute_device,
                     storage.owned[index].parallel, fqn=storage.layout.parameters[index].fqn, unit=storage.unit)


def rows_now(storage: FlatStorage, index: int) -> Tensor:
    """This rank's rows of parameter ``index``; memory shared with the parameter. 1-D for a 0-d one."""
    if storage.widened and storage.whole:
        return placement_of(storage, index).cut(storage.parameters[index].detach())
    rows = local_rows(storage, index)
    return rows if storage.layout.parameters[index].shape else rows.reshape(-1)


def record_of(storage: FlatStorage, index: int, *, requires_grad: bool = False) -> ShardedRecord:
    """The record of parameter ``index``; memory shared with the parameter."""
    return ShardedRecord(rows_now(storage, index), placement_of(storage, index), requires_grad)


def write_rows(storage: FlatStorage, index: int, rows: Tensor) -> None:
    """Copy ``rows`` (as ``rows_from`` gives them) into the parameter, in place."""
    with torch.no_grad():
        if storage.widened:
            raise CheckpointError("cannot load into one rank's rows inside summon_full_params",
                                  fqn=storage.layout.parameters[index].fqn, unit=storage.unit,
                                  remedy="Load outside of summon_full_params.")
        target = local_rows(storage, index)
        target.copy_(rows.reshape(target.shape))
        storage.edits += 1


def rows_from(storage: FlatStorage, index: int, value: Any, key: str, *, local: bool = False) -> Tensor:
    """This rank's rows out of ``value``: a whole tensor, a record, or (``local``) rows already.

    A record of another layout, and a DTensor, are gathered (a collective). Raises ``CheckpointError``.
    """
    require_shape(storage, index, value, key, local=local)
    place = placement_of(storage, index)
    home = home_of(value) if isinstance(value, nn.Parameter) else None
    if home is not None:
        value = record_of(*home)
    if isinstance(value, ShardedRecord):
        if value.placement.same_rows(place):
            return value.to_local().detach()
        return place.cut_whole(value.full_tensor())
    if local:
        return value.detach()
    if place.part is not None:
        return place.cut_whole(value.detach())
    gather = getattr(value, "full_tensor", None)  # a DTensor
    return place.cut((value if gather is None else gather()).detach().reshape(place.shape))


def require_shape(storage: FlatStorage, index: int, value: Any, key: str, *, local: bool = False) -> None:
    """Raise ``CheckpointError`` unless ``value`` fits parameter ``index``."""
    if not isinstance(value, Tensor):
        raise CheckpointError("a state dict entry is no tensor", fqn=key, unit=storage.unit,
                              expected="a tensor", got=type(value).__name__)
    if getattr(value, "local_shards", None) is not None:
        raise CheckpointError("a state dict entry is a ShardedTensor", fqn=key, unit=storage.unit,
                              expected="a whole tensor, a sharded record, or a DTensor", got=type(value).__name__,
                              remedy="Load it through torch.distributed.checkpoint, or save a full state dict.")
    if value.is_meta:
        raise CheckpointError("a state dict entry has no values", fqn=key, unit=storage.unit,
                              expected="a tensor with memory", got="a tensor on the meta device",
                              remedy="Load real tensors, or use StateDictOptions(broadcast_from_rank0=True).")
    whole = placement_of(storage, index).whole_shape
    home = home_of(value) if isinstance(value, nn.Parameter) else None
    given = tuple(value.shape) if home is None else placement_of(*home).whole_shape
    wanted = whole
    if local and home is None and not isinstance(value, ShardedRecord):
        wanted = tuple(rows_now(storage, index).shape)
    if given != wanted and not (whole in ((), (1,)) and given in ((), (1,)) and not local):
        raise CheckpointError(
            f"size mismatch for {key}", fqn=key, unit=storage.unit, rank=storage.rank,
            expected=f"shape {wanted}" + (" (this rank's rows)" if local else ""), got=f"shape {given}",
            remedy="Nothing was loaded into the sharded modules.",
        )
