"""U95, C25: what first stopped being finite is named; replicas are compared; the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy
from shardwise.errors import LifecycleError, NumbersError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, over_the_group, shard, unsynced
from tests.bed.models import TinyMLP, points


class _Spoil(torch.autograd.Function):
    """Gives gradients that are ``value``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, ctx.value), None


class Net(TinyMLP):
    """``spoil``: (where, value)."""

    def forward(self, x: Tensor, spoil: tuple[str, float] | None = None) -> Tensor:
        for name in ("inward", "middle", "outward"):
            x = getattr(self, name)(x)
            if spoil and spoil[0] == name:
                x = _Spoil.apply(x, spoil[1])
        return x


def _net(front: str) -> Any:
    net = Net()
    return shard(net, front, [net.inward, net.middle])


def _alike(action: Callable[[], object], world: int) -> str:
    """The text of the ``NumbersError``, the same on every rank."""
    with pytest.raises(NumbersError) as caught:
        action()
    said: list[Any] = [None] * world
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_U95_the_first_gradient_that_is_not_finite(front: str, rank: int, world: int) -> None:
    """On the last rank only, before its gradient is mixed with the others'."""
    model, x, last = _net(front), points(rank, 0)[0], world - 1
    spoil = ("middle", float("nan")) if rank == last else None

    def step() -> None:
        model(x, spoil).sum().backward()

    with shardwise.check_numbers(model):
        text = _alike(step, world)
        assert text.startswith(f"shardwise: the gradient is NaN (parameter 'middle.bias', rank {last})")
        with pytest.warns(RuntimeWarning, match="did not finish"):
            model(x).sum().backward()  # and goes on
    step()  # unchecked again


@ranks(2)
def test_U95_infinite_on_both_and_unsent(rank: int, world: int) -> None:
    model, x = _net("fully_shard"), points(rank, 0)[0]
    with shardwise.check_numbers(model):
        with unsynced(model, "fully_shard"):
            model(x, ("inward", float("inf"))).sum().backward()
        text = _alike(lambda: model(x).sum().backward(), world)
    assert "the gradient is infinite (parameter 'inward.bias', rank 0): got the like on rank 1." in text


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U95_the_first_output_and_the_loss(front: str, rank: int, world: int) -> None:
    model, x = _net(front), points(rank, 0)[0]
    with shardwise.check_numbers(model) as numbers:
        bad = x.clone().fill_(float("nan")) if rank else x
        text = _alike(lambda: model(bad), world)
        assert "the output of module 'inward' is NaN (rank 1)" in text
        loss = model(x).sum()
        numbers.loss(loss)
        assert "the loss is infinite (rank 0)" in _alike(lambda: numbers.loss(loss / (0 if rank == 0 else 1)), world)


@ranks(2)
def test_U95_costs_nothing_outside(rank: int, world: int) -> None:
    with counted() as traffic:
        model, x = _net("fully_shard"), points(rank, 0)[0]
        model(x).sum().backward()
        traffic.clear()
        with shardwise.observe(model, lambda *_: None):
            model(x).sum().backward()
        before = traffic.count()
        with shardwise.check_numbers(model):
            model(x).sum().backward()
        assert traffic.count() == 2 * before + 1 + 3  # one forward, three units
        traffic.clear()
        model(x).sum().backward()
        assert traffic.count() == before


def test_U95_a_model_without_units() -> None:
    with pytest.raises(LifecycleError, match="no sharded units"), shardwise.check_numbers(nn.Linear(2, 2)):
        pass


@ranks(4)
def test_U95_replicas_that_differ(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net: Any = Net()
    for module in (net.middle, net):
        shardwise.fully_shard(module, mesh=mesh)
    assert shardwise.compare_replicas(net) == 6
    with torch.no_grad():
        if rank >= 2 and net.middle.weight.numel():
            net.middle.weight[0, 0] += 1e-7
    texts = []
    try:
        shardwise.compare_replicas(net)
    except NumbersError as error:
        texts.append(str(error))
    if net.middle.weight.numel():
        first = rank % 2
        assert texts[0].startswith("shardwise: replicas of a parameter differ (parameter 'middle.weight'): got other "
                                   f"bits on rank {first + 2} than on rank {first}.")
    dist.barrier()


@ranks(2)
def test_U95_copies_that_differ_and_nothing_to_compare(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(Net(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    assert shardwise.compare_replicas(model) == 6
    with torch.no_grad():
        model.inward.bias[3] = model.inward.bias[3] * -1 if rank else model.inward.bias[3]
    assert "(parameter 'inward.bias'): got other bits on rank 1" in _alike(
        lambda: shardwise.compare_replicas(model), world)
    assert shardwise.compare_replicas(_net("orig")) == 0


@ranks(4)
def test_C25_sums_are_made_in_rank_order(rank: int, world: int) -> None:
    """With copies over gloo, whose all-reduce adds in an order of its own."""
    with over_the_group():
        model = FullyShardedDataParallel(Net(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    plain = Net()
    parts: list[dict[str, Tensor]] = []
    for other in range(world):
        plain.zero_grad()
        plain(points(other, 0)[0]).pow(3).sum().backward()
        parts.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
    with shardwise.deterministic(model):
        assert torch.are_deterministic_algorithms_enabled()
        model(points(rank, 0)[0]).pow(3).sum().backward()
    assert not torch.are_deterministic_algorithms_enabled()
    for name, parameter in model.named_parameters():
        total = parts[0][name].clone()
        for part in parts[1:]:
            total += part[name]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, total / world), name
