"""Edits that the user made at rest are taken over before the next gather.

Changes in place need nothing: the user's parameters *are* the shard. What remains is found by
comparing pointers and objects, without copies when nothing changed:

- ``p.data = tensor``            copied into the shard, ``p`` shows the shard again
- ``module.weight = Parameter``  the new object takes the old one's place
- ``model.to(dtype or device)``  the whole shard moves

A value may have the shape of this rank's rows or of the whole parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import WritebackError
from .faces import OriginalFace, Showing
from .flat_storage import FlatStorage, Visible
from .sharded_parameter import enroll, withdraw

__all__ = ["take_over_edits", "take_over_replacements"]


def take_over_edits(storage: FlatStorage) -> None:
    """Honour ``.data`` assignments and moves. Raises ``WritebackError``; nothing is changed then."""
    dtype = storage.shard.dtype
    edited = [
        seen for seen in storage.visible
        if seen.parameter.data_ptr() != seen.pointer or seen.parameter.dtype is not dtype
    ]
    if storage.hidden:
        edited += [seen for seen in storage.hidden if seen.parameter.data_ptr() != seen.pointer]
    if not edited or storage.widened:
        return
    moved = {(seen.parameter.dtype, seen.parameter.device) for seen in storage.visible}
    if moved != {(dtype, storage.shard.device)} and len(moved) == 1 and _rows_only(storage):
        storage.rehome(*moved.pop())
        return
    values = [_value(storage, seen) for seen in edited]
    with torch.no_grad():
        for seen, value in zip(edited, values, strict=True):
            storage.local_view(seen).copy_(value)
            storage.point_at_shard(seen)


def _rows_only(storage: FlatStorage) -> bool:
    return all(tuple(seen.parameter.shape) == seen.size for seen in storage.visible)


def _value(storage: FlatStorage, seen: Visible) -> Tensor:
    """What the user assigned, as this rank's rows; checked, not yet copied."""
    given = seen.parameter.data
    if given.dtype is not storage.shard.dtype or given.device != storage.shard.device:
        raise WritebackError(
            "Cannot writeback: a sharded parameter was given data of another dtype or device than its unit's",
            fqn=seen.fqn, unit=storage.unit, rank=storage.rank,
            expected=f"{storage.shard.dtype} on {storage.shard.device}",
            got=f"{given.dtype} on {given.device}",
            remedy="Convert all parameters of the unit alike (model.to(...)), or assign the expected dtype.",
        )
    return fit(storage, seen, given)


def fit(storage: FlatStorage, seen: Visible, given: Tensor) -> Tensor:
    """``given`` as this rank's rows, whether it has their shape or the whole parameter's."""
    if tuple(given.shape) == seen.size:
        return given
    if len(seen.indices) == 1 and tuple(given.shape) == storage.layout.parameters[seen.indices[0]].shape:
        rows = storage.rows_of(seen.indices[0], given)
        return rows.as_strided(seen.size, seen.stride)
    whole = [storage.layout.parameters[i].shape for i in seen.indices[:1]]
    raise WritebackError(
        "Cannot writeback: the shape changed", fqn=seen.fqn, unit=storage.unit, rank=storage.rank,
        expected=f"{seen.size} (this rank's rows)" + (f" or {whole[0]} (the whole)" if whole else ""),
        got=tuple(given.shape), remedy="Assign a value of one of the expected shapes.",
    )


def take_over_replacements(face: OriginalFace) -> None:
    """Honour parameters that were registered in place of the user's old ones."""
    for showing, shown in face.strangers():
        storage, index = showing.storage, showing.index
        found = shown
        if shown is None:  # a flat unit's originals are attributes; an assigned Parameter is registered
            found = showing.slot.module._parameters.pop(showing.name, None)
            showing.table[showing.name] = found
        seen = _seen(storage, index)
        if not isinstance(found, nn.Parameter):
            raise WritebackError(
                "Cannot writeback: a sharded parameter was removed from its module", fqn=showing.slot.fqn,
                unit=storage.unit, rank=storage.rank, expected="an nn.Parameter", got=type(found).__name__,
                remedy="Change the module before sharding it, or assign a new nn.Parameter.",
            )
        _replace(face, showing, found, seen)


def _seen(storage: FlatStorage, index: int) -> Visible:
    return next(s for s in (*storage.hidden, *storage.visible) if s.indices == (index,))


def _replace(face: OriginalFace, showing: Showing, found: nn.Parameter, seen: Visible) -> None:
    storage, index = showing.storage, showing.index
    slots = [s for s in face.showings if s.storage is storage and s.index == index]
    if any(s.table.get(s.name) is not found for s in slots):
        names = ", ".join(repr(s.slot.fqn) for s in slots)
        raise WritebackError(
            f"Cannot writeback: a tied parameter was replaced under one of its names only ({names})",
            fqn=showing.slot.fqn, unit=storage.unit, rank=storage.rank,
            remedy="Assign the new parameter under all of its names, or untie them before sharding.",
        )
    value = fit(storage, seen, found.data)
    if value.dtype is not storage.shard.dtype:
        raise WritebackError(
            "Cannot writeback: a parameter was replaced by one of another dtype", fqn=showing.slot.fqn,
            unit=storage.unit, rank=storage.rank, expected=storage.shard.dtype, got=value.dtype,
            remedy="Convert the new parameter first.",
        )
    old = seen.parameter
    with torch.no_grad():
        old.data = old.data.clone()
        storage.local_view(seen).copy_(value)
    withdraw(old)
    seen.parameter = storage.parameters[index] = found
    enroll(found, storage, index)
    storage.point_at_shard(seen)
