"""The losses of torch's own FSDP, bit for bit, where it supports the case (2 ranks, fp32)."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import shard
from tests.bed.models import VOCABULARY, OddFeedForward, batch, loss
from tests.bed.peers import fsdp1, fsdp2

STEPS = 6
WIDTH = 21
PEERS = {"orig": "fsdp1", "flat": "fsdp1_flat", "fully_shard": "fsdp2"}


class Regular(nn.Module):
    """Uneven shapes and a tied head, without what the peers refuse (0-d, integers, several dtypes)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), OddFeedForward(33 + 2 * k)) for k in range(3))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.last(x))


def _losses(model: Any, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            value = loss(model, batch(rank, step))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    return losses


@cache
def _peer(name: str, strategy: str, rank: int) -> list[float]:
    model = Regular()
    if name == "fsdp2":
        return _losses(fsdp2(model, list(model.blocks), strategy == "FULL_SHARD"), rank)
    return _losses(fsdp1(model, list(model.blocks), strategy, flat=name == "fsdp1_flat"), rank)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("front", PEERS)
def test_losses_of_the_peer(front: str, strategy: str, rank: int) -> None:
    """FSDP1 with original and with flat parameters, FSDP2."""
    if (front, strategy) == ("fully_shard", "NO_SHARD"):
        pytest.skip("fully_shard has no such choice")
    model = Regular()
    ours = _losses(shard(model, front, list(model.blocks), strategy), rank)
    assert ours == _peer(PEERS[front], strategy, rank)
