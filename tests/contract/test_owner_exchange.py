"""Whole matrices on owner ranks in one batched exchange; Muon (rows C7, U97, U98)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import FullyShardedDataParallel, OwnerExchange, ShardingStrategy
from shardwise.comm.choose import collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.errors import ConfigurationError, ShardwiseError
from tests.bed import ranks
from tests.bed.fronts import counted, full_parameters, shard, transport
from tests.bed.models import OddTransformer, TinyMLP, batch, concatenated, loss, points
from tests.bed.pages import script_of
from tests.bed.parity import assert_same_tensors

visible = pytest.mark.parametrize("front", ["orig", "fully_shard"])


def _muon() -> Any:
    """The optimizer that the page on whole matrices shows."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(script_of("docs/whole-matrices.md").split("torch.manual_seed")[0], "page", "exec"), names)
    return names["Muon"]


def _plain_step(parameters: list[nn.Parameter], momenta: dict[nn.Parameter, Tensor], orthogonalised: Any) -> None:
    """Muon without anything sharded."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                momentum = momenta.setdefault(parameter, torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad)
                parameter.add_(orthogonalised(parameter.grad.add(momentum, alpha=0.95)), alpha=-0.02)


@ranks(2, 4)
@visible
@pytest.mark.parametrize("over", ["shared", "group"])
def test_C7_muon_equals_the_unsharded_one(front: str, over: str, rank: int, world: int) -> None:
    """Three steps on a transformer with tied, frozen and convolution weights; uneven rows."""
    muon = _muon()
    orthogonalised = muon.step.__wrapped__.__globals__["orthogonalised"]
    plain, twin = OddTransformer(blocks=1, batch_norm=False), OddTransformer(blocks=1, batch_norm=False)
    with transport(over):
        model = shard(twin, front, twin.units())
    matrices = [n for n, p in plain.named_parameters() if p.dim() >= 2 and p.requires_grad]
    optimizer = muon([dict(model.named_parameters())[name] for name in matrices])
    momenta: dict[nn.Parameter, Tensor] = {}
    for step in range(3):
        loss(model, batch(rank, step)).backward()
        loss(plain, concatenated(world, step)).backward()
        optimizer.step()
        _plain_step([dict(plain.named_parameters())[name] for name in matrices], momenta, orthogonalised)
        optimizer.zero_grad()
        plain.zero_grad()
        assert_same_tensors(full_parameters(model, matrices),
                            {n: dict(plain.named_parameters())[n] for n in matrices}, rtol=1e-3, atol=1e-4)


@ranks(2)
def test_C7_two_exchanges_for_any_number_of_matrices(rank: int) -> None:
    """Nothing is gathered; each rank sends what others own and no more."""
    with counted() as traffic:
        model = shard(OddTransformer(blocks=2), "fully_shard", [])
        loss(model, batch(rank, 0)).backward()
        matrices = [p for p in model.parameters() if len(p.global_shape) >= 2 and p.grad is not None]
        optimizer = _muon()(matrices)
        traffic.clear()
        optimizer.step()
    assert len(matrices) > 8 and traffic.operations == ["all_to_all", "all_to_all"]
    owners = [optimizer.exchanges[0].owner_of(p) for p in matrices]
    work = [sum(min(p.global_shape[0], p.global_shape[1]) ** 2 * max(p.global_shape[0], p.global_shape[1])
                for p, owner in zip(matrices, owners, strict=True) if owner == one) for one in range(2)]
    assert max(work) < 1.5 * min(work)


@ranks(2, 4)
@visible
@pytest.mark.parametrize("over", ["shared", "group"])
def test_C7_every_matrix_is_worked_on_once_and_comes_back(front: str, over: str, rank: int, world: int) -> None:
    """Whole values, in any order of ranks; what is left out stays out; 0-d and 1-d ones too."""
    plain = OddTransformer(blocks=1)
    with transport(over):
        model = shard(OddTransformer(blocks=1), front)
    named = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    names = {p: n for n, p in named.items()}
    exchange = OwnerExchange(named.values())
    rows = {p: p.detach().clone() for n, p in named.items() if "widen" not in n}
    seen: list[str] = []

    def doubled(parameter: nn.Parameter, whole: Tensor) -> Tensor:
        seen.append(names[parameter])
        assert torch.equal(whole, plain.get_parameter(names[parameter]))
        return 2 * whole

    results = exchange.apply(rows, doubled)
    assert set(results) == set(rows) and all(torch.equal(results[p], 2 * rows[p]) for p in rows)
    assert sorted(seen) == sorted(names[p] for p in rows if exchange.owner_of(p) == rank)
    assert all(exchange.owner_of(p) in range(world) for p in rows)
    assert exchange.apply({}, doubled) == {}


@ranks(2, 4)
@pytest.mark.parametrize("shared", [True, False])
def test_C7_slots_of_any_size_reach_their_ranks(shared: bool, rank: int, world: int) -> None:
    """The transports' own exchange and the one that any transport has: rank r sends s + r elements to rank s."""
    group = dist.group.WORLD
    assert group is not None
    comm = collectives_for(group, torch.device("cpu"), shared_memory=shared)
    sent, received = [to + rank for to in range(world)], [rank + source for source in range(world)]
    full = torch.cat([torch.full((count,), 10.0 * rank + to) for to, count in enumerate(sent)])
    expected = torch.cat([torch.full((count,), 10.0 * source + rank) for source, count in enumerate(received)])
    for exchange in (comm.all_to_all, partial(Collectives.all_to_all, comm)):
        out = torch.empty(sum(received))
        exchange(out, full, received, sent).wait()
        assert torch.equal(out, expected)


@ranks(2)
def test_C7_what_is_not_sharded_is_worked_on_everywhere(rank: int) -> None:
    """No traffic for replicated parameters; hybrid groups and one-rank groups alike."""
    with counted() as traffic:
        model = FullyShardedDataParallel(TinyMLP(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
        exchange = OwnerExchange(model.parameters())
        loss(model, points(rank, 0)).backward()
        traffic.clear()
        rows = {p: p.grad for p in model.parameters()}
        results = exchange.apply(rows, lambda parameter, whole: -whole)
    assert traffic.operations == [] and all(torch.equal(results[p], -rows[p]) for p in rows)
    assert exchange.owner_of(next(iter(rows))) is None


@ranks(2)
def test_C7_refusals(rank: int) -> None:
    """Flat parameters have no matrices; one dtype in one exchange; a result keeps its shape."""
    flat = FullyShardedDataParallel(TinyMLP(), use_orig_params=False)
    with pytest.raises(ConfigurationError, match=r"flat parameter has no matrices.*Pass use_orig_params=True"):
        OwnerExchange(flat.parameters())
    model = shardwise.fully_shard(TinyMLP())
    exchange = OwnerExchange(model.parameters())
    rows = {p: p.detach() for p in model.parameters()}
    with pytest.raises(ShardwiseError, match=r"one dtype.*torch.float32, torch.float64"):
        exchange.apply(rows | {model.inward.weight: model.inward.weight.detach().double()}, lambda p, whole: whole)
    with pytest.raises(ShardwiseError, match=r"another shape.*got \(1,\)"):
        exchange.scatter({p: torch.ones(1) for p in rows}, rows)
