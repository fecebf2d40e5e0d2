"""On shared memory a reduction reads the peers' buffers where they lie: nothing is copied before."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import shardwise
from shardwise.comm.shared_memory import SharedMemoryCollectives
from tests.bed import ranks


@ranks(2)
def test_no_gradient_is_copied_before_it_is_reduced(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)], nn.Linear(64, 8))
    for module in (*list(model)[:3], model):
        shardwise.fully_shard(module)
    staged: list[int] = []
    original = SharedMemoryCollectives._staged

    def counted(self: SharedMemoryCollectives, tensor: torch.Tensor, *private: Any) -> Any:
        staged.append(tensor.numel())
        return original(self, tensor, *private)

    with patch.object(SharedMemoryCollectives, "_staged", counted):
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            model.zero_grad()
    assert max(staged, default=0) < 64, "only words between the ranks may be copied"
    assert shardwise.memory_of(model).unsent == 0
