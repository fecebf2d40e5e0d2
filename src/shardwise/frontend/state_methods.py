"""The wrapper's static methods for state dicts, under torch's names and signatures."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from ..checkpoint import choice
from ..plan.state_options import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

__all__ = ["StateDictMethods"]


class StateDictMethods:
    """What ``FullyShardedDataParallel`` offers for state dicts; works on modules of both front ends."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what ``state_dict()`` and ``optim_state_dict()`` give at and below ``module``.

        Returns the settings before. Raises ``OptionTypeError`` for a config of another type.
        """
        return choice.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The present choice. Raises ``CheckpointError`` where the units below ``module`` differ."""
        return choice.chosen_settings(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """``set_state_dict_type`` for a ``with`` block."""
        return choice.state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
