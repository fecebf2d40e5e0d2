"""The wrapper's arguments: checked, passed on to nested wrappers, and turned into the engine's choices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Collectives
from ..comm.mesh import GroupPair, default_group, groups_of_mesh, require_process_group
from ..engine.build import Choices
from ..engine.reduce import Groups
from ..engine.settings import Schedule, Settings, schedule_for
from ..errors import ConfigurationError, OptionTypeError
from ..plan.execution import ExecutionGroups
from ..plan.options import BackwardPrefetch, CPUOffload, MixedPrecision, Precision, ShardingStrategy
from ..plan.policies import Policy
from .companions import companion_remedy
from .materialise import Initialiser, LeftToOuter

__all__ = ["WrapperOptions", "check_options", "choices_of", "groups_of", "initialiser_of"]


@dataclass(frozen=True)
class WrapperOptions:
    """The arguments that nested wrappers inherit, under their own names."""

    process_group: Any
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: DeviceMesh | None
    allow_skipped_units: bool

    def as_arguments(self) -> dict[str, Any]:
        """For a nested wrapper."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.sharding_strategy.is_hybrid and self.process_group is None and self.device_mesh is None:
            arguments["process_group"] = groups_of(self)  # those that are made by default
        return arguments


_TYPES: dict[str, tuple[type, ...]] = {
    "sharding_strategy": (ShardingStrategy,),
    "cpu_offload": (CPUOffload, type(None)),
    "backward_prefetch": (BackwardPrefetch, type(None)),
    "mixed_precision": (MixedPrecision, type(None)),
    "device_id": (int, torch.device, type(None)),
    "device_mesh": (DeviceMesh, type(None)),
    "sync_module_states": (bool,),
    "forward_prefetch": (bool,),
    "limit_all_gathers": (bool,),
    "use_orig_params": (bool,),
    "allow_skipped_units": (bool,),
}


def check_options(module: Any, options: WrapperOptions, policy: Any) -> None:
    """Raise ``ConfigurationError`` or ``OptionTypeError`` for bad arguments."""
    if not isinstance(module, nn.Module):
        raise OptionTypeError("only a module can be wrapped", expected="nn.Module", got=type(module).__name__)
    for name, kinds in _TYPES.items():
        value = getattr(options, name)
        if not isinstance(value, kinds):
            expected = " or ".join(f"shardwise.{k.__name__}" if k.__module__.startswith("shardwise")
                                   else k.__name__ for k in kinds)
            raise OptionTypeError(f"{name} has the wrong type", expected=expected,
                                  got=f"{type(value).__module__}.{type(value).__name__}",
                                  remedy=companion_remedy(value, "fully_shard"))
    if options.param_init_fn is not None and not callable(options.param_init_fn):
        raise OptionTypeError("param_init_fn must be callable", expected="a callable that takes a module",
                              got=type(options.param_init_fn).__name__)
    if policy is not None and not callable(policy) and not isinstance(policy, (Policy, ExecutionGroups)):
        raise OptionTypeError("auto_wrap_policy is neither a policy nor callable",
                              expected="a policy of shardwise.wrap, or a callable", got=type(policy).__name__,
                              remedy="For classes of modules pass ModuleWrapPolicy({Block, ...}).")
    group = options.process_group
    if group is not None and not isinstance(group, (dist.ProcessGroup, tuple, list)):
        raise OptionTypeError("process_group has the wrong type", expected="a ProcessGroup, or a pair of them",
                              got=type(group).__name__, remedy="Make one with dist.new_group(ranks).")
    if options.process_group is not None and options.device_mesh is not None:
        raise ConfigurationError("process_group and device_mesh exclude each other", expected="one of them",
                                 got="both", remedy="Pass only device_mesh.")
    if options.mixed_precision is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        warnings.warn("shardwise: FSDP_USE_FULL_PREC_IN_EVAL is not read; evaluate inside "
                      "shardwise.full_precision(model)", stacklevel=4)
    _check_hybrid(options, policy)
    if options.process_group is None and options.device_mesh is None:
        require_process_group()


