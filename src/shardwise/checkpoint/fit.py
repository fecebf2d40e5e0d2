"""Matching a model with the tensors of a checkpoint: everything is checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..errors import CheckpointError
from .model_tensors import ModelTensor
from .source import Located, Target

__all__ = ["DtypeMap", "NameMap", "fit_model", "fit_tensor"]

NameMap = Mapping[str, str] | Callable[[str], str] | None
"""From a name in the model to the name in the files; names that a mapping lacks stay."""

DtypeMap = Mapping[torch.dtype, torch.dtype] | None
"""File dtype -> model dtype: the conversions that are allowed."""

_SHOWN = 4


def fit_model(
    tensors: Sequence[ModelTensor], found: Mapping[str, Located], aliases: Mapping[str, str], *,
    strict: bool, name_map: NameMap, dtype_map: DtypeMap,
) -> list[tuple[ModelTensor, Target]]:
    """What to read for each tensor of the model. Raises ``CheckpointError`` that lists what does not fit."""
    pairs: list[tuple[ModelTensor, Target]] = []
    missing: list[str] = []
    taken: set[str] = set()
    for tensor in tensors:
        wanted = [_mapped(name, name_map) for name in tensor.names]
        there = [name for name in (*wanted, *(aliases.get(name, name) for name in wanted)) if name in found]
        if not there:
            missing.append(tensor.fqn)
            continue
        taken.update(there)
        located = found[there[0]]
        fit_tensor(tensor.fqn, tensor.shape, tensor.dtype, located, dtype_map)
        pairs.append((tensor, Target(located, tensor.start, tensor.values)))
    unexpected = [name for name in found if name not in taken]
    if strict and (missing or unexpected):
        raise CheckpointError(
            "the checkpoint does not fit the model", expected="the same names",
            got=f"{_count('missing', missing)}, {_count('unexpected', unexpected)}",
            remedy="Load the model that was saved, pass name_map, or strict=False for what fits.")
    return pairs


def fit_tensor(
    fqn: str, shape: Sequence[int], dtype: torch.dtype, located: Located, dtype_map: DtypeMap = None
) -> None:
    """Raise ``CheckpointError`` unless the tensor in the file has this shape and dtype."""
    entry = located.entry
    if tuple(shape) != entry.shape:
        raise CheckpointError("the checkpoint holds another shape", fqn=fqn, expected=tuple(shape),
                              got=entry.shape, remedy="Load the model that was saved.")
    if entry.dtype != dtype and (dtype_map or {}).get(entry.dtype) != dtype:
        raise CheckpointError(
            "the checkpoint holds another dtype", fqn=fqn, expected=dtype, got=entry.dtype,
            remedy=f"Allow the conversion: dtype_map={{{entry.dtype}: {dtype}}}.")


def _mapped(name: str, name_map: NameMap) -> str:
    if name_map is None:
        return name
    return name_map.get(name, name) if isinstance(name_map, Mapping) else name_map(name)


def _count(what: str, names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}" + (f" ({shown}{more})" if names else "")
