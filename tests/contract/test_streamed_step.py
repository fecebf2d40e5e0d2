"""The optimizer's step on the device over parameters and state on the host (rows U38, U42)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise import CPUOffload, CPUOffloadPolicy
from shardwise.errors import ConfigurationError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points, three_groups
from tests.bed.parity import assert_same_tensors

_CPU = torch.device("cpu")


def _offloaded(front: str, seed: int = 0) -> Any:
    model = OddTransformer(blocks=1, seed=seed)
    if front == "fully_shard":
        return shard(model, front, model.units(), offload_policy=CPUOffloadPolicy())
    return shard(model, front, model.units(), cpu_offload=CPUOffload(offload_params=True))


def _groups(model: Any, front: str) -> Any:
    return [p for p in model.parameters() if p.requires_grad] if front == "flat" else three_groups(model)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_U42_equal_to_a_step_on_the_host(front: str, kind: Any, rank: int) -> None:
    """Bit for bit over three steps, in buckets; memory, state and gradients are where they were."""
    names = [name for name, _ in OddTransformer(blocks=1).named_parameters()]
    models = [_offloaded(front) for _ in range(2)]
    optimizers = [kind(_groups(model, front), lr=0.01) for model in models]
    calls: list[int] = []
    optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    trained = [p for p in models[0].parameters() if p.requires_grad]
    for step in range(3):
        for model in models:
            loss(model, batch(rank, step)).backward()
        places = [p.data_ptr() for p in trained]
        gradients = [p.grad for p in trained]
        shardwise.streamed_step(optimizers[0], _CPU, bucket_bytes=3_000)
        optimizers[1].step()
        assert places == [p.data_ptr() for p in trained]
        assert all(p.grad is gradient for p, gradient in zip(trained, gradients, strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert len(calls) > 3 * 2
    assert_same_tensors(full_parameters(models[0], names), full_parameters(models[1], names), bitwise=True)


@ranks(2)
def test_U38_state_alone_on_the_host(rank: int) -> None:
    """State that was made by a streamed step stays where it was put, and is the same object from step to step."""
    model, twin = (shard(TinyMLP(), "fully_shard") for _ in range(2))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]
    kept: list[int] = []
    for step in range(2):
        for one in (model, twin):
            loss(one, points(rank, step)).backward()
        shardwise.streamed_step(optimizers[0], state_device=_CPU, bucket_bytes=100)
        optimizers[1].step()
        kept.append(optimizers[0].state[model.inward.weight]["exp_avg"].data_ptr())
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert kept[0] == kept[1]
    names = [name for name, _ in TinyMLP().named_parameters()]
    assert_same_tensors(full_parameters(model, names), full_parameters(twin, names), bitwise=True)


@ranks(2)
def test_U42_an_exception_leaves_later_buckets_alone(rank: int) -> None:
    """Everything is at home, gradients included; the next step works."""
    model = shard(TinyMLP(), "fully_shard", offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, points(rank, 0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shardwise.streamed_step(optimizer, _CPU, bucket_bytes=1)
    handle.remove()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value) and parameter.grad is not None
    shardwise.streamed_step(optimizer)
    assert any(not torch.equal(p.detach(), value) for p, value in zip(model.parameters(), before, strict=True))
    with pytest.raises(ConfigurationError, match="at least one byte"):
        shardwise.streamed_step(optimizer, bucket_bytes=0)
