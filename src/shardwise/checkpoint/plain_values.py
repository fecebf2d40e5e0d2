"""Nested Python values as JSON, without pickle: what is read back is what was given, types included.

JSON's own types stand for themselves. Others are objects with one key that begins with ``$``.
Tensors are taken out and named, to be written as tensors; 0-d ones stay, exactly.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["decode", "encode"]

_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    np.ndarray: ("$array", lambda value: torch.from_numpy(np.array(value))),
    np.generic: ("$numpy", lambda value: [value.dtype.str, value.item()]),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    complex: ("$complex", lambda value: [value.real, value.imag]),
}
_MAPPINGS: dict[str, type] = {"$ordered": OrderedDict, "$counter": Counter}


def encode(value: Any, where: str, keep: Callable[[str, Tensor], None]) -> Any:
    """``value`` as JSON types. ``keep(name, tensor)`` gets the tensors; names begin with ``where``.

    Raises ``CheckpointError`` for a value that has no such form, naming its place.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, keep)
    if isinstance(value, Mapping):
        return _encode_mapping(cast("Mapping[Any, Any]", value), where, keep)
    if type(value) is list or type(value) in _SEQUENCES.values():
        items = [encode(item, f"{where}.{i}", keep) for i, item in enumerate(cast("list[Any]", value))]
        return items if type(value) is list else {f"${type(value).__name__}": items}
    for kind, (tag, write) in _WRITERS.items():
        if isinstance(value, kind):
            return {tag: encode(write(value), where, keep)}
    raise CheckpointError(
        "a value cannot be saved", fqn=where, got=type(value).__name__,
        expected="numbers, text, tensors, arrays, and lists, tuples, sets and dicts of them",
        remedy="Convert it, or save its state_dict() instead of the object.")


def _encode_tensor(value: Tensor, where: str, keep: Callable[[str, Tensor], None]) -> Any:
    if value.dim() == 0 and not value.is_complex():
        return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
    keep(where, value.detach())
    return {"$tensor": where}


def _encode_mapping(value: Mapping[Any, Any], where: str, keep: Callable[[str, Tensor], None]) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    tag = next((tag for tag, kind in _MAPPINGS.items() if type(value) is kind), None)
    if isinstance(value, defaultdict):
        tag = None  # its factory cannot be saved; as a plain dict it has the same entries
    if plain and tag is None:
        return {key: encode(item, f"{where}.{key}", keep) for key, item in value.items()}
    pairs = [[encode(key, f"{where}.key{number}", keep), encode(item, f"{where}.{key}", keep)]
             for number, (key, item) in enumerate(value.items())]
    return {tag or "$dict": pairs}


def decode(value: Any, fetch: Callable[[str], Tensor]) -> Any:
    """The value that ``encode`` got; ``fetch(name)`` gives the tensors back."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    if len(table) == 1 and next(iter(table)).startswith("$"):
        return _decode_tagged(*table.popitem(), fetch)
    return {key: decode(item, fetch) for key, item in table.items()}


def _decode_tagged(tag: str, inner: Any, fetch: Callable[[str], Tensor]) -> Any:
    if tag == "$tensor":
        return fetch(inner)
    if tag == "$scalar":
        return torch.tensor(inner[1], dtype=getattr(torch, inner[0]))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(inner, fetch))
    if tag == "$dict" or tag in _MAPPINGS:
        pairs = {decode(key, fetch): decode(item, fetch) for key, item in inner}
        return _MAPPINGS[tag](pairs) if tag in _MAPPINGS else pairs
    makers: dict[str, Callable[[Any], Any]] = {
        "$array": lambda given: decode(given, fetch).numpy(),
        "$numpy": lambda given: np.array(given[1], dtype=given[0])[()],
        "$bytes": base64.b64decode,
        "$dtype": lambda given: getattr(torch, given),
        "$device": torch.device,
        "$complex": lambda given: complex(*given),
    }
    if tag not in makers:
        raise CheckpointError("the checkpoint holds a value of an unknown kind", got=tag,
                              remedy="Read it with the version that wrote it.")
    return makers[tag](inner)
