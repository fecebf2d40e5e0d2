"""Edits that the user made at rest are taken over before the next gather.

Changes in place need nothing: the user's parameters *are* the shard. What remains is found by
comparing pointers and objects, without copies when nothing changed:

- ``p.data = tensor``            copied into a new shard; ``p`` shows that one, and whoever kept the
                                 old ``p.data`` keeps the old values
- ``module.weight = Parameter``  the new object takes the old one's place
- ``module.weight = other.weight``  the name is tied to the other sharded parameter from now on
- ``model.to(dtype or device)``  the whole shard moves

A value, and a gradient that comes with it, may have the shape of this rank's rows or of the
whole parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import WritebackError
from ..torch_private import without_torch_function
from .faces import OriginalFace, Showing
from .filling import leave_meta
from .flat_storage import FlatStorage
from .sharded_parameter import enroll, home_of, withdraw
from .visible import Visible, version_of

__all__ = ["follow_off_meta", "take_over_edits", "take_over_replacements"]


def take_over_edits(storage: FlatStorage) -> bool:
    """Honour ``.data`` assignments and moves; were there any?

    Raises ``WritebackError``; nothing is changed then.
    """
    if storage.widened:
        return False
    dtype = storage.shard.dtype
    with without_torch_function():
        edited = [
            seen for seen in storage.visible
            if seen.moved or seen.parameter.dtype is not dtype
        ]
        if storage.hidden:
            edited += [seen for seen in storage.hidden if seen.moved]
        if edited:
            _take_over(storage, edited)
    return bool(edited)


def _take_over(storage: FlatStorage, edited: list[Visible]) -> None:
    moved = {(seen.parameter.dtype, seen.parameter.device) for seen in storage.visible}
    if moved != {(storage.shard.dtype, storage.shard.device)} and len(moved) == 1 and _rows_only(storage):
        storage.rehome(*moved.pop())
        return
    values = [_value(storage, seen) for seen in edited]
    gradients = [_gradient(storage, seen, seen.parameter.grad) for seen in edited]
    fresh = storage.renewed()
    with torch.no_grad():
        for seen, value in zip(edited, values, strict=True):
            storage.local_view(seen, fresh).copy_(value)
        for seen in edited:
            seen.parameter.grad = None
        storage.settle_in(fresh)
        for seen, gradient in zip(edited, gradients, strict=True):
            seen.parameter.grad = gradient


def _gradient(storage: FlatStorage, seen: Visible, given: Tensor | None) -> Tensor | None:
    """The gradient that came with an edit, as this rank's rows."""
    if given is None or tuple(given.shape) == seen.size:
        return given
    return fit(storage, seen, given, what="the gradient's shape changed").clone()


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


def fit(storage: FlatStorage, seen: Visible, given: Tensor, what: str = "the shape changed") -> Tensor:
    """``given`` as this rank's rows, whether it has their shape or the whole parameter's."""
    if tuple(given.shape) == seen.size:
        return given
    if len(seen.indices) == 1 and tuple(given.shape) == storage.layout.parameters[seen.indices[0]].shape:
        rows = storage.rows_of(seen.indices[0], given)
        return rows.as_strided(seen.size, seen.stride)
    whole = [storage.layout.parameters[i].shape for i in seen.indices] if len(seen.indices) == 1 else []
    raise WritebackError(
        f"Cannot writeback: {what}", fqn=seen.fqn, unit=storage.unit, rank=storage.rank,
        expected=f"{seen.size} (this rank's rows)" + (f" or {whole[0]} (the whole)" if whole else ""),
        got=tuple(given.shape), remedy="Assign a value of one of the expected shapes.",
    )


