"""Gradients that the user assigns, and hooks on parameters that a flat one stands for (A19, A25, C10, C28)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy, summon_full_params
from shardwise.errors import WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard, transport
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

fronts = pytest.mark.parametrize("front", FRONTS)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_C10_an_assigned_gradient_counts_on_all_ranks(front: str, rank: int) -> None:
    """``p.grad = torch.ones_like(p)``: torch's norm and clipping are those of the whole; the object stays."""
    model, plain = shard(TinyMLP(), front), TinyMLP()
    for one in (model, plain):
        for parameter in one.parameters():
            gradient = torch.ones_like(parameter.detach())
            parameter.grad = gradient
            assert parameter.grad is gradient
    gradients, expected = ([p.grad for p in one.parameters()] for one in (model, plain))
    torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients), torch.nn.utils.get_total_norm(expected))
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (model, plain)]
    torch.testing.assert_close(*norms)
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), dict(plain.named_parameters()))
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
def test_C28_hooks_behind_a_flat_parameter_fire(rank: int) -> None:
    """Made before wrapping; they see this rank's rows of the reduced gradient and may change it."""
    plain, twin = TinyMLP(), TinyMLP()
    seen: list[Tensor] = []
    after: list[Tensor] = []
    for model in (plain, twin):
        weight = model.middle.weight
        weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    wrapped = FullyShardedDataParallel(twin, use_orig_params=False)
    torch.stack([loss(plain, points(one, 0)) for one in range(2)]).mean().backward()
    whole, seen[:] = seen[0], []
    after.clear()
    loss(wrapped, points(rank, 0)).backward()
    assert len(seen) == len(after) == 1
    assert seen[0].shape == twin.middle.weight.shape and torch.equal(after[0], 2 * seen[0])
    total = torch.tensor(float(seen[0].square().sum()))
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.square().sum())
    assert twin.middle.weight.grad is None
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    for optimizer in optimizers:
        optimizer.step()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(wrapped, names), dict(plain.named_parameters()))


@ranks(2)
def test_C28_a_hook_behind_a_flat_parameter_that_changes_the_shape(rank: int) -> None:
    """Refused by name."""
    model = TinyMLP()
    model.middle.weight.register_hook(lambda gradient: torch.zeros(1, 1, 1))
    wrapped = FullyShardedDataParallel(model, use_orig_params=False)
    with pytest.raises(WritebackError, match=r"gave back a gradient of another shape.*'middle.weight'"):
        loss(wrapped, points(rank, 0)).backward()


@ranks(2)
@fronts
@pytest.mark.parametrize("over", ["shared", "group"])
def test_A19_a_rank_that_errs_alone(front: str, over: str, rank: int) -> None:
    """It raises before any collective, so the other one is just waited for, over either transport."""
    with transport(over):
        model: Any = shard(TinyMLP(), front)
    model(points(rank, 0)[0])
    if rank == 1:
        kept = model.inward.weight.data
        model.inward.weight.data = torch.zeros(2, 2)
        with pytest.raises(WritebackError, match="Cannot writeback"):
            model(points(rank, 0)[0])
        model.inward.weight.data = kept
    assert model(points(rank, 0)[0]).shape == (4, 1)


@ranks(4)
@fronts
@pytest.mark.parametrize("rank0_only", [False, True])
def test_A25_summon_on_a_hybrid_mesh(front: str, rank0_only: bool, rank: int) -> None:
    """Whole values and gradients on 2 x 2 ranks; edits reach the rows of all replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin, plain = TinyMLP(), TinyMLP()
    if front == "fully_shard":
        model: Any = shardwise.fully_shard(twin, mesh=mesh)
    else:
        model = FullyShardedDataParallel(twin, device_mesh=mesh, use_orig_params=front == "orig",
                                         sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    loss(model, points(rank, 0)).backward()
    torch.stack([loss(plain, points(one, 0)) for one in range(4)]).mean().backward()
    with summon_full_params(model, rank0_only=rank0_only, with_grads=True):
        if rank == 0 or not rank0_only:
            for (name, ours), (_, theirs) in zip(twin.named_parameters(), plain.named_parameters(), strict=True):
                assert torch.equal(ours, theirs), name
                torch.testing.assert_close(ours.grad, theirs.grad)
                with torch.no_grad():
                    ours.mul_(2)
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), {n: 2 * p for n, p in plain.named_parameters()}, bitwise=True)
    dist.barrier()
    assert isinstance(twin, nn.Module)
