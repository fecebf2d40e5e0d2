"""Does a state dict fit a sharded module? Answered for everything below it, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..engine.build import units_below
from ..engine.hooks import unit_of
from ..errors import CheckpointError
from ..storage.faces import Showing
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import home_of
from ..torch_private import load_hook_count
from .model_tensors import clean_name
from .rows import require_shape

__all__ = ["check_values", "share_tied", "showings_below"]

_OURS = 2  # load pre-hooks that shardwise itself may put on a module


def showings_below(root: nn.Module) -> Iterator[tuple[str, nn.Module, list[Showing]]]:
    """(clean name, module, its sharded parameters) of every module below ``root``, under every name."""
    by_module: dict[nn.Module, list[Showing]] = {}
    for _, unit in units_below(root):
        for showing in unit.face.showings:
            by_module.setdefault(showing.slot.module, []).append(showing)
    for name, module in root.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None and module not in unit.modules:
            continue  # a wrapper: the module that it shows follows
        yield clean_name(name), module, by_module.get(module, [])


def share_tied(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """An entry for one name of a tied parameter serves its other names too."""
    names: dict[tuple[FlatStorage, int], list[str]] = {}
    for path, _, showings in showings_below(root):
        for showing in showings:
            key = prefix + (f"{path}.{showing.name}" if path else showing.name)
            names.setdefault((showing.storage, showing.index), []).append(key)
    for keys in names.values():
        present = [key for key in keys if key in state]
        if present:
            for key in keys:
                state.setdefault(key, state[present[0]])


def check_values(root: nn.Module, state: dict[str, Any], prefix: str, *, local: bool) -> None:
    """Raise one ``CheckpointError`` that names every entry below ``root`` of a wrong shape or kind."""
    faults: list[CheckpointError] = []
    for path, module, showings in showings_below(root):
        if load_hook_count(module) > _OURS:
            continue  # the module's own hooks may change the entries first
        start = f"{prefix}{path}." if path else prefix
        for showing in showings:
            key = start + showing.name
            if key in state and not showing.storage.widened:
                try:
                    require_shape(showing.storage, showing.index, state[key], key, local=local)
                except CheckpointError as fault:
                    faults.append(fault)
        for name, held in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            value = state.get(start + name)
            is_sharded = isinstance(held, nn.Parameter) and home_of(held) is not None
            if not is_sharded and isinstance(value, Tensor) and not _fits(held, value):
                faults.append(CheckpointError(
                    f"size mismatch for {start + name}", expected=f"shape {tuple(held.shape)}",
                    got=f"shape {tuple(value.shape)}", remedy="Nothing was loaded."))
    if faults:
        first = faults[0]
        if len(faults) > 1:
            raise CheckpointError(f"{len(faults)} entries of the state dict do not fit:\n  "
                                  + "\n  ".join(str(fault) for fault in faults)) from first
        raise first


def _fits(held: Tensor, value: Tensor) -> bool:
    same = held.shape == value.shape
    return same or (held.numel() == value.numel() == 1) or isinstance(held, nn.UninitializedParameter)
