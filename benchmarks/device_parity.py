"""Sharded on one rank, on the device: the same numbers as the module itself, bit for bit.

Stored fp32 and bf16, mixed precision (fp32 shards, bf16 in use), and frozen fp8 weights, whose
bytes must come through a gather as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.models import TinyBlock
from shardwise import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from shardwise.wrap import ModuleWrapPolicy

__all__ = ["Frozen8", "Net", "gathered_bytes_are_kept", "parity", "train"]

Verdict = dict[str, float | bool]


class Net(nn.Module):
    """A few blocks and a head."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Frozen8(nn.Module):
    """A frozen fp8 weight, and a trained bias behind it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(torch.float32) + self.bias


def train(forward: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], batch: Tensor,
          steps: int = 4) -> list[float]:
    """Losses of a few steps on ``batch``."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        loss = forward(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _sharded(model: Net, front: str, policy: MixedPrecisionPolicy | None) -> nn.Module:
    if front == "wrapper":
        strategy = ShardingStrategy.NO_SHARD if dist.get_world_size() == 1 else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(model, sharding_strategy=strategy, use_orig_params=True,
                                        auto_wrap_policy=ModuleWrapPolicy({TinyBlock}))
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def _compared(expected: list[float], got: list[float], plain: nn.Module, sharded: nn.Module) -> Verdict:
    pairs = list(zip(plain.parameters(), sharded.parameters(), strict=True))
    worst = max(float((a.detach().float() - b.detach().float()).abs().max()) for a, b in pairs)
    return {"bitwise": expected == got and worst == 0.0, "loss": got[-1],
            "largest_difference": max(worst, *(abs(a - b) for a, b in zip(expected, got, strict=True)))}


def parity(device: torch.device) -> dict[str, Verdict]:
    """Each precision and front end on one rank, against the module that is not sharded."""
    found: dict[str, Verdict] = {}
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        for front in ("wrapper", "fully_shard"):
            plain = Net().to(device, dtype)
            sharded = _sharded(copy.deepcopy(plain), front, None)
            expected = train(plain, list(plain.parameters()), batch.to(dtype))
            got = train(sharded, list(sharded.parameters()), batch.to(dtype))
            found[f"{front} {_name(dtype)}"] = _compared(expected, got, plain, sharded)
    found["fully_shard mixed"] = _mixed(device, batch)
    found["fp8 bytes"] = {"bitwise": gathered_bytes_are_kept(device)}
    return found


def _mixed(device: torch.device, batch: Tensor) -> Verdict:
    plain = Net().to(device)
    sharded = _sharded(copy.deepcopy(plain), "fully_shard", MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def forward(x: Tensor) -> Tensor:
        cast = {name: p.to(torch.bfloat16) for name, p in plain.named_parameters()}
        return functional_call(plain, cast, (x.to(torch.bfloat16),))

    expected = train(forward, list(plain.parameters()), batch)
    got = train(sharded, list(sharded.parameters()), batch)
    return _compared(expected, got, plain, sharded)


def gathered_bytes_are_kept(device: torch.device) -> bool:
    """Is a frozen fp8 weight gathered as it was, in forward and by ``full_tensor``? All ranks call it."""
    torch.manual_seed(5)
    model = Frozen8().to(device)
    whole, seen = model.weight.detach().clone().view(torch.uint8), list[Tensor]()
    fully_shard(model)
    inner = model.forward
    model.forward = lambda x: (seen.append(model.weight.detach().view(torch.uint8).clone()), inner(x))[1]
    model(torch.ones(2, whole.shape[0], device=device)).sum().backward()
    found = model.weight
    full = found.full_tensor() if dist.get_world_size() > 1 else found
    return torch.equal(seen[0], whole) and torch.equal(full.detach().view(torch.uint8), whole) and (
        model.bias.grad is not None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
