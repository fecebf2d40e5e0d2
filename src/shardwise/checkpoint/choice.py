"""Which kind of state dict the units of a tree give, and changing that for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from ..engine.build import units_below
from ..errors import CheckpointError
from ..plan.state_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_for,
)
from .model_state import UnitState, state_of

__all__ = ["chosen_settings", "set_state_dict_type", "state_dict_type", "states_below"]


def states_below(module: nn.Module) -> list[UnitState]:
    """The parts in state dicts of all units at and below ``module``."""
    return [state_of(unit) for _, unit in units_below(module)]


def chosen_settings(module: nn.Module) -> StateDictSettings:
    """What the units at and below ``module`` give, which must be the same for all.

    Raises ``CheckpointError`` where they differ, or where there is none.
    """
    found = [state.settings for state in states_below(module)]
    if not found:
        raise CheckpointError("no sharded module is here, so there is no state dict type",
                              unit=type(module).__name__, remedy="Pass a sharded module, or one above it.")
    if any(settings != found[0] for settings in found):
        kinds = sorted({settings.state_dict_type.name for settings in found})
        raise CheckpointError("the units of this module differ in their state dict settings",
                              expected="one choice for all", got=kinds,
                              remedy="Call set_state_dict_type on the outermost module.")
    return found[0]


def set_state_dict_type(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose for all units at and below ``module``; what they had before (the first one's)."""
    settings = settings_for(kind, config, optim_config)
    states = states_below(module)
    before = states[0].settings if states else settings
    for state in states:
        state.settings = settings
    return before


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> Generator[None]:
    """The same for a ``with`` block; each unit goes back to what it had."""
    before = [(state, state.settings) for state in states_below(module)]
    set_state_dict_type(module, kind, config, optim_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.settings = settings
