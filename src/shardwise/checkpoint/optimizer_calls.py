"""The calls about optimizer state that the front ends offer, made of the pieces beside this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..comm.errands import Errand
from ..errors import CheckpointError
from ..plan.state_options import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_for,
)
from .adoption import adopt
from .from_rank_zero import spread_optimizer_state
from .model_tensors import model_tensors
from .optimizer_contents import owners_by_parameter
from .optimizer_keys import optimizer_for, rekey, with_state
from .optimizer_loading import optimizer_state_to_load
from .optimizer_state import optimizer_state

__all__ = ["cut_full", "full_state", "get_state", "rekeyed", "scatter_full", "sharded_state", "to_load"]


@Errand("optim_state_dict")
def get_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: StateDictSettings,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The optimizer's state, or that of ``given`` in its place, by FQN."""
    adopt(optimizer)
    source = optimizer if given is None else with_state(optimizer, given)
    return optimizer_state(model, source, settings)


@Errand("optim_state_dict_to_load")
def to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, Any] | None,
    settings: StateDictSettings, *, named: bool, directly: bool,
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes; keyed by FQN if ``named``; loaded if ``directly``."""
    adopt(optimizer)
    config = settings.optim_state_dict_config
    if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
        given = spread_optimizer_state(model, given or None)
    if not given:
        raise CheckpointError("there is no optimizer state dict to load", expected="one on every rank",
                              got=given, remedy="Use rank0_only=True if only rank 0 has it.")
    local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    result = optimizer_state_to_load(model, optimizer, given, local=local)
    if named:
        names = _registered_names(model, optimizer)
        result = {
            "state": {names[number]: values for number, values in result["state"].items()},
            "param_groups": [{**group, "params": [names[number] for number in group["params"]]}
                             for group in result["param_groups"]],
        }
    if directly:
        optimizer.load_state_dict(result)
    return result


def _registered_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters: its FQN, or that of the first one behind a flat one."""
    owned = owners_by_parameter(model_tensors(model), optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [owners[0].fqn if len(owners) == 1 else names[parameter]
            for group in owned for parameter, owners in group]


def rekeyed(
    given: Mapping[str, Any], to: OptimStateKeyType, model: nn.Module,
    optimizer: torch.optim.Optimizer | None, optim_input: Any = None,
) -> dict[str, Any]:
    """``given`` keyed by FQN or by position."""
    return rekey(given, to, model, optimizer_for(model, optimizer, optim_input))


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, optim_input: Any = None, *, rank0_only: bool
) -> dict[str, Any]:
    """The full state, on the host."""
    optimizer_for(model, optimizer, optim_input)  # warns
    adopt(optimizer)
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    with Errand("full_optim_state_dict"):
        return optimizer_state(model, optimizer, settings_for(StateDictType.FULL_STATE_DICT, None, config))


@Errand("sharded_optim_state_dict")
def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as records, where they are."""
    adopt(optimizer)
    settings = settings_for(StateDictType.SHARDED_STATE_DICT, None,
                            ShardedOptimStateDictConfig(offload_to_cpu=False))
    return optimizer_state(model, optimizer, settings)


def cut_full(
    given: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None,
    optim_input: Any = None,
) -> dict[str, Any]:
    """From a full or sharded dict that every rank has."""
    return optimizer_state_to_load(model, optimizer_for(model, optimizer, optim_input), given)


def scatter_full(
    given: Mapping[str, Any] | None, model: nn.Module, optimizer: torch.optim.Optimizer | None,
    optim_input: Any = None,
) -> dict[str, Any]:
    """From a full dict that rank 0 has."""
    target = optimizer_for(model, optimizer, optim_input)
    with Errand("scatter_full_optim_state_dict"):
        return optimizer_state_to_load(model, target, spread_optimizer_state(model, given or None))
