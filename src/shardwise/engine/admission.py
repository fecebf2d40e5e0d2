"""What may become a unit: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from ..errors import ConfigurationError, LifecycleError, name_list
from ..plan.ownership import Ownership
from ..storage.sharded_parameter import home_of
from ..storage.tensor_parallel import require_plain_memory
from .unit import Unit

__all__ = ["owner_of", "require_children_first", "require_shardable"]


def owner_of(parameter: nn.Parameter) -> Unit | None:
    """The unit that holds ``parameter``, if shardwise manages it."""
    home = home_of(parameter)
    return Unit.owning(home[0]) if home is not None else None


def require_children_first(modules: Sequence[nn.Module], ownership: Ownership) -> None:
    """Raise ``LifecycleError`` if a unit around ``modules`` has all of their parameters already."""
    if ownership.owned:
        return
    for entry in ownership.borrowed:
        outer = owner_of(entry.parameter)
        if outer is not None and any(one in modules for _, one in outer.own_modules):
            raise LifecycleError(
                "the unit around this module has its parameters already, so it would be a unit without any",
                unit=outer.name, got=f"{type(modules[0]).__name__} after {type(outer.modules[0]).__name__}",
                expected="children before their parents",
                remedy="Call fully_shard, or the wrapper, on each block first and on the whole model last.")


def require_shardable(ownership: Ownership, module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Raise ``ConfigurationError`` for what a unit of ``module`` cannot hold."""
    kind = type(module).__name__
    devices = {entry.parameter.device for entry in ownership.owned}
    meta = [entry.fqn for entry in ownership.owned if entry.parameter.is_meta]
    if meta and len(devices) > 1:
        raise ConfigurationError(
            f"some parameters of the unit are on the meta device ({name_list(meta)}) and others are not",
            unit=kind,
            expected="all of them on meta, or none", got=", ".join(sorted(str(d) for d in devices)),
            remedy="Call shardwise.materialise(module) first.",
        )
    if len(devices) > 1:
        by_device = {str(d): next(e.fqn for e in ownership.owned if e.parameter.device == d) for d in devices}
        raise ConfigurationError(
            "parameters of one unit lie on several devices", unit=kind,
            expected="one device", got=by_device,
            remedy="Move the module to one device first, or pass device_id.",
        )
    for entry in ownership.owned:
        require_plain_memory(entry, kind)
        if entry.parameter.layout is not torch.strided:
            raise ConfigurationError(
                "only dense parameters can be sharded", fqn=entry.fqn, unit=kind,
                expected=torch.strided, got=entry.parameter.layout,
                remedy="Ignore the parameter (ignored_states / ignored_params).",
            )
    for one in ignored:
        shared = [e.fqn for e in ownership.owned if any(e.parameter is p for p in one.parameters())]
        if shared:
            raise ConfigurationError(
                f"a parameter is shared between the unit and an ignored module ({name_list(shared)})",
                unit=kind,
                remedy="Ignore the parameter too, or do not ignore the module.",
            )
