"""The wrapper's static methods for state dicts, under torch's names and signatures."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ..checkpoint import choice, optimizer_calls
from ..plan.state_options import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

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

    # ------------------------------------------------------------------ optimizers
    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of ``optim`` by FQN, of the kind that the model's state dict type names.

        ``optim_state_dict``: convert this one, as ``optim.state_dict()`` gives it, instead of the
        present state. ``group`` is accepted and without effect: each unit knows its own.
        """
        return optimizer_calls.get_state(model, optim, choice.chosen_settings(model), optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False, load_directly: bool = False, group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes on this rank; ``load_directly`` also calls it.

        With a full type and ``rank0_only``, only rank 0 needs to have ``optim_state_dict``.
        """
        return optimizer_calls.to_load(model, optim, optim_state_dict, choice.chosen_settings(model),
                                       named=is_named_optimizer, directly=load_directly)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any], optim_state_key_type: OptimStateKeyType, model: nn.Module,
        optim_input: Any = None, optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` keyed by FQN or by position in ``optim``; for ordinary models too."""
        return optimizer_calls.rekeyed(optim_state_dict, optim_state_key_type, model, optim, optim_input)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_input: Any = None, rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The full state on the host, whatever the model's state dict type is."""
        return optimizer_calls.full_state(model, optim, optim_input, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """The state as records, whatever the model's state dict type is."""
        return optimizer_calls.sharded_state(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, from a full dict that every rank has."""
        return optimizer_calls.cut_full(full_optim_state_dict, model, optim, optim_input)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None, model: nn.Module, optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None, group: Any = None,
    ) -> dict[str, Any]:
        """The same from a full dict that rank 0 has; others pass None."""
        return optimizer_calls.scatter_full(full_optim_state_dict, model, optim, optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """The same from records."""
        return optimizer_calls.cut_full(sharded_optim_state_dict, model, optim)