def take_over_replacements(face: OriginalFace) -> list[FlatStorage]:
    """Honour what was registered in place of the user's old parameters.

    Returns the storages whose parameters became tied to a name here.
    """
    borrowed: list[FlatStorage] = []
    for showing, shown in face.strangers():
        storage = showing.storage
        if storage.widened or storage.on_meta:
            continue
        found = shown
        if shown is None:  # a flat unit's originals are attributes; an assigned Parameter is registered
            found = face.claim(showing)
        if not isinstance(found, nn.Parameter):
            raise WritebackError(
                "Cannot writeback: a sharded parameter was removed from its module", fqn=showing.slot.fqn,
                unit=storage.unit, rank=storage.rank, expected="an nn.Parameter", got=type(found).__name__,
                remedy="Change the module before sharding it, or assign a new nn.Parameter.",
            )
        home = home_of(found)
        if found is storage.parameters[showing.index]:
            continue  # taken over a moment ago, under another of its names
        if home is not None:
            borrowed.append(_tie(face, showing, home))
        else:
            _replace(showing, found, _seen(storage, showing.index))
    return borrowed


def follow_off_meta(face: OriginalFace, storage: FlatStorage) -> bool:
    """Take over memory that was given to parameters on the meta device (``to_empty``), once all have it."""
    shown = face.shown(storage)
    if any(found is None or found.is_meta for found in shown):
        return False
    values = [fit(storage, _seen(storage, index), found.data) for index, found in enumerate(shown)]
    leave_meta(storage, values[0].device)
    storage.filled_by_hand = True
    with torch.no_grad():
        for index, value in enumerate(values):
            storage.local_view(_seen(storage, index)).copy_(value)
    for showing in storage.shown_by:
        showing.table[showing.name] = storage.parameters[showing.index]
    return True


def _tie(face: OriginalFace, showing: Showing, home: tuple[FlatStorage, int]) -> FlatStorage:
    storage, index = home
    old, new = showing.storage.layout.parameters[showing.index], storage.layout.parameters[index]
    if old.shape != new.shape:
        raise WritebackError(
            f"Cannot writeback: {showing.slot.fqn!r} was tied to {new.fqn!r}, which has another shape",
            fqn=showing.slot.fqn, unit=showing.storage.unit, rank=storage.rank, expected=old.shape,
            got=new.shape, remedy="Tie only parameters of one shape.",
        )
    face.retarget(showing, storage, index)
    return storage


def _seen(storage: FlatStorage, index: int) -> Visible:
    return next(s for s in (*storage.hidden, *storage.visible) if s.indices == (index,))


def _replace(showing: Showing, found: nn.Parameter, seen: Visible) -> None:
    storage, index = showing.storage, showing.index
    slots: list[Showing] = [s for s in storage.shown_by if s.index == index]
    if any(s.present() is not found for s in slots):
        names = ", ".join(repr(s.slot.fqn) for s in slots)
        raise WritebackError(
            f"Cannot writeback: a tied parameter was replaced under one of its names only ({names})",
            fqn=showing.slot.fqn, unit=storage.unit, rank=storage.rank,
            remedy="Assign the new parameter under all of its names, or untie them before sharding.",
        )
    value = fit(storage, seen, found.data)
    gradient = _gradient(storage, seen, found.grad)
    if value.dtype is not storage.shard.dtype or value.device != storage.shard.device:
        raise WritebackError(
            "Cannot writeback: a parameter was replaced by one of another dtype or device",
            fqn=showing.slot.fqn, unit=storage.unit, rank=storage.rank,
            expected=f"{storage.shard.dtype} on {storage.shard.device}",
            got=f"{value.dtype} on {value.device}", remedy="Convert the new parameter first.",
        )
    old = seen.parameter
    with torch.no_grad():
        old.data = old.data.clone()
        storage.local_view(seen).copy_(value)
        found.grad = None
    withdraw(old)
    storage.edits += 1 + version_of(old) - version_of(found)
    storage.replace_parameter(seen, found)
    enroll(found, storage, index)
    storage.point_at_shard(seen)
    if not storage.hidden:
        found.grad = gradient
    elif gradient is not None:
        flat = storage.visible[0].parameter
        if flat.grad is None:
            flat.grad = torch.zeros_like(storage.shard)
        storage.local_view(seen, flat.grad).copy_(gradient)
