"""The three ways to shard, under one name each, and whole values read back from any of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy
from shardwise.comm import mesh
from shardwise.comm.choose import collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.comm.lanes import lanes_for
from shardwise.engine.build import units_below
from shardwise.engine.unit import Unit
from shardwise.storage.flat_storage import FLAT
from shardwise.storage.sharded_parameter import home_of
from shardwise.storage.whole_value import gather_one
from tests.bed.traffic import CountingCollectives, Traffic

__all__ = ["FRONTS", "WRAPPERS", "counted", "full_gradients", "full_parameters", "on_streams", "over_the_group",
           "shard", "transport", "units", "unsynced"]

#: the wrapper with original parameters, the wrapper with flat ones, and the composable front end
FRONTS = ("orig", "flat", "fully_shard")
WRAPPERS = ("orig", "flat")
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "DEFAULT": None}


def on_streams() -> bool:
    """Is the order of an accelerator's streams kept, as the recording lanes do it?"""
    return not lanes_for(torch.device("cpu")).immediate


def shard(
    model: nn.Module, front: str, inner: Sequence[nn.Module] = (), strategy: str = "DEFAULT", **arguments: Any
) -> nn.Module:
    """Shard the modules ``inner`` (deepest first) and then ``model``; gives what to call from now on.

    ``strategy`` is the name of a strategy; ``fully_shard`` takes it as ``reshard_after_forward``.
    """
    if front == "fully_shard":
        for module in (*inner, model):
            shardwise.fully_shard(module, reshard_after_forward=_RESHARD[strategy], **arguments)
        return model
    chosen = ShardingStrategy.FULL_SHARD if strategy == "DEFAULT" else ShardingStrategy[strategy]
    arguments = {"sharding_strategy": chosen, "use_orig_params": front == "orig"} | arguments
    places = {module: name for name, module in model.named_modules()}
    for module in inner:
        parent, _, name = places[module].rpartition(".")
        with _one_rank_is_fine():
            setattr(_inside(model.get_submodule(parent)), name, FullyShardedDataParallel(module, **arguments))
    with _one_rank_is_fine():
        return FullyShardedDataParallel(model, **arguments)


def _inside(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, FullyShardedDataParallel) else module


@contextmanager
def _one_rank_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the group has one rank")
        yield


@contextmanager
def unsynced(model: Any, front: str, quiet: bool = True) -> Iterator[None]:
    """Backward passes inside add gradients up unsent, unless ``quiet`` is False."""
    if front == "fully_shard":
        model.set_requires_gradient_sync(not quiet)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
        return
    with model.no_sync() if quiet else nullcontext():
        yield


def units(model: nn.Module) -> dict[str, Unit]:
    """The units at and below ``model``, by name."""
    return dict(units_below(model))


# ---------------------------------------------------------------------- whole values
def full_parameters(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Whole values of the parameters ``names``, gathered on every rank, whatever the front end shows."""
    return {name: _gathered(_of(model, name), lambda p: p.detach()) for name in names}


def full_gradients(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor | None]:
    """The same for their gradients; None where there is none."""
    return {name: _gradient(_of(model, name)) for name in names}


def _of(model: nn.Module, name: str) -> nn.Parameter:
    path, _, local = name.rpartition(".")
    return getattr(model.get_submodule(path), local)


def _gathered(parameter: nn.Parameter, local: Callable[[nn.Parameter], Tensor]) -> Tensor:
    home = home_of(parameter)
    if home is None:
        return local(parameter).clone()
    storage, index = home
    return gather_one(storage, index, local(parameter).as_subclass(Tensor))


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    home = home_of(parameter)
    if home is not None and home[0].hidden and home[1] != FLAT:
        storage, index = home
        flat = storage.visible[0].parameter.grad
        return None if flat is None else storage.pick(storage.gather_flat(flat.as_subclass(Tensor)), index)
    return None if parameter.grad is None else _gathered(parameter, lambda p: p.grad)


# ---------------------------------------------------------------------- transports
@contextmanager
def over_the_group() -> Iterator[None]:
    """Models sharded inside talk through their process group, not through shared memory."""
    with _transports(lambda group, device: collectives_for(group, device, shared_memory=False)):
        yield


@contextmanager
def counted(*, overlaps: bool | None = None) -> Iterator[Traffic]:
    """The collectives of models sharded inside are noted. ``overlaps`` overrides the transport's."""
    traffic, made = Traffic(), dict[Collectives, CountingCollectives]()

    def counting(group: dist.ProcessGroup, device: torch.device) -> Collectives:
        transport = collectives_for(group, device)
        if transport not in made:
            made[transport] = CountingCollectives(transport, traffic)
            made[transport].overlaps = transport.overlaps if overlaps is None else overlaps
        return made[transport]

    with _transports(counting):
        yield traffic


def transport(name: str) -> Any:
    """``shared`` memory or the process ``group``, as a context."""
    return over_the_group() if name == "group" else nullcontext()


@contextmanager
def _transports(make: Callable[[dist.ProcessGroup, torch.device], Collectives]) -> Iterator[None]:
    def replacement(group: dist.ProcessGroup, device: torch.device, **_: Any) -> Collectives:
        return make(group, device)

    with patch.object(mesh, "collectives_for", replacement):
        yield
