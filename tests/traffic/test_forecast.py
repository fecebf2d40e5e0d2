"""What is said before sharding is what is measured after it (rows C15, U93, U96)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import MixedPrecisionPolicy, wrap
from shardwise.errors import ConfigurationError, LifecycleError
from tests.bed import ranks
from tests.bed.fronts import counted, units
from tests.bed.models import OddBlock, OddFeedForward, OddTransformer, TinyMLP, batch, loss

_POLICIES: dict[str, Any] = {
    "one": None, "blocks": wrap.ModuleWrapPolicy({OddBlock}),
    "nested": wrap.ModuleWrapPolicy({OddBlock, OddFeedForward}),
}
_PRECISION = {"plain": None, "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
              "wire": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def _sharded(policy: Any, **arguments: Any) -> Any:
    model = OddTransformer(blocks=2)
    chosen = [] if policy is None else [m for m in (*model.units(), model) if isinstance(m, tuple(policy._classes))]
    for module in (*chosen, model):
        shardwise.fully_shard(module, **arguments)
    return model


def _check(said: shardwise.Forecast, model: Any, rank: int, traffic: Any) -> None:
    """One step in steady state against what was said."""
    loss(model, batch(rank, 0)).backward()
    model.zero_grad()
    traffic.clear()
    seen = 0

    def tell(event: str, unit: str, nbytes: int, _: int) -> None:
        nonlocal seen
        seen = max(seen, shardwise.memory_of(model).gathered)

    with shardwise.observe(model, tell):
        loss(model, batch(rank, 1)).backward()
    assert (traffic.count("all_gather"), traffic.count("reduce_scatter")) == (said.gathers, said.reductions)
    assert traffic.wire_bytes("all_gather") == said.gather_traffic
    assert traffic.wire_bytes("reduce_scatter") == said.reduce_traffic
    memory = shardwise.memory_of(model)
    assert memory.shards == sum(unit.shard for unit in said.units)
    assert memory.gradients == sum(unit.gradients for unit in said.units)
    largest = max(unit.gathered for unit in said.units)
    assert largest <= seen <= said.gathered_peak


@ranks(2)
@pytest.mark.parametrize("policy", list(_POLICIES))
@pytest.mark.parametrize("precision", list(_PRECISION))
@pytest.mark.parametrize("reshard", [None, True, False])
def test_C15_what_is_said_is_what_is_measured(policy: str, precision: str, reshard: bool | None, rank: int) -> None:
    """Bytes at rest, in use, of gradients and on the wire; numbers of collectives; exactly."""
    how = {"mp_policy": _PRECISION[precision], "reshard_after_forward": reshard}
    said = shardwise.forecast(OddTransformer(blocks=2), 2, units=_POLICIES[policy], **how)
    with counted() as traffic:
        model = _sharded(_POLICIES[policy], **how)
        _check(said, model, rank, traffic)
    planned = shardwise.plan_of(model)
    assert sorted(u.shard_bytes for u in planned.units) == sorted(u.shard for u in said.units)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    state = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.dim())
    padding = sum(u.optimizer for u in said.units) - state
    assert 0 <= padding < 0.2 * state + 4096


@ranks(4)
def test_C15_hybrid_and_groups(rank: int) -> None:
    """Two replicas of two shards, and units by execution order."""
    groups = shardwise.group_by_execution(OddTransformer(blocks=2), batch(0, 0)[0], unit_bytes=9_000)
    said = shardwise.forecast(OddTransformer(blocks=2), 2, units=groups, replicas=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with counted() as traffic:
        model = shardwise.fully_shard(OddTransformer(blocks=2), mesh=mesh, groups=groups)
        _check(said, model, rank, traffic)
    agreement = 2  # who used which parameter, over both dims
    assert traffic.count("all_reduce") == said.reductions + agreement
    assert said.replica_traffic <= traffic.wire_bytes("all_reduce") < said.replica_traffic + 2000
    assert len(units(model)) == len(said.units)


def test_C15_a_large_world_on_meta() -> None:
    """No process group, no memory: thousands of ranks for a model that exists nowhere."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096))
                                for _ in range(4)))
    said = shardwise.forecast(model, 1024, units=wrap.ModuleWrapPolicy({nn.Sequential}),
                              mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    whole = sum(p.numel() for p in model.parameters())
    assert 4 * whole / 1024 <= sum(u.shard for u in said.units) < 4.6 * whole / 1024
    assert said.gathers == 8 and said.reductions == 4 and len(said.units) == 5
    text = str(said)
    assert "on each of 1024 ranks" in text and "8 gathers" in text and "without activations" in text
    alone = shardwise.forecast(TinyMLP(), 1)
    assert alone.gathers == alone.reductions == alone.gathered_peak == 0 and alone.gather_traffic == 0


@ranks(2)
def test_C15_refusals(rank: int) -> None:
    """A sharded model has a plan already; a group has ranks."""
    with pytest.raises(ConfigurationError, match=r"at least one rank.*got \(0, 1\)"):
        shardwise.forecast(TinyMLP(), 0)
    with pytest.raises(LifecycleError, match=r"sharded already.*plan_of"):
        shardwise.forecast(shardwise.fully_shard(TinyMLP()), 2)
