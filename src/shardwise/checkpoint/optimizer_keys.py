"""Optimizer state dicts by name and by position, so that sharded and ordinary runs can swap them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, OptionTypeError
from ..plan.state_options import OptimStateKeyType
from .model_tensors import model_tensors
from .optimizer_contents import owners_by_parameter
from .optimizer_rows import taken

__all__ = ["StandIn", "optimizer_for", "rekey", "with_state"]


@dataclass
class StandIn:
    """Parameter groups and state in place of an optimizer's own."""

    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict[nn.Parameter, dict[str, Any]])


def optimizer_for(model: nn.Module, optimizer: torch.optim.Optimizer | None, optim_input: Any = None) -> Any:
    """``optimizer``, or the parameter groups that ``optim_input`` names in its place.

    ``optim_input``: what the optimizer was built from, parameters or groups; None: ``model.parameters()``.
    """
    if optim_input is not None:
        warnings.warn("shardwise: optim_input is deprecated; pass the optimizer itself as optim",
                      FutureWarning, stacklevel=4)
    if optimizer is not None:
        return optimizer
    given: list[Any] = list(model.parameters() if optim_input is None else optim_input)
    if not given or not all(isinstance(item, (nn.Parameter, dict)) for item in given):
        raise OptionTypeError(
            "optim_input has the wrong type", expected="parameters or parameter groups",
            got=type(given[0]).__name__ if given else "nothing", remedy="Pass optim instead.")
    if isinstance(given[0], dict):
        return StandIn([{**group, "params": list(group["params"])} for group in given])
    return StandIn([{"params": given}])


def with_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Any:
    """``optimizer`` with the state and options of ``state_dict``, as ``optimizer.state_dict()`` has them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {parameters[number]: taken(parameters[number], values) for number, values in state_dict["state"].items()}
    given = state_dict.get("param_groups") or optimizer.param_groups
    groups = [{**options, "params": group["params"]}
              for options, group in zip(given, optimizer.param_groups, strict=True)]
    return StandIn(groups, state)


def rekey(
    state_dict: Mapping[str, Any], to: OptimStateKeyType, model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """``state_dict`` with its parameters named by FQN or by position in ``optimizer``; values are shared.

    A flat parameter counts as the originals behind it.
    """
    owned = owners_by_parameter(model_tensors(model), optimizer)
    tensors = [tensor for group in owned for _, owners in group for tensor in owners]
    number = {name: place for place, tensor in enumerate(tensors) for name in tensor.names}
    keys: dict[Any, Any] = number if to is OptimStateKeyType.PARAM_ID else {
        place: tensor.fqn for place, tensor in enumerate(tensors)}
    groups = state_dict.get("param_groups")
    used = [*state_dict["state"], *(key for group in groups or () for key in group["params"])]
    unknown = [key for key in used if key not in keys]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} parameters of the state dict are not in this optimizer", got=unknown[:4],
            expected="FQNs" if to is OptimStateKeyType.PARAM_ID else f"0 to {len(tensors) - 1}",
            remedy="Pass the model and optimizer that the state dict belongs to.")
    result: dict[str, Any] = {"state": {keys[key]: value for key, value in state_dict["state"].items()}}
    if groups is not None:
        by_position = to is OptimStateKeyType.PARAM_ID
        result["param_groups"] = [
            {**group, "params": (sorted if by_position else list)(keys[key] for key in group["params"])}
            for group in groups]
    return result
