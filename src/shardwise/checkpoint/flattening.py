"""Optimizer state dicts as one flat dict, and back.

    state.<fqn>.<name>               a state value
    param_groups.<fqn>.<option>      an option of the group that the parameter is in
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError

__all__ = ["flatten_optimizer_state", "unflatten_optimizer_state"]

_STATE, _GROUPS = "state.", "param_groups."


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` by FQN as one flat dict."""
    flat: dict[str, Any] = {}
    for fqn, values in state_dict["state"].items():
        for name, value in values.items():
            flat[f"{_STATE}{fqn}.{name}"] = value
    for group in state_dict["param_groups"]:
        for fqn in group["params"]:
            for option, value in group.items():
                if option != "params":
                    flat[f"{_GROUPS}{fqn}.{option}"] = value
    return flat


def unflatten_optimizer_state(flat: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """The inverse. ``options``: the names of group options; parameters alike in all of them form a group."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    known = sorted(set(options), key=len, reverse=True)
    for key, value in flat.items():
        if key.startswith(_STATE):
            fqn, _, name = key.removeprefix(_STATE).rpartition(".")
            state.setdefault(fqn, {})[name] = value
        elif key.startswith(_GROUPS):
            rest = key.removeprefix(_GROUPS)
            option = next((o for o in known if rest.endswith(f".{o}")), rest.rpartition(".")[2])
            groups.setdefault(rest.removesuffix(f".{option}"), {})[option] = value
        else:
            raise CheckpointError("this is no optimizer state dict", got=key,
                                  expected="'state', or keys that start with 'state.' or 'param_groups.'")
    merged: list[dict[str, Any]] = []
    for fqn, values in groups.items():
        same = next((g for g in merged if {k: v for k, v in g.items() if k != "params"} == values), None)
        if same is None:
            merged.append({**values, "params": [fqn]})
        else:
            same["params"].append(fqn)
    return {"state": state, "param_groups": merged}
