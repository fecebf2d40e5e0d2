"""``full_tensor()`` of a parameter: its value, and a gradient for it (rows U10, C27)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, shard
from tests.bed.parity import assert_same_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inward, self.conv = nn.Linear(3, 5), nn.Conv1d(1, 2, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.rand(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.tanh(self.inward(x))[:, None]).sum() * self.scale


def _data(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U10_a_penalty_on_whole_values(front: str, rank: int, world: int) -> None:
    """As in the loss of an unsharded model; a parameter that only the penalty uses as well."""
    plain = Net()
    model: Any = shard(copy.deepcopy(plain), front, [])
    for step in range(2):
        loss = sum(plain(_data(r + 2 * step)) for r in range(world)) / world
        (loss + sum(p.square().sum() * 0.1 for p in plain.parameters())).backward()
        (model(_data(rank + 2 * step)) + sum(p.full_tensor().square().sum() * 0.1
                                             for p in model.parameters())).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)
    ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))


@ranks(2)
def test_U10_without_grad_mode_there_is_no_history(rank: int) -> None:
    model: Any = shardwise.fully_shard(Net())
    with torch.no_grad():
        assert not model.inward.weight.full_tensor().requires_grad
    model.inward.weight.requires_grad_(False)
    assert not model.inward.weight.full_tensor().requires_grad
    assert model.inward.bias.full_tensor().requires_grad
