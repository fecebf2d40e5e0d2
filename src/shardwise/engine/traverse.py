"""Tensors inside the arguments and results of forward, in whatever containers people use."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``: lists, tuples, named tuples, mappings, dataclasses, PackedSequence."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in cast("list[Any]", value):
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to its tensors; the same object where nothing changes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        return _map_packed(value, change)
    if isinstance(value, (list, tuple)):
        return _map_sequence(cast("list[Any] | tuple[Any, ...]", value), change)
    if isinstance(value, Mapping):
        return _map_mapping(cast("Mapping[Any, Any]", value), change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_packed(value: PackedSequence, change: Callable[[Tensor], Tensor]) -> PackedSequence:
    """All but ``batch_sizes``, which kernels read on the host."""
    changed = {
        name: new for name in ("data", "sorted_indices", "unsorted_indices")
        if (old := getattr(value, name)) is not None and (new := change(old)) is not old
    }
    return value._replace(**changed) if changed else value


def _map_sequence(value: list[Any] | tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Any:
    items = [map_tensors(item, change) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", None)  # named tuples are made from fields
        return make(items) if make is not None else type(value)(items)
    if type(value) is list:
        return items
    changed = copy.copy(value)
    changed[:] = items
    return changed


def _map_mapping(value: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
    items = {key: map_tensors(item, change) for key, item in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
    if type(value) is dict:
        return items
    changed: Any = copy.copy(value)  # keeps the class, its order and its attributes
    for key, item in items.items():
        changed[key] = item
    return changed


def _map_dataclass(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    changed = {
        field.name: new
        for field in dataclasses.fields(value)
        if (new := map_tensors(old := getattr(value, field.name, None), change)) is not old
    }
    if not changed:
        return value
    copied = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(copied, name, new)  # frozen dataclasses too
    return copied