def _check_hybrid(options: WrapperOptions, policy: Any) -> None:
    group, hybrid = options.process_group, options.sharding_strategy.is_hybrid
    pair = isinstance(group, (tuple, list))
    if hybrid and group is not None and not (pair and len(group) == 2):
        raise ConfigurationError(
            "a hybrid strategy needs two groups", expected="process_group=(shard group, replicate group)",
            got=type(group).__name__, remedy="Pass a pair, or a device_mesh of two dims.",
        )
    if hybrid and group is None and options.device_mesh is None and policy is None:
        raise ConfigurationError(
            "a hybrid strategy needs groups, or an auto_wrap_policy for which they are made",
            expected="process_group=(shard, replicate), device_mesh, or auto_wrap_policy", got="none of them",
            remedy="Pass device_mesh=init_device_mesh(type, (replicas, shards), "
                   "mesh_dim_names=('replicate', 'shard')).",
        )
    if not hybrid and pair:
        raise ConfigurationError(
            "a pair of groups is for hybrid strategies", expected="one process group",
            got=f"a {type(group).__name__}", remedy="Choose ShardingStrategy.HYBRID_SHARD, or pass one group.",
        )


_NODE_GROUPS: dict[dist.ProcessGroup, GroupPair] = {}


def _groups_by_node() -> GroupPair:
    """Shard inside a node, replicate across nodes; made once."""
    world = default_group()
    if world not in _NODE_GROUPS:
        size, local = world.size(), int(os.environ.get("LOCAL_WORLD_SIZE", world.size()))
        if size % local:
            raise ConfigurationError("nodes of different size cannot be used for hybrid sharding",
                                     expected=f"a multiple of {local} ranks", got=size,
                                     remedy="Pass a device_mesh.")
        shard, _ = dist.new_subgroups(local)
        ranks = [list(range(first, size, local)) for first in range(local)]
        replicate, _ = dist.new_subgroups_by_enumeration(ranks)
        _NODE_GROUPS[world] = (shard, replicate)  # pyright: ignore[reportArgumentType]
    return _NODE_GROUPS[world]


def groups_of(options: WrapperOptions) -> GroupPair:
    """(shard group, replicate group) for the strategy; None stands for this rank alone."""
    strategy = options.sharding_strategy
    if strategy.is_hybrid:
        if options.device_mesh is not None:
            return groups_of_mesh(options.device_mesh, hybrid=True)
        if options.process_group is not None:
            shard, replicate = options.process_group
            return shard, replicate
        return _groups_by_node()
    if options.device_mesh is not None:
        group, _ = groups_of_mesh(options.device_mesh, hybrid=False)
    else:
        group = options.process_group if options.process_group is not None else default_group()
    return (None, group) if strategy is ShardingStrategy.NO_SHARD else (group, None)


def choices_of(
    options: WrapperOptions, transports: tuple[Collectives, Collectives | None], device: torch.device,
    ignored: tuple[AbstractSet[nn.Module], AbstractSet[nn.Parameter]],
) -> Choices:
    """What the engine needs to know."""
    shard, replicate = transports
    if shard.size == 1 and options.sharding_strategy is not ShardingStrategy.NO_SHARD and replicate is None:
        warnings.warn(
            f"shardwise: the group has one rank, so {options.sharding_strategy.name} shards nothing "
            "(as NO_SHARD)", stacklevel=4,
        )
    return Choices(
        groups=Groups(shard, replicate),
        device=device,
        precision=Precision.of_wrapper(options.mixed_precision),
        settings=Settings(reshard_after_forward=options.sharding_strategy.reshards_after_forward),
        schedule=schedule_for(
            Schedule(options.backward_prefetch, options.forward_prefetch, options.limit_all_gathers),
            skips=options.allow_skipped_units),
        original_parameters=options.use_orig_params,
        offload=options.cpu_offload is not None and options.cpu_offload.offload_params,
        ignored_modules=frozenset(ignored[0]),
        ignored_parameters=frozenset(ignored[1]),
    )


def initialiser_of(
    options: WrapperOptions, device: torch.device, ignored: AbstractSet[nn.Module],
    ignored_parameters: AbstractSet[nn.Parameter],
) -> Initialiser:
    """How what is on the meta device gets its values."""
    given = options.param_init_fn
    function = given.param_init_fn if isinstance(given, LeftToOuter) else given
    return Initialiser(function, device, frozenset(ignored), frozenset(ignored_parameters))
