"""Bad input fails at construction, with one clear error, and changes nothing (rows A28, B12, B13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy, fully_shard
from shardwise.errors import ConfigurationError, LifecycleError, OptionTypeError, ShardwiseError
from tests.bed import ranks
from tests.bed.models import TinyMLP, loss, points

Build = Callable[[Any], Any]


class NoReset(nn.Module):
    """Registers a parameter and has no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))


def _sparse() -> nn.Module:
    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    return model


def _tied_to_ignored() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model, model[1]


def _wrap(model: nn.Module, **arguments: Any) -> Any:
    return FullyShardedDataParallel(model, **{"use_orig_params": True, **arguments})


def _ignoring_tied() -> Any:
    model, ignored = _tied_to_ignored()
    return _wrap(model, ignored_modules=[ignored])


def _wrap_twice() -> Any:
    return _wrap(_wrap(TinyMLP()))


def _shard_twice() -> Any:
    return fully_shard(fully_shard(TinyMLP()))


def _nested_list() -> Any:
    model = TinyMLP()
    return fully_shard([model, model.middle])


#: what is done -> (class of the error, its text)
CASES: dict[str, tuple[Callable[[], Any], type[ShardwiseError], str]] = {
    "wrapper_no_module": (lambda: FullyShardedDataParallel(3), OptionTypeError,
        "shardwise: only a module can be wrapped: expected nn.Module, got int."),
    "fully_shard_no_module": (lambda: fully_shard(3), OptionTypeError,
        "shardwise: fully_shard takes a module or a list of modules: expected nn.Module, got int."),
    "fully_shard_empty_list": (lambda: fully_shard([]), OptionTypeError,
        "shardwise: fully_shard takes a module or a list of modules: expected nn.Module, got an empty list."),
    "fully_shard_nested_list": (_nested_list, ConfigurationError,
        "shardwise: a module of the list contains another one of the list: got Linear inside TinyMLP. "
        "List only modules side by side."),
    "meta_without_init": (lambda: _wrap(NoReset()), ConfigurationError,
        "shardwise: cannot materialise a module from the meta device ('scale') (unit 'NoReset'): expected "
        "param_init_fn, or a reset_parameters() method, got NoReset. Pass param_init_fn, or define "
        "reset_parameters() for what this module registers."),
    "mixed_devices": (lambda: fully_shard(_two_devices()), ConfigurationError, ""),
    "sparse": (lambda: fully_shard(_sparse()), ConfigurationError,
        "shardwise: only dense parameters can be sharded (parameter 'weight', unit 'Linear'): expected "
        "torch.strided, got torch.sparse_coo. Ignore the parameter (ignored_states / ignored_params)."),
    "wrapped_twice": (_wrap_twice, LifecycleError,
        "shardwise: the module is sharded already (unit 'FullyShardedDataParallel'). Wrap each module once."),
    "wrapped_after_fully_shard": (lambda: _wrap(fully_shard(TinyMLP())), LifecycleError,
        "shardwise: the module is sharded already (unit 'FSDPTinyMLP'). Wrap each module once."),
    "fully_shard_twice": (_shard_twice, LifecycleError,
        "shardwise: fully_shard was applied to this module before (unit 'FSDPTinyMLP'). "
        "Apply it once to each module."),
    "tied_to_ignored": (_ignoring_tied, ConfigurationError,
        "shardwise: a parameter is shared between the unit and an ignored module ('0.weight') "
        "(unit 'Sequential'). Ignore the parameter too, or do not ignore the module."),
    "policy": (lambda: _wrap(TinyMLP(), auto_wrap_policy=3), OptionTypeError,
        "shardwise: auto_wrap_policy is neither a policy nor callable: expected a policy of shardwise.wrap, "
        "or a callable, got int. For classes of modules pass ModuleWrapPolicy({Block, ...})."),
    "group": (lambda: _wrap(TinyMLP(), process_group=2), OptionTypeError,
        "shardwise: process_group has the wrong type: expected a ProcessGroup, or a pair of them, got int. "
        "Make one with dist.new_group(ranks)."),
    "policy_of_the_other_front_end": (
        lambda: _wrap(TinyMLP(), mixed_precision=shardwise.MixedPrecisionPolicy()), OptionTypeError,
        "shardwise: mixed_precision has the wrong type: expected shardwise.MixedPrecision or NoneType, got "
        "shardwise.plan.options.MixedPrecisionPolicy. That class belongs to fully_shard."),
    "param_init_fn": (lambda: _wrap(TinyMLP(), param_init_fn=3), OptionTypeError,
        "shardwise: param_init_fn must be callable: expected a callable that takes a module, got int."),
    "strategy": (lambda: _wrap(TinyMLP(), sharding_strategy="FULL_SHARD"), OptionTypeError,
        "shardwise: sharding_strategy has the wrong type: expected shardwise.ShardingStrategy, "
        "got builtins.str."),
    "strategy_of_the_peer": (
        lambda: _wrap(TinyMLP(), sharding_strategy=peer.ShardingStrategy.FULL_SHARD), OptionTypeError,
        "shardwise: sharding_strategy has the wrong type: expected shardwise.ShardingStrategy, got "
        "torch.distributed.fsdp.api.ShardingStrategy. Import the companion classes from shardwise."),
    "precision_of_the_peer": (
        lambda: _wrap(TinyMLP(), mixed_precision=peer.MixedPrecision()), OptionTypeError,
        "shardwise: mixed_precision has the wrong type: expected shardwise.MixedPrecision or NoneType, got "
        "torch.distributed.fsdp.api.MixedPrecision. Import the companion classes from shardwise."),
    "offload_of_the_peer": (lambda: _wrap(TinyMLP(), cpu_offload=peer.CPUOffload()), OptionTypeError,
        "shardwise: cpu_offload has the wrong type: expected shardwise.CPUOffload or NoneType, got "
        "torch.distributed.fsdp.api.CPUOffload. Import the companion classes from shardwise."),
    "policy_of_the_peer": (
        lambda: fully_shard(TinyMLP(), mp_policy=peer.MixedPrecisionPolicy()), OptionTypeError,
        "shardwise: mp_policy has the wrong type: expected shardwise.MixedPrecisionPolicy, got "
        "torch.distributed.fsdp.MixedPrecisionPolicy. Import the companion classes from shardwise."),
    "offload_policy": (lambda: fully_shard(TinyMLP(), offload_policy=True), OptionTypeError,
        "shardwise: offload_policy has the wrong type: expected shardwise.OffloadPolicy, got builtins.bool."),
    "reshard": (lambda: fully_shard(TinyMLP(), reshard_after_forward="yes"), OptionTypeError, ""),
    "mesh": (lambda: fully_shard(TinyMLP(), mesh=3), OptionTypeError, ""),
    "mesh_without_names": (
        lambda: fully_shard(TinyMLP(), mesh=init_device_mesh("cpu", (1, 2))), ConfigurationError,
        "shardwise: a mesh of two dims needs names, to tell replicate from shard: expected mesh_dim_names. "
        "Use init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."),
    "mesh_of_three_dims": (
        lambda: fully_shard(TinyMLP(), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=tuple("abc"))),
        ConfigurationError,
        "shardwise: the mesh has a number of dims that cannot be sharded over: expected 1, or 2 for hybrid "
        "sharding, got 3. Slice the mesh: mesh['shard'] or mesh['replicate', 'shard']."),
    "group_and_mesh": (
        lambda: _wrap(TinyMLP(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))),
        ConfigurationError,
        "shardwise: process_group and device_mesh exclude each other: expected one of them, got both. "
        "Pass only device_mesh."),
    "pair_without_hybrid": (
        lambda: _wrap(TinyMLP(), process_group=(dist.group.WORLD, dist.group.WORLD)), ConfigurationError,
        "shardwise: a pair of groups is for hybrid strategies: expected one process group, got a tuple. "
        "Choose ShardingStrategy.HYBRID_SHARD, or pass one group."),
    "hybrid_with_one_group": (
        lambda: _wrap(TinyMLP(), process_group=dist.group.WORLD,
                      sharding_strategy=ShardingStrategy.HYBRID_SHARD), ConfigurationError,
        "shardwise: a hybrid strategy needs two groups: expected process_group=(shard group, replicate "
        "group), got ProcessGroup. Pass a pair, or a device_mesh of two dims."),
    "hybrid_without_groups": (
        lambda: _wrap(TinyMLP(), sharding_strategy=ShardingStrategy.HYBRID_SHARD), ConfigurationError,
        "shardwise: a hybrid strategy needs groups, or an auto_wrap_policy for which they are made: expected "
        "process_group=(shard, replicate), device_mesh, or auto_wrap_policy, got none of them. Pass "
        "device_mesh=init_device_mesh(type, (replicas, shards), mesh_dim_names=('replicate', 'shard'))."),
    "placement": (lambda: fully_shard(TinyMLP(), shard_placement_fn=_placement), ConfigurationError, ""),
    "list_container": (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ConfigurationError,
        "shardwise: fully_shard needs a module with a forward: its parameters are gathered around that: "
        "expected a module that defines forward, got ModuleList. Apply fully_shard to the container's "
        "children, or pass them as a list."),
    "dict_container": (lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ConfigurationError,
        "shardwise: fully_shard needs a module with a forward: its parameters are gathered around that: "
        "expected a module that defines forward, got ModuleDict. Apply fully_shard to the container's "
        "children, or pass them as a list."),
    "ignored_no_module": (lambda: _wrap(TinyMLP(), ignored_modules=[3]), OptionTypeError,
        "shardwise: ignored_modules takes modules: expected nn.Module, got int. Pass an iterable of "
        "nn.Module, or of nn.Parameter as ignored_states."),
    "ignored_both": (lambda: _wrap(TinyMLP(), ignored_modules=[], ignored_states=[]), ConfigurationError,
        "shardwise: ignored_modules and ignored_states exclude each other: expected one of them, got both. "
        "Pass everything as ignored_states."),
    "ignored_mixed": (
        lambda: _wrap(TinyMLP(), ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
        OptionTypeError,
        "shardwise: ignored_states mixes modules and parameters: expected one kind, got both. "
        "Pass only modules, or only parameters."),
}


