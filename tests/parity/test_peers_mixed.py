"""The losses and parameters of torch's own FSDP in mixed precision, bit for bit (2 ranks)."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard
from tests.bed.models import VOCABULARY, OddFeedForward, batch, loss
from tests.bed.parity import assert_same_tensors

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, WIDTH = 5, 21
#: parameters, wire, buffers
POLICIES = {"bf16, fp32 wire": (BF16, FP32, None), "bf16": (BF16, None, None),
            "fp32, bf16 wire": (None, BF16, None), "bf16 buffers": (BF16, FP32, BF16)}


class Regular(nn.Module):
    """Uneven shapes and an own head, without what the peers refuse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), OddFeedForward(33 + 2 * k)) for k in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


NAMES = [name for name, _ in Regular().named_parameters()]
Outcome = tuple[list[float], dict[str, Tensor]]


def _train(model: Any, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            value = loss(model, batch(rank, step)).float()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    return losses


def _options(kind: Any, policy: str, **more: Any) -> Any:
    param, wire, buffer = POLICIES[policy]
    if buffer is not None:
        more["buffer_dtype"] = buffer
    return kind(param_dtype=param, reduce_dtype=wire, **more)


@cache
def _fsdp1(policy: str, rank: int) -> Outcome:
    from torch.distributed import fsdp

    model = Regular()
    arguments = {"use_orig_params": True, "device_id": torch.device("cpu"),
                 "mixed_precision": _options(fsdp.MixedPrecision, policy)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(model.blocks):
            model.blocks[index] = fsdp.FullyShardedDataParallel(block, **arguments)
        wrapped = fsdp.FullyShardedDataParallel(model, **arguments)
        losses = _train(wrapped, rank)
        with fsdp.FullyShardedDataParallel.summon_full_params(wrapped):
            prefix = "_fsdp_wrapped_module."
            values = {n.replace(prefix, ""): p.detach().clone() for n, p in wrapped.named_parameters()}
    return losses, values


@cache
def _fsdp2(policy: str, rank: int) -> Outcome:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    model = Regular()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (*model.blocks, model):
            fsdp.fully_shard(module, mesh=mesh, mp_policy=_options(fsdp.MixedPrecisionPolicy, policy))
        losses = _train(model, rank)
        values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return losses, values


def _ours(front: str, policy: str, rank: int) -> Outcome:
    plain = Regular()
    if front == "fully_shard":
        option = {"mp_policy": _options(shardwise.MixedPrecisionPolicy, policy)}
    else:
        option = {"mixed_precision": _options(shardwise.MixedPrecision, policy)}
    model = shard(plain, front, list(plain.blocks), **option)
    return _train(model, rank), full_parameters(model, NAMES)


CASES = [(front, policy) for front in FRONTS for policy in POLICIES
         if (front, policy) != ("fully_shard", "bf16 buffers")]  # that front end leaves buffers


@ranks(2)
@pytest.mark.parametrize(("front", "policy"), CASES)
def test_U27_bits_of_the_peer(front: str, policy: str, rank: int) -> None:
    losses, values = (_fsdp2 if front == "fully_shard" else _fsdp1)(policy, rank)
    our_losses, our_values = _ours(front, policy, rank)
    assert our_losses == losses
    assert_same_tensors(our_values, values, "parameter", bitwise=True)
