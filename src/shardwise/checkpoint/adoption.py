"""Optimizers that hold sharded parameters show records in their own state dicts.

What torch's helpers and ``torch.distributed.checkpoint`` do with an optimizer is to call its ``state_dict()``
and ``load_state_dict()``, and plain rows would count as replicas there: one rank's would be saved.
With hooks on the optimizer its state dicts show records, and take records and whole tensors as well as rows.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..comm.errands import Errand
from ..plan.state_options import FullOptimStateDictConfig, StateDictType, settings_for
from ..storage.flat_storage import FLAT
from ..storage.optimizer_watch import adopt, on_adoption
from ..storage.sharded_parameter import home_of
from ..torch_private import Wish, torch_wants_whole
from .model_tensors import model_tensors
from .optimizer_contents import owners_by_parameter
from .optimizer_rows import are_whole, members, shown, taken
from .optimizer_state import optimizer_state

__all__ = ["adopt"]

Optimizer = torch.optim.Optimizer

_ADOPTED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _adopt(optimizer: Optimizer) -> None:
    """Give ``optimizer`` its hooks; whole tensors and records of its state become rows."""
    if optimizer in _ADOPTED:
        return
    _ADOPTED.add(optimizer)
    optimizer.register_state_dict_post_hook(_show)
    optimizer.register_load_state_dict_pre_hook(_take)
    state = [(key, values) for key, values in optimizer.state.items() if isinstance(key, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
    cut = are_whole(state)  # pyright: ignore[reportArgumentType]
    for parameter, values in state:
        values.update(taken(parameter, values, cut=cut))  # pyright: ignore[reportArgumentType]


on_adoption(_adopt)


@Errand("optimizer.state_dict")
def _show(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    known = members(state_dict, optimizer)
    wish = torch_wants_whole()
    if wish is not None:
        state_dict["state"] = _whole_state(optimizer, wish, {known[key]: key for key in known})
        return
    state_dict["state"] = {key: shown(known[key], values) if key in known else values
                           for key, values in state_dict["state"].items()}


@Errand("optimizer.load_state_dict")
def _take(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    known = members(state_dict, optimizer)
    cut = are_whole((known[key], values) for key, values in state_dict["state"].items() if key in known)
    state_dict["state"] = {key: taken(known[key], values, cut=cut) if key in known else values
                           for key, values in state_dict["state"].items()}


def _whole_state(optimizer: Optimizer, wish: Wish, keys: dict[Any, Any]) -> dict[Any, dict[str, Any]]:
    """The full state in the form of ``shown`` (a collective)."""
    model, only_first = wish
    config = FullOptimStateDictConfig(only_first, only_first)
    whole = optimizer_state(model, optimizer, settings_for(StateDictType.FULL_STATE_DICT, None, config))
    state: dict[Any, dict[str, Any]] = {}
    for group in owners_by_parameter(model_tensors(model), optimizer):
        for parameter, owners in group:
            home = home_of(parameter)
            flat = home[0] if home is not None and home[1] == FLAT else None
            like = {name for name, value in optimizer.state.get(parameter, {}).items()
                    if isinstance(value, Tensor) and value.dim()} if flat is not None else set[str]()
            for owner in owners:
                for name, given in whole.get("state", {}).get(owner.fqn, {}).items():
                    value = given.contiguous() if isinstance(given, Tensor) else given  # it is sent as it is
                    mine = state.setdefault(keys[parameter], {})
                    if flat is not None and name in like:
                        mine.setdefault(name, {})[flat.layout.parameters[owner.index].fqn] = value
                    else:
                        mine[name] = value
    return state