def _placement(parameter: nn.Parameter) -> None:
    return None


@ranks(2)
def test_every_text() -> None:
    """All the cases of this file; each is a ConfigurationError or a LifecycleError, and both are ours."""
    wrong: list[str] = []
    for name, (build, kind, text) in CASES.items():
        try:
            build()
        except ShardwiseError as error:
            if type(error) is not kind or (text and str(error) != text):
                wrong.append(f"{name}: {type(error).__name__}\n    {error}\n    {text}")
        else:
            wrong.append(f"{name}: nothing was raised")
    assert not wrong, "\n".join(wrong)


@ranks(2)
def test_texts_that_name_objects() -> None:
    """Those with an address or a device in them."""
    expected = {
        "mixed_devices": "some parameters of the unit are on the meta device ('1.weight', '1.bias') and others",
        "reshard": "reshard_after_forward has the wrong type: expected bool, int or None",
        "mesh": "mesh has the wrong type: expected a DeviceMesh, got int.",
        "placement": "shard_placement_fn is not supported: shards are whole rows of dim 0: got <function",
    }
    for name, part in expected.items():
        with pytest.raises(ShardwiseError) as caught:
            CASES[name][0]()
        assert part in str(caught.value)


@ranks(2)
def test_python_sees_the_usual_classes() -> None:
    """A wrong type is a TypeError, a wrong value a ValueError, and everything a RuntimeError."""
    with pytest.raises(TypeError):
        fully_shard(3)
    with pytest.raises(ValueError):
        fully_shard(nn.ModuleList())
    with pytest.raises(RuntimeError):
        _wrap_twice()


