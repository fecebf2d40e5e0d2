"""How the libraries that shardwise is measured against shard a model.

``contenders()`` gives them by name, those only that are installed. It is a package of its own
because shardwise itself imports none of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.bench.contenders import Contender, Setup, Trainer, unsent

__all__ = ["contenders"]


def contenders() -> dict[str, Contender]:
    """Name -> contender."""
    found: dict[str, Contender] = {"fsdp1": _fsdp1, "fsdp2": _fsdp2}
    if importlib.util.find_spec("deepspeed") is not None:
        found["deepspeed"] = _DeepSpeed
    return found


def _fsdp1(model: nn.Module, setup: Setup) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mixed = None if setup.compute is None else MixedPrecision(setup.compute, torch.float32)
    strategy = ShardingStrategy.FULL_SHARD if setup.reshard else ShardingStrategy.SHARD_GRAD_OP
    sharded = FullyShardedDataParallel(model, sharding_strategy=strategy, mixed_precision=mixed,
                                       auto_wrap_policy=ModuleWrapPolicy(set(setup.kinds)),
                                       device_id=setup.device, use_orig_params=True)
    return Trainer(sharded, setup, sharded.no_sync)


def _fsdp2(model: nn.Module, setup: Setup) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setup.device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(setup.compute, None if setup.compute is None else torch.float32)
    for module in setup.blocks(model):
        fully_shard(module, mesh=mesh, mp_policy=policy,
                    reshard_after_forward=setup.reshard and (module is not model or None))
    return Trainer(model, setup, partial(unsent, model))


class _DeepSpeed(Trainer):
    """ZeRO stage 3. Not seen to run where this was written; the engine is made at the first step."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.module, self._setup, self._engine = model, setup, None

    def step(self, batches: Sequence[tuple[Any, ...]]) -> Tensor:
        engine = self._engine or self._start(len(batches))
        total = torch.zeros((), device=self._setup.device)
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        return total

    def _start(self, batches: int) -> Any:
        import deepspeed

        first = next(iter(self.module.parameters()))
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": batches,
            "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self._setup.compute is torch.bfloat16},
        }
        self._engine, *_ = deepspeed.initialize(model=self.module.to(first.device), config=config,
                                                optimizer=self._setup.optimizer(self.module))
        return self._engine
