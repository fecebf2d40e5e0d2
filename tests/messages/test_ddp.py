"""``DistributedDataParallel`` around a sharded model is refused at construction (row A28)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise.errors import ConfigurationError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.peers import ddp


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("inside", [False, True])
def test_A28_ddp_around_a_sharded_model(rank: int, world: int, front: str, inside: bool) -> None:
    """Noticed before it sends anything, on one rank alone too: torch would broadcast one rank's rows, and wait."""
    plain = TinyMLP()
    sharded: Any = shard(plain.middle if inside else plain, front)
    if inside:
        plain.middle = sharded
    model = plain if inside else sharded
    if rank == 0:
        with pytest.raises(ConfigurationError) as refused:
            ddp(model)
        for part in ("DistributedDataParallel around a sharded model", "expected an unsharded model",
                     "Call the sharded model itself", "two-dimensional mesh"):
            assert part in str(refused.value)
    loss(model, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A28_ddp_that_leaves_the_sharded_part_alone(rank: int, world: int, front: str) -> None:
    plain = TinyMLP()
    plain.middle = shard(plain.middle, front)  # type: ignore[assignment]
    names = [name for name, _ in plain.named_parameters() if name.startswith("middle.")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)
    loss(ddp(plain), points(rank, 0)).backward()
    assert plain.inward.weight.grad is not None