@ranks(2)
@pytest.mark.parametrize("build", [fully_shard, _wrap])
def test_a_refused_module_is_unchanged_and_can_still_be_sharded(build: Any, rank: int) -> None:
    """Nothing is left behind: not a hook, not a class, not a sharded parameter."""
    model = TinyMLP()
    kind, hooks = type(model), len(model._forward_pre_hooks)
    saved = model.middle.weight
    model.middle.weight = nn.Parameter(torch.eye(3, 7).to_sparse())
    with pytest.raises(ConfigurationError, match="only dense parameters can be sharded"):
        build(model)
    assert type(model) is kind and len(model._forward_pre_hooks) == hooks
    assert not any(shardwise.is_sharded(p) for p in model.parameters())
    model.middle.weight = saved
    loss(build(model), points(rank, 0)).backward()


def test_no_process_group() -> None:
    """One text for both front ends, in a process that has none."""
    assert not dist.is_initialized()
    for build in (fully_shard, FullyShardedDataParallel):
        with pytest.raises(ConfigurationError) as caught:
            build(TinyMLP())
        assert str(caught.value) == (
            "shardwise: no process group: sharding needs to know the ranks: expected an initialised default "
            "process group, got none. Call torch.distributed.init_process_group() first and start the script "
            "with torchrun.")


@ranks(2)
def test_ignoring_what_makes_no_sense_warns() -> None:
    inner = _wrap(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="ignoring a module that is sharded already has no effect"):
        _wrap(nn.Sequential(inner), ignored_modules=[inner])
    model = TinyMLP()
    with pytest.warns(UserWarning, match="the ignored module is the one being sharded: nothing is left"):
        _wrap(model, ignored_modules=[model])


@ranks(2)
def test_a_reserved_mesh_of_a_foreign_kind() -> None:
    """The same mesh twice is one group; the wrapper takes a mesh or a group, both by name."""
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        assert _wrap(TinyMLP(), device_mesh=mesh).check_is_root()
