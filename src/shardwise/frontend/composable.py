"""``fully_shard``: sharding without a wrapper. The module keeps its class behaviour and its names.

The signature follows ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.model_state import install
from ..comm.mesh import default_group, groups_of_mesh, require_process_group, transports
from ..comm.neighbours import Neighbours
from ..engine.build import Choices, build_unit
from ..engine.hooks import unit_of
from ..engine.reduce import Groups
from ..engine.settings import Schedule, Settings, schedule_for
from ..errors import ConfigurationError, LifecycleError, OptionTypeError
from ..plan.execution import ExecutionGroups
from ..plan.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Precision
from ..plan.state_options import StateDictType
from .companions import companion_remedy
from .execution import agree_on_groups
from .module import FSDPModule
from .placing import device_of

__all__ = ["fully_shard"]

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    groups: ExecutionGroups | None = None,
    allow_skipped_units: bool = False,
) -> Any:
    """Shard the parameters of ``module`` that no unit below it has, in place; returns ``module``.

    Apply it bottom-up, to the blocks first and to the root last. The module's class becomes a
    subclass of ``FSDPModule`` and of its old class, with the old name in it.

    Args:
        module: a module, or a list of modules that are gathered and freed together.
        mesh: one dim (shard), or two named ones (replicate, shard); default: all ranks.
        reshard_after_forward: free the gathered parameters after forward (True), keep them until
            backward (False), or None: True, except for the root, which needs them at once. A
            number: after forward keep them sharded over this many neighbouring ranks, among
            which backward gathers them (inside a node, say).
        mp_policy: dtypes in use, on the wire, and of outputs.
        offload_policy: where shards live.
        ignored_params: parameters left as they are.
        groups: make units of these modules below ``module`` first, with the same arguments
            (``shardwise.group_by_execution``). The first rank's groups count on all of them.
        allow_skipped_units: on the root: ranks may run different units in one pass, as in a mixture
            of experts. They agree before each gather; no gather starts ahead of need.

    Raises:
        ConfigurationError, OptionTypeError: bad input; nothing was changed.
        LifecycleError: the module is sharded already.
    """
    modules = _modules(module)
    _check(modules, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy)
    _check_groups(groups, modules)
    pair = groups_of_mesh(mesh, hybrid=True) if mesh is not None else (default_group(), None)
    device = _device(modules, mesh)
    shard, replicate = transports(pair, device)
    kept, reshard = _kept_ranks(reshard_after_forward, shard.size)
    if groups is not None:
        for members in agree_on_groups(groups, (shard, replicate), device).modules_of(modules[0]):
            fully_shard(members, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy,
                        offload_policy=offload_policy, ignored_params=ignored_params)
    unit = build_unit(modules, Choices(
        groups=Groups(shard, replicate),
        device=device,
        precision=Precision.of_policy(mp_policy),
        settings=Settings(reshard_after_forward=reshard is not False, keep_as_root=reshard is None),
        schedule=schedule_for(Schedule(), skips=allow_skipped_units),
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        pin_memory=not isinstance(offload_policy, CPUOffloadPolicy) or offload_policy.pin_memory,
        ignored_parameters=frozenset(ignored_params or ()),
    ))
    if kept is not None:
        unit.gather.small = Neighbours(shard, pair[0], kept)
    install(unit, StateDictType.SHARDED_STATE_DICT, snapshot=False)
    for one in modules:
        one.__class__ = _sharded_class(type(one))
    return module


def _kept_ranks(reshard: bool | int | None, size: int) -> tuple[int | None, bool | None]:
    """``reshard_after_forward`` as (ranks that keep a part each after forward, plain choice)."""
    if reshard is None or isinstance(reshard, bool):
        return None, reshard
    if reshard < 1 or size % reshard:
        raise ConfigurationError(
            "reshard_after_forward does not divide the shard group", got=reshard,
            expected=f"True, False, None, or a factor of {size}", remedy="Pass the number of ranks of a node.",
        )
    if reshard in (1, size):
        return None, reshard != 1  # each rank keeps all, or its shard
    return reshard, True


def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind),
                              {"__module__": kind.__module__, "_unsharded": kind})
    return _CLASSES[kind]


def _modules(module: Any) -> list[nn.Module]:
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    wrong = next((m for m in modules if not isinstance(m, nn.Module)), None)
    if wrong is not None or not modules:
        raise OptionTypeError("fully_shard takes a module or a list of modules", expected="nn.Module",
                              got=type(wrong).__name__ if modules else "an empty list")
    return modules


def _check(modules: Sequence[nn.Module], reshard: Any, placement: Any, mp_policy: Any, offload: Any) -> None:
    require_process_group()
    for module in modules:
        if unit_of(module) is not None:
            raise LifecycleError(
                "fully_shard was applied to this module before", unit=type(module).__name__,
                remedy="Apply it once to each module.",
            )
        if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigurationError(
                "fully_shard needs a module with a forward: its parameters are gathered around that",
                expected="a module that defines forward", got=type(module).__name__,
                remedy="Apply fully_shard to the container's children, or pass them as a list.",
            )
    for outer in modules:
        inner = next((one for one in modules if one is not outer and one in set(outer.modules())), None)
        if inner is not None:
            raise ConfigurationError(
                "a module of the list contains another one of the list", remedy="List only modules side by side.",
                got=f"{type(inner).__name__} inside {type(outer).__name__}",
            )
    _check_types(reshard, placement, mp_policy, offload)


def _check_types(reshard: Any, placement: Any, mp_policy: Any, offload: Any) -> None:
    if not isinstance(reshard, (int, type(None))):
        raise OptionTypeError("reshard_after_forward has the wrong type", expected="bool, int or None",
                              got=repr(reshard))
    if placement is not None:
        raise ConfigurationError(
            "shard_placement_fn is not supported: shards are whole rows of dim 0", got=placement,
            expected=None, remedy="Leave it out; every shape can be sharded by rows.",
        )
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise OptionTypeError("mp_policy has the wrong type", expected="shardwise.MixedPrecisionPolicy",
                              got=type(mp_policy).__module__ + "." + type(mp_policy).__name__,
                              remedy=companion_remedy(mp_policy, "FullyShardedDataParallel"))
    if offload is not None and not isinstance(offload, OffloadPolicy):
        raise OptionTypeError("offload_policy has the wrong type", expected="shardwise.OffloadPolicy",
                              got=type(offload).__module__ + "." + type(offload).__name__,
                              remedy=companion_remedy(offload, "FullyShardedDataParallel"))


def _check_groups(groups: Any, modules: Sequence[nn.Module]) -> None:
    if groups is None:
        return
    if not isinstance(groups, ExecutionGroups) or len(modules) > 1:
        raise OptionTypeError(
            "groups takes the execution groups of one module",
            expected="shardwise.ExecutionGroups, and one module to shard", remedy="See shardwise.group_by_execution.",
            got=f"{type(groups).__name__}, and {len(modules)} modules",
        )
    groups.modules_of(modules[0])  # raises if the names are of another model


def _device(modules: Sequence[nn.Module], mesh: DeviceMesh | None) -> torch.device:
    """The device to compute on: the mesh's kind, or else where the parameters are."""
    if mesh is not None and mesh.device_type != "cpu":
        return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    return device_of(modules)
