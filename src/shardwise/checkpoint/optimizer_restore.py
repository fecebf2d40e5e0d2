"""Optimizer state from a checkpoint: for other groups, other ranks, original or flat parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..storage.flat_storage import FLAT
from ..storage.sharded_parameter import home_of
from .fit import fit_tensor
from .model_tensors import ModelTensor, local_rows
from .optimizer_contents import Described, owners_by_parameter
from .plain_values import decode
from .source import Located, Target

__all__ = ["OptimizerRestore"]


class OptimizerRestore:
    """Plans what to read (``targets``), then gives it to the optimizer (``apply``).

    Raises ``CheckpointError`` while planning; the optimizer is untouched until ``apply``.
    """

    def __init__(self, tensors: list[ModelTensor], optimizer: torch.optim.Optimizer, described: Described,
                 found: Mapping[str, Located], *, strict: bool) -> None:
        self._optimizer, self._described, self._found = optimizer, described, found
        self.targets: list[Target] = []
        self._state: dict[nn.Parameter, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        owned = owners_by_parameter(tensors, optimizer)
        if strict:
            _require_same(tensors, [t for group in owned for _, owners in group for t in owners], described)
        for group, pairs in zip(optimizer.param_groups, owned, strict=True):
            self._groups.append(self._options(group, [t for _, owners in pairs for t in owners]))
            for parameter, owners in pairs:
                state = self._plan(parameter, owners)
                if state:
                    self._state[parameter] = state

    def _options(self, group: dict[str, Any], tensors: list[ModelTensor]) -> dict[str, Any]:
        """The saved options of the group that its parameters were in; its own where they were in none."""
        names = {name for tensor in tensors for name in tensor.names}
        saved = [g["options"] for g in self._described["groups"] if names & set(g["params"])]
        if any(options != saved[0] for options in saved[1:]):
            raise CheckpointError(
                "parameters of one group were in groups with other options when saved",
                got=sorted(names)[:4], expected="one saved group for each group",
                remedy="Build the optimizer with the groups that it had.")
        options = cast("dict[str, Any]", decode(saved[0], _no_tensor)) if saved else {}
        options.pop("param_names", None)
        own = {key: value for key, value in group.items() if key != "params"}
        return own | options

    def _plan(self, parameter: nn.Parameter, owners: list[ModelTensor]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for tensor in owners:
            saved = next((self._described["state"][name] for name in tensor.names
                          if name in self._described["state"]), {})
            name = next((name for name in tensor.names if name in self._described["state"]), tensor.fqn)
            for key, kind in saved.items():
                if "value" in kind:
                    state.setdefault(key, decode(kind["value"], _no_tensor))
                elif "like" in kind:
                    self._plan_like(state, parameter, tensor, (name, key), getattr(torch, kind["like"]))
                else:
                    other = self._plan_other(tensor, (name, key), kind, parameter.device)
                    state |= {key: other} if other is not None else {}
        return state

    def _plan_like(self, state: dict[str, Any], parameter: nn.Parameter, tensor: ModelTensor,
                   place: tuple[str, str], dtype: torch.dtype) -> None:
        key = place[1]
        if key not in state:
            device = torch.get_default_device() if parameter.is_meta else parameter.device
            state[key] = torch.zeros_like(parameter.detach(), dtype=dtype, device=device)
        home = home_of(parameter)
        flat = home is not None and home[1] == FLAT
        rows = local_rows(home[0], tensor.index, state[key]) if flat and home is not None else state[key]
        located = self._locate(".".join(place))
        fit_tensor(".".join(place), tensor.shape, dtype, located)
        self.targets.append(Target(located, tensor.start, rows))

    def _plan_other(self, tensor: ModelTensor, place: tuple[str, str], kind: dict[str, Any],
                    device: torch.device) -> Tensor | None:
        """State of another shape: whole, or the part of the same rows; None where this rank has no rows."""
        name, span = ".".join(place), [tensor.start, tensor.start + tensor.values.numel()]
        sharded = tensor.storage is not None and tensor.storage.world_size > 1
        if sharded and "parts" in kind:
            rank = next((rank for rank, (_, _, rows) in kind["parts"].items() if rows == span), None)
            if rank is None and not tensor.values.numel():
                return None
            found = f"{name}.shard{rank}" if rank is not None else None
        else:
            found = name if "whole" in kind and not sharded else None
        if found is None:
            raise CheckpointError(
                "state that is not shaped like its parameter cannot be cut for other ranks", fqn=name,
                expected=f"elements {span[0]} to {span[1]} as one part",
                got=", ".join(f"{a} to {b}" for _, _, (a, b) in kind.get("parts", {}).values()) or "all",
                remedy="Load it with as many ranks as saved it, or load the model without the optimizer.")
        located = self._locate(found)
        values = torch.empty(located.entry.shape, dtype=located.entry.dtype, device=device)
        self.targets.append(Target(located, 0, values))
        return values

    def _locate(self, name: str) -> Located:
        if name not in self._found:
            raise CheckpointError("optimizer state is missing in the files", fqn=name)
        return self._found[name]

    def apply(self) -> None:
        """Give groups and state to the optimizer, by its own ``load_state_dict``."""
        position, state, groups = 0, dict[int, dict[str, Any]](), list[dict[str, Any]]()
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            members: list[nn.Parameter] = group["params"]
            groups.append({**options, "params": list(range(position, position + len(members)))})
            state |= {position + i: dict(self._state[p]) for i, p in enumerate(members) if p in self._state}
            position += len(members)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in self._state.items():  # it casts to the parameter's dtype
            now = self._optimizer.state[parameter]
            now.update({key: value for key, value in values.items()
                        if isinstance(value, Tensor) and now[key].dtype != value.dtype})


def _require_same(tensors: list[ModelTensor], present: list[ModelTensor], described: Described) -> None:
    """The optimizer's parameters against the saved one's. Those without rows here may be left out."""
    saved = {name for group in described["groups"] for name in group["params"]}
    excused = {name for tensor in tensors if not tensor.values.numel() for name in tensor.names}
    known = {name for tensor in present for name in tensor.names}
    added, gone = [t.fqn for t in present if not saved & set(t.names)], sorted(saved - known - excused)
    if added or gone:
        raise CheckpointError(
            "the optimizer has other parameters than the saved one",
            got=f"new: {added[:4] or 'none'}; gone: {gone[:4] or 'none'}",
            remedy="Give it the ones that it had, or pass strict=False: new ones start without state.")


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError("an option of the optimizer is a tensor", fqn=name)
