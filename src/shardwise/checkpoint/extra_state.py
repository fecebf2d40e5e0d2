"""What modules keep besides tensors: ``get_extra_state`` and ``set_extra_state`` of ``nn.Module``, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import CheckpointError
from .model_tensors import clean_name

__all__ = ["extra_states", "modules_to_set", "set_extra_states"]


def _keepers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have such state, each once, by the name that it has in the unwrapped model."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        clean = clean_name(name)
        if type(module).get_extra_state is not nn.Module.get_extra_state and clean not in seen:
            seen.add(clean)
            yield clean, module


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The state of each module that has one."""
    return {name: module.get_extra_state() for name, module in _keepers(model)}


def modules_to_set(model: nn.Module, saved: Mapping[str, Any], *, strict: bool) -> list[tuple[nn.Module, Any]]:
    """Each module with what it gets. Raises ``CheckpointError`` for other names, if ``strict``."""
    modules = dict(_keepers(model))
    missing, unexpected = sorted(modules.keys() - saved.keys()), sorted(saved.keys() - modules.keys())
    if strict and (missing or unexpected):
        raise CheckpointError("the checkpoint holds the extra state of other modules",
                              fqn=(missing or unexpected)[0], expected=sorted(modules), got=sorted(saved),
                              remedy="Load the model that was saved, or pass strict=False.")
    return [(module, saved[name]) for name, module in modules.items() if name in saved]


def set_extra_states(pairs: Iterable[tuple[nn.Module, Any]]) -> None:
    """Give each module its own."""
    for module, value in pairs:
        module.set_extra_state(value)
