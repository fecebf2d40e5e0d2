"""The tensors of a model that a checkpoint holds, each once, with all of its names.

Works on any module: sharded by either front end, at any depth, in part, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from ..engine.build import owner_of, units_below
from ..engine.settling import settle_unit
from ..engine.unit import Unit
from ..errors import CheckpointError, name_list
from ..storage.flat_storage import FLAT, FlatStorage
from ..storage.sharded_parameter import home_of
from ..torch_private import buffer_table, is_persistent_buffer

__all__ = ["ModelTensor", "clean_name", "local_rows", "model_tensors", "settle", "undivided_tensors"]

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(eq=False)
class ModelTensor:
    """A parameter or buffer. ``names`` lists its FQNs, in registration order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor  #: this rank's rows; all of it where ``storage`` is None
    start: int = 0  #: elements of the whole in front of this rank's
    storage: FlatStorage | None = None
    index: int = 0
    unit: Unit | None = None
    is_parameter: bool = True
    parameter: nn.Parameter | None = None  #: the user's object; None for buffers and behind flat parameters
    owner: tuple[nn.Module, str] | None = None  #: where it is registered, unless sharded
    names: list[str] = field(default_factory=list[str])

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def clean_name(name: str) -> str:
    """``name`` without what checkpoint wrappers and compilation put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def settle(model: nn.Module) -> list[Unit]:
    """Bring every unit to rest, with the user's edits taken over; the units.

    Raises ``CheckpointError`` inside a forward and inside ``summon_full_params``.
    """
    owners = [owner_of(parameter) for parameter in model.parameters()]
    found = [*(unit for _, unit in units_below(model)), *owners]
    units = list(dict.fromkeys(unit for unit in found if unit is not None))
    for unit in units:
        settle_unit(unit)
        if unit.face.in_use or any(storage.widened for storage in unit.storages):
            raise CheckpointError(
                "the parameters are gathered now", unit=unit.name,
                remedy="Save and load outside of forward and of summon_full_params.")
        unit.take_over_edits()
    return units


def local_rows(storage: FlatStorage, index: int, base: Tensor | None = None) -> Tensor:
    """This rank's rows of a parameter, in the shard or in ``base``, which is laid out like it."""
    source = storage.shard if base is None else base
    offset, size, stride = storage.local_geometry(index)
    return source.as_strided(size, stride, source.storage_offset() + offset)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Parameters and persistent buffers in registration order; tied ones once."""
    units = settle(model)
    flats = _flat_parameters(units)
    buffers = _buffer_homes(units)
    found: dict[object, ModelTensor] = {}

    def note(key: object, name: str, make: ModelTensor) -> None:
        tensor = found.setdefault(key, make)
        if name not in tensor.names:
            tensor.names.append(name)

    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            home = home_of(parameter)
            if home is None:
                owner = (module, name)
                note(id(parameter), _join(prefix, name),
                     ModelTensor(tuple(parameter.shape), parameter.dtype, parameter.detach(),
                                 parameter=parameter, owner=owner))
            elif home[1] != FLAT:
                note(id(parameter), _join(prefix, name), _sharded(*home, parameter.detach(), parameter))
            elif not any(home[0] in unit.storages for unit in units):
                raise CheckpointError("a flat parameter of a copy has no names", fqn=_join(prefix, name),
                                      remedy="Copy models with use_orig_params=True.")
        for name, home in flats.get(id(module), ()):
            note(home, _join(prefix, name), _sharded(*home, local_rows(*home)))
        for name, now, tensor in _buffers(module, buffers):
            note(id(now), _join(prefix, name), tensor)
    return list(found.values())


def undivided_tensors(model: nn.Module) -> list[ModelTensor]:
    """``model_tensors``, for what knows one group of ranks only. Raises ``CheckpointError`` for any other."""
    tensors = model_tensors(model)
    split = [t.fqn for t in tensors if t.storage is not None and t.storage.owned[t.index].parallel is not None]
    if split:
        raise CheckpointError(
            f"parameters are split by tensor parallelism as well ({name_list(split)})", fqn=split[0],
            remedy="Use torch.distributed.checkpoint on state dicts, which hold DTensors and records of both.")
    return tensors


def _join(prefix: str, name: str) -> str:
    return clean_name(f"{prefix}.{name}" if prefix else name)


def _sharded(storage: FlatStorage, index: int, rows: Tensor, parameter: nn.Parameter | None = None
             ) -> ModelTensor:
    return ModelTensor(storage.layout.parameters[index].shape, rows.dtype, rows,
                       storage.layout.span(index, storage.rank).start, storage, index, parameter=parameter)


def _flat_parameters(units: list[Unit]) -> dict[int, list[tuple[str, tuple[FlatStorage, int]]]]:
    """Originals behind flat parameters, by the module that registered them."""
    behind: dict[int, list[tuple[str, tuple[FlatStorage, int]]]] = {}
    for unit in units:
        for showing in unit.face.showings:
            if showing.storage.hidden:
                home = (showing.storage, showing.index)
                behind.setdefault(id(showing.slot.module), []).append((showing.name, home))
    return behind


def _buffer_homes(units: list[Unit]) -> dict[int, tuple[Unit, str]]:
    """By the dict that a module shares with its wrapper."""
    return {id(buffer_table(module)): (unit, prefix) for unit in units for prefix, module in unit.own_modules}


def _buffers(module: nn.Module, homes: dict[int, tuple[Unit, str]]
             ) -> Iterator[tuple[str, Tensor, ModelTensor]]:
    """Persistent buffers with the values that the user registered, not those cast for computation."""
    unit, prefix = homes.get(id(buffer_table(module)), (None, ""))
    for name, now in module.named_buffers(recurse=False, remove_duplicate=False):
        if is_persistent_buffer(module, name):
            exact = unit.buffers.exact(f"{prefix}.{name}" if prefix else name) if unit is not None else None
            value = now if exact is None else exact
            yield name, now, ModelTensor(tuple(value.shape), value.dtype, value.detach(), unit=unit,
                                         is_parameter=False, owner=(module, name))
