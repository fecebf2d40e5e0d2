"""Models, optimizers and groups for tests of checkpoint files."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint.model_tensors import clean_name
from tests.bed.fronts import full_parameters, shard
from tests.bed.models import OddTransformer, batch, loss

__all__ = ["adamw", "assert_alike", "first_ranks", "odd", "over", "train", "values"]

# The first optimizer of a process sets environment variables for the compiler; no test is to blame.
torch.optim.SGD([torch.zeros(1)])


@functools.cache
def first_ranks(count: int, world: int) -> dist.ProcessGroup:
    """The group of the first ``count`` of ``world`` ranks. Every rank must call it."""
    group = dist.new_group(list(range(count)), backend="gloo")
    assert group is not None
    return group  # type: ignore[return-value]


def over(front: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """The arguments with which ``shard`` shards over ``group``."""
    if front == "fully_shard":
        return {"mesh": DeviceMesh.from_group(group, "cpu")}
    return {"process_group": group}


def odd(front: str, *, seed: int = 0, blank: bool = False, **arguments: Any) -> nn.Module:
    """The odd transformer in nested units; ``blank`` leaves no value of it that a checkpoint holds."""
    model = OddTransformer(seed=seed, blocks=2)
    if blank:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
    return shard(model, front, model.units(), **arguments)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Two groups where parameters are original ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    split = [{"params": trained[::2], "lr": 3e-3}, {"params": trained[1::2], "weight_decay": 0.2}]
    return torch.optim.AdamW([group for group in split if group["params"]], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, batch(rank, step))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    """Full values of all that a checkpoint should hold, by the names of the unwrapped model."""
    bare = OddTransformer(blocks=2)
    named = full_parameters(model, [name for name, _ in bare.named_parameters()])
    buffers = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    saved = bare.state_dict()
    return named | {name: buffers[name].clone() for name, _ in bare.named_buffers() if name in saved}


def assert_alike(mine: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    """Bit for bit the same on this rank: rows, buffers, and all that the optimizers hold."""
    for one, two in zip(*(_tensors(model) for model, _ in (mine, other)), strict=True):
        assert torch.equal(one, two)
    for first, second in zip(*(optimizer.param_groups for _, optimizer in (mine, other)), strict=True):
        assert {k: v for k, v in first.items() if k != "params"} == {k: v for k, v in second.items() if k != "params"}
        for p, q in zip(first["params"], second["params"], strict=True):
            states = mine[1].state.get(p, {}), other[1].state.get(q, {})
            assert states[0].keys() == states[1].keys()
            for key, value in states[0].items():
                found = states[1][key]
                assert torch.equal(value, found) and value.dtype == found.dtype if isinstance(value, Tensor) \
                    else value == found


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().as_subclass(Tensor) for tensor in (*model.parameters(), *model.buffers())]
