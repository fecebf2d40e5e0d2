"""The models that are timed, and how each contender shards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.bench.gpt import GPT, Block

__all__ = ["CONTENDERS", "GPT", "Block", "Tiny", "TinyBlock"]


class TinyBlock(nn.Module):
    """Six parameters and next to no arithmetic: what is left is the host's work."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(self.n(x))))


class Tiny(nn.Sequential):
    """Many tiny units."""

    def __init__(self, blocks: int = 64, width: int = 16) -> None:
        super().__init__(*[TinyBlock(width) for _ in range(blocks)])


def _shard_each(shard: Callable[..., Any], model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, kind) and module is not model:
            shard(module)
    shard(model)
    return model


def _local(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    return model


def _ddp(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({kind}), use_orig_params=True,
                                    device_id=torch.device("cpu"))


def _fsdp2(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return _shard_each(fully_shard, model, kind)


def _wrapper(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    from shardwise import FullyShardedDataParallel
    from shardwise.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({kind}), use_orig_params=True)


def _composable(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    from shardwise import fully_shard

    return _shard_each(fully_shard, model, kind)


#: name -> how it shards a model whose units are of a class
CONTENDERS: dict[str, Callable[[nn.Module, type[nn.Module]], nn.Module]] = {
    "local": _local,
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "wrapper": _wrapper,
    "fully_shard": _composable,
}
