"""Who trains: both front ends, DDP, and what the package of peers or the user adds.

A contender is a function of a model and a ``Setup`` that gives a ``Trainer``. Those of other
libraries are not part of this package, which imports none of what it replaces: they are named
and looked up (see ``docs/design/005-peers-in-the-benchmark.md``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from ..errors import ConfigurationError
from ..wrap import ModuleWrapPolicy
from .workload import Batch, named_object

__all__ = ["OWN", "PEERS", "Contender", "Setup", "Trainer", "contenders_for", "lacking_peers", "unsent"]

#: the module that knows the peers; installed with the library, beside it
PEERS = "shardwise_peers"


@dataclass(frozen=True)
class Setup:
    """What all contenders have in common."""

    kinds: tuple[type[nn.Module], ...]  #: classes whose modules are units
    device: torch.device
    compute: torch.dtype | None = None  #: the dtype of forward and backward (None: as stored)
    reshard: bool = True  #: free parameters after forward (False: after backward)
    learning_rate: float = 1e-3

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of every contender."""
        return torch.optim.AdamW(module.parameters(), lr=self.learning_rate, foreach=True)

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules to shard, the root last."""
        yield from (m for m in model.modules() if isinstance(m, self.kinds) and m is not model)
        yield model


class Trainer:
    """A sharded model and its optimizer. ``unsent()``: a context in which gradients stay on the rank."""

    def __init__(self, module: nn.Module, setup: Setup,
                 unsent: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.module, self._unsent = module, unsent
        self._optimizer = setup.optimizer(module)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over the mean of ``batches``; the mean loss, on this rank."""
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with self._unsent() if number < len(batches) else nullcontext():
                loss = self.module(*batch) / len(batches)
                loss.backward()
            total = total + loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.as_tensor(total)


Contender = Callable[[nn.Module, Setup], Trainer]


def _wrapper(model: nn.Module, setup: Setup) -> Trainer:
    mixed = None if setup.compute is None else MixedPrecision(setup.compute, torch.float32)
    strategy = ShardingStrategy.FULL_SHARD if setup.reshard else ShardingStrategy.SHARD_GRAD_OP
    if dist.get_world_size() == 1:
        strategy = ShardingStrategy.NO_SHARD
    sharded = FullyShardedDataParallel(model, sharding_strategy=strategy, mixed_precision=mixed,
                                       auto_wrap_policy=ModuleWrapPolicy(set(setup.kinds)),
                                       device_id=setup.device, use_orig_params=True)
    return Trainer(sharded, setup, sharded.no_sync)


def _composable(model: nn.Module, setup: Setup) -> Trainer:
    policy = MixedPrecisionPolicy(setup.compute, None if setup.compute is None else torch.float32)
    for module in setup.blocks(model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=setup.reshard and (module is not model or None))

    return Trainer(model, setup, partial(unsent, model))


@contextmanager
def unsent(model: Any) -> Iterator[None]:
    """Inside, gradients of ``model``, an ``FSDPModule`` of any library, add up on each rank."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _ddp(model: nn.Module, setup: Setup) -> Trainer:
    replica = nn.parallel.DistributedDataParallel(_Autocast(model, setup))
    return Trainer(replica, setup, replica.no_sync)


class _Autocast(nn.Module):
    """Mixed precision as it is done without sharding."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.model, self._device, self._dtype = model, setup.device.type, setup.compute

    def forward(self, *batch: object) -> Tensor:
        with torch.autocast(self._device, self._dtype, enabled=self._dtype is not None):
            return self.model(*batch)


#: the contenders that this package has itself
OWN: dict[str, Contender] = {"ddp": _ddp, "wrapper": _wrapper, "fully_shard": _composable}


def contenders_for(names: Sequence[str], extra: Sequence[str] = ()) -> dict[str, Contender]:
    """The contenders ``names`` (empty: all), then ``extra``, each ``name=module:function``.

    Raises ``ConfigurationError`` where one is unknown, or its library is not installed.
    """
    known = OWN | _peers()
    chosen = {name: known[name] for name in names or known if name in known}
    if missing := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"no contender of this name: {', '.join(missing)}", expected=f"some of {', '.join(known)}",
            remedy=f"Peers come from the module {PEERS}; or name your own with --contender name=module:function.")
    for pair in extra:
        name, _, place = pair.partition("=")
        chosen[name] = named_object(place)
    return chosen


def lacking_peers() -> str:
    """What to say where the module of the peers is not there; empty where it is."""
    if importlib.util.find_spec(PEERS) is not None:
        return ""
    return (f"FSDP1, FSDP2 and DeepSpeed are left out: there is no module {PEERS}. It is a package in shardwise's "
            "repository and is installed with it: pip install, or PYTHONPATH, from there.")


def _peers() -> dict[str, Contender]:
    try:
        return importlib.import_module(PEERS).contenders()
    except ModuleNotFoundError as error:
        if error.name != PEERS:
            raise
        return {}
