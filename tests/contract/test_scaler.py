"""Gradient scalers: all ranks skip a step, or none (row U62; A29 for gradients in fp16)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardedGradScaler
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins


def _spoil(model: nn.Module) -> None:
    """An infinity among the gradients of the calling rank."""
    next(p.grad for p in model.parameters() if p.grad.numel()).view(-1)[0] = math.inf


@ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_U62_an_infinity_on_one_rank_skips_the_step_on_all(
    front: str, offload: bool, rank: int, world: int
) -> None:
    arguments: dict[str, Any] = {}
    if offload:
        arguments = ({"offload_policy": CPUOffloadPolicy()} if front == "fully_shard"
                     else {"cpu_offload": CPUOffload(True)})
    twins = Twins(TinyMLP, front, (rank, world), **arguments)
    scaler = ShardedGradScaler("cpu", init_scale=16.0, backoff_factor=0.25, growth_factor=4.0,
                               growth_interval=2)
    scales = []
    for step, bad in enumerate((False, True, False, False)):
        scaler.scale(twins.run(twins.model, rank, step)).backward()
        for r in range(world):
            (twins.run(twins.plain, r, step) / world).backward()
        if bad and rank == 0:
            _spoil(twins.model)
        scaler.unscale_(twins.optimizers[1])
        if not bad:
            twins.check_gradients()
            twins.optimizers[0].step()
        assert scaler.step(twins.optimizers[1]) is None
        scaler.update()
        scales.append(scaler.get_scale())
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
        twins.check_parameters()
    assert scales == [16.0, 4.0, 4.0, 16.0]


@ranks(2)
def test_U62_gradients_that_shardwise_does_not_shard(rank: int) -> None:
    """An ignored parameter's gradient stays local, and torch's scaler would disagree about it."""
    model: Any = TinyMLP()
    model = shard(model, "orig", ignored_states=[model.outward.weight])
    optimizer = torch.optim.SGD([model.outward.weight], lr=0.1)
    before = model.outward.weight.detach().clone()
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    scaler.scale(loss(model, points(rank, 0))).backward()
    if rank == 0:
        model.outward.weight.grad[0, 0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.outward.weight, before) and scaler.get_scale() == 8.0


@ranks(2)
def test_U62_a_rank_without_gradients_takes_part(rank: int) -> None:
    lonely = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([lonely], lr=1.0), ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if rank == 0:
        lonely.grad = torch.full((3,), math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(lonely, torch.ones(3)) and scaler.get_scale() == 2.0


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "flat"])
def test_A29_U62_gradients_kept_in_fp16(front: str, rank: int) -> None:
    """torch's scaler refuses them."""
    precision = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
    model = shard(TinyMLP(), front, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    loss(model, points(rank, 0)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scaler.scale(loss(model, points(rank, 0))).backward()
    scaler.unscale_(optimizer)
    for parameter, unscaled in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype is torch.float16
        torch.testing.assert_close(parameter.grad.as_subclass(Tensor), unscaled.as_subclass(Tensor),
                                   rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match="FP16"):
        other = torch.amp.GradScaler("cpu")
        other.scale(torch.ones(()))
        other.unscale_(optimizer)


class _Outputs(NamedTuple):
    loss: Tensor
    parts: list[Tensor]


@ranks(2)
def test_scale_takes_containers(rank: int) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    one, two = torch.ones(()), torch.full((2,), 2.0)
    scaled = scaler.scale({"pair": _Outputs(one, [two, one]), "tuple": (two,)})
    assert scaled["pair"].loss == 8.0 and scaled["pair"].parts[1] == 8.0
    assert isinstance(scaled["pair"], _Outputs) and torch.equal(scaled["tuple"][0], torch.full((2,), 16.0))
    assert scaler.scale([one])[0] == 8.0 and scaler.scale(one) == 8.0


@ranks(2)
def test_a_group_of_its_own_and_a_scaler_that_is_off(rank: int, world: int) -> None:
    alone, _ = torch.distributed.new_subgroups(1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=alone)
    parameter = nn.Parameter(torch.ones(2))
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full((2,), math.inf if rank else 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if rank else 4.0)
    off = ShardedGradScaler("cpu", enabled=False)
    assert off.scale([parameter])[0] is parameter and off.get_scale() == 1.0
    restored = ShardedGradScaler("cpu")
    restored.load_state_dict(scaler.state_dict())
    assert restored.get_scale() == scaler.get_scale()


def test_a_scaler_needs_a_process_group() -> None:
    with pytest.raises(shardwise.errors.ConfigurationError, match="no process group"):
        ShardedGradScaler("cpu")
