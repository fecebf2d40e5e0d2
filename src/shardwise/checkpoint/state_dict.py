"""``get_`` and ``set_`` functions for state dicts, as in ``torch.distributed.checkpoint.state_dict``.

For modules sharded by either front end, in part, or not at all; also inside DDP, a compiled
module, or activation checkpointing, whose prefixes never show in the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.errands import Errand
from ..errors import CheckpointError, ConfigurationError
from ..plan.state_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .adoption import adopt
from .choice import state_dict_type
from .flattening import flatten_optimizer_state, unflatten_optimizer_state
from .from_rank_zero import spread_model_state, spread_optimizer_state
from .model_tensors import ModelTensor, clean_name, model_tensors
from .optimizer_loading import optimizer_state_to_load
from .optimizer_state import optimizer_state
from .priming import primed

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """Options under torch's names.

    ``full_state_dict``: whole tensors instead of records.
    ``cpu_offload``: tensors on the host; with ``full_state_dict`` only rank 0 gets them.
    ``ignore_frozen_params``: leave out parameters that need no gradient; loading does not miss them.
    ``keep_submodule_prefixes``: with ``submodules``, keys start with the submodule's name.
    ``strict``: missing and unexpected keys raise.
    ``broadcast_from_rank0``: rank 0 has a full dict, the others get their rows from it.
    ``flatten_optimizer_state_dict``: one flat dict with keys like ``state.<fqn>.<name>``.
    ``dsd_fqn_modifiers``: accepted and without effect; names are clean already.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ConfigurationError("broadcast_from_rank0 needs a full state dict",
                                     expected="full_state_dict=True", got=False,
                                     remedy="Pass full_state_dict=True too.")


class IncompatibleKeys(NamedTuple):
    """What ``set_model_state_dict`` could not match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _settings(options: StateDictOptions) -> StateDictSettings:
    host = options.cpu_offload
    if options.full_state_dict:
        return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(host, host),
                                 FullOptimStateDictConfig(host, host))
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(host),
                             ShardedOptimStateDictConfig(host))


def _empties(options: StateDictOptions) -> bool:
    """Does this rank only take part?"""
    only_first = options.full_state_dict and options.cpu_offload
    return only_first and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0


# ---------------------------------------------------------------------- models
@Errand("get_model_state_dict")
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state dict of ``model`` with clean keys; a collective for ``full_state_dict``."""
    options = options or StateDictOptions()
    with _chosen(model, options):
        state = {clean_name(_bare(model, key)): value for key, value in model.state_dict().items()}
    if _empties(options):
        return {}
    if options.cpu_offload:
        state = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        state = {key: value for key, value in state.items() if key not in frozen}
    return _of_submodules(model, submodules, state, options)


@Errand("set_model_state_dict")
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Load whole tensors or records; the keys that did not match. Values are written in place."""
    options = options or StateDictOptions()
    if options.broadcast_from_rank0:
        model_state_dict = spread_model_state(model, model_state_dict)
    elif not model_state_dict:
        return IncompatibleKeys([], [])
    names = {clean_name(_bare(model, key)): key for key in _own_keys(model)}
    given = {names.get(key, key): value for key, value in model_state_dict.items()}
    result = model.load_state_dict(given, strict=options.strict and not options.ignore_frozen_params)
    left_out = _frozen(model) if options.ignore_frozen_params else set[str]()
    missing = [key for key in _clean(model, result.missing_keys) if key not in left_out]
    unexpected = _clean(model, result.unexpected_keys)
    if options.strict and (missing or unexpected):
        raise CheckpointError("the state dict does not match the model", expected="every key of the model",
                              got=f"missing {missing}, unexpected {unexpected}", remedy="Pass strict=False.")
    return IncompatibleKeys(missing, unexpected)


# ---------------------------------------------------------------------- optimizers
@Errand("get_optimizer_state_dict")
def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers by FQN. Of one that never stepped, what it begins with."""
    options = options or StateDictOptions()
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _listed(optimizers):
        with primed(optimizer):
            one = optimizer_state(model, optimizer, _settings(options))
        merged["state"] |= one.get("state", {})
        merged["param_groups"] += one.get("param_groups", [])
    if _empties(options):
        return {}
    if submodules:
        every = dict.fromkeys(_clean(model, _own_keys(model)))
        names = set(_of_submodules(model, submodules, every, StateDictOptions()))
        merged["state"] = {fqn: value for fqn, value in merged["state"].items() if fqn in names}
        merged["param_groups"] = [{**group, "params": [fqn for fqn in group["params"] if fqn in names]}
                                  for group in merged["param_groups"]]
    return flatten_optimizer_state(merged) if options.flatten_optimizer_state_dict else merged


@Errand("set_optimizer_state_dict")
def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *,
    options: StateDictOptions | None = None,
) -> None:
    """Load state by FQN into one or more optimizers, whatever ranks and wrapping it comes from."""
    options = options or StateDictOptions()
    listed = _listed(optimizers)
    given: Mapping[str, Any] = optim_state_dict
    if given and "state" not in given:
        given = unflatten_optimizer_state(given, [name for o in listed for name in _option_names(o)])
    if options.broadcast_from_rank0:
        given = spread_optimizer_state(model, given or None)
    elif not given:
        return
    for optimizer, loaded in [(o, optimizer_state_to_load(model, o, given)) for o in listed]:
        optimizer.load_state_dict(loaded)


def _option_names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [key for group in optimizer.param_groups for key in group if key != "params"]


# ---------------------------------------------------------------------- both
@Errand("get_state_dict")
def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of the model and of its optimizers."""
    return (get_model_state_dict(model, submodules=submodules, options=options),
            get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options))


@Errand("set_state_dict")
def set_state_dict(
    model: nn.Module, optimizers: Optimizers, *, model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any], options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load both; an empty one is left out."""
    result = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return result


def _chosen(model: nn.Module, options: StateDictOptions) -> Any:
    settings = _settings(options)
    return state_dict_type(model, settings.state_dict_type, settings.state_dict_config,
                           settings.optim_state_dict_config)


def _listed(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in listed:
        adopt(optimizer)
    return listed


def _bare(model: nn.Module, key: str) -> str:
    """Without the prefix that DDP puts in front."""
    return key.removeprefix("module.") if isinstance(model, nn.parallel.DistributedDataParallel) else key


def _own_keys(model: nn.Module) -> list[str]:
    """The keys of ``model.state_dict()``, found without communication."""
    with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return list(model.state_dict())


def _clean(model: nn.Module, keys: Iterable[str]) -> list[str]:
    return [clean_name(_bare(model, key)) for key in keys]


def _frozen(model: nn.Module) -> set[str]:
    """Names of parameters that need no gradient."""
    return {_bare(model, name) for tensor in model_tensors(model) if tensor.is_parameter
            and not _shown(tensor).requires_grad for name in tensor.names}


def _shown(tensor: ModelTensor) -> nn.Parameter:
    """The parameter that stands for ``tensor``: itself, or the flat one."""
    if tensor.parameter is not None:
        return tensor.parameter
    assert tensor.storage is not None
    return tensor.storage.visible[0].parameter


def _of_submodules(
    model: nn.Module, submodules: set[nn.Module] | None, state: dict[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    if not submodules:
        return state
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if module in submodules:
            prefix = clean_name(_bare(model, name)) + "."
            for key, value in state.items():
                if key.startswith(prefix):
                    found[key if options.keep_submodule_prefixes else key.removeprefix(prefix)] = value
    return found
