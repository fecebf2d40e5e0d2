"""State that survives: state dicts and files."""

from __future__ import annotations

from .export import iter_full_tensors
from .loading import load
from .memory import load_from_memory, save_to_memory
from .memory_parts import MemoryCheckpoint
from .records import ShardedRecord
from .saving import save, wait
from .state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "MemoryCheckpoint",
    "ShardedRecord",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "iter_full_tensors",
    "load",
    "load_from_memory",
    "save",
    "save_to_memory",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "wait",
]
