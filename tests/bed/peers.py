"""Torch's own data-parallel classes, made ready to be compared with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ddp", "fsdp1", "fsdp2"]


@contextmanager
def _harmless() -> Iterator[None]:
    """What torch does to the process and says besides is undone."""
    with patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ddp(model: nn.Module, **arguments: object) -> DistributedDataParallel:
    """DDP that leaves buffers to their ranks. What it does to the process besides is undone."""
    with _harmless():  # the argument has another name from torch 2.13 on
        return DistributedDataParallel(model, broadcast_buffers=False, **arguments)


def fsdp1(model: nn.Module, inner: Sequence[nn.Module], strategy: str, flat: bool) -> nn.Module:
    """Torch's wrapper around ``inner`` and ``model``."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": not flat,
                 "device_id": torch.device("cpu")}
    places = {module: name for name, module in model.named_modules()}
    with _harmless():
        for module in inner:
            parent, _, name = places[module].rpartition(".")
            setattr(model.get_submodule(parent), name, FullyShardedDataParallel(module, **arguments))
        return FullyShardedDataParallel(model, **arguments)


def fsdp2(model: nn.Module, inner: Sequence[nn.Module], reshard_after_forward: bool | None) -> nn.Module:
    """Torch's composable sharding of ``inner`` and ``model``, on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with _harmless():
        for module in (*inner, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model
