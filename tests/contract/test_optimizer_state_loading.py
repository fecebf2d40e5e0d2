"""Optimizer state put into another wrapping, another number of ranks, or an optimizer that lacks some of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import FullyShardedDataParallel, StateDictType
from shardwise.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, first_ranks, odd, over, train
from tests.bed.fronts import FRONTS, WRAPPERS, shard
from tests.bed.models import OddTransformer, TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

F = FullyShardedDataParallel
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
WHOLE = StateDictOptions(full_state_dict=True)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, whatever the order."""
    assert set(found) == set(expected)
    for fqn, values in expected.items():
        assert_same_tensors(sorted(found[fqn].items()), sorted(values.items()), fqn, bitwise=True)


@ranks(2)
@pytest.mark.parametrize("into", FRONTS)
@pytest.mark.parametrize("front", FRONTS)
def test_another_wrapping(front: str, into: str, rank: int) -> None:
    """A transformer with tied, frozen, integer and 0-d parameters; then both train on alike."""
    source = odd(front, seed=2)
    optimizer = torch.optim.AdamW([p for p in source.parameters() if p.requires_grad], lr=1e-2)
    train(source, optimizer, rank, range(2))
    with F.state_dict_type(source, SHARDED):
        records = F.optim_state_dict(source, optimizer)
    whole = get_state_dict(source, optimizer, options=WHOLE)
    twin = OddTransformer(seed=2, blocks=2)
    with torch.no_grad():
        twin.last.weight.zero_()
    model = shard(twin, into, [twin.blocks[0]])
    other = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with F.state_dict_type(model, SHARDED):
        F.optim_state_dict_to_load(model, other, records, load_directly=True)
    assert_same_state(whole_state(model, other), whole[1]["state"])
    other.state.clear()
    set_state_dict(model, other, model_state_dict=whole[0], optim_state_dict=whole[1])
    assert_same_state(whole_state(model, other), whole[1]["state"])
    again = [train(m, o, rank, range(2, 3)) for m, o in ((source, optimizer), (model, other))]
    assert again[0] == pytest.approx(again[1])


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_half_the_ranks_and_an_unsharded_model(front: str, rank: int, world: int) -> None:
    """Full state cut for another group size, and for a plain optimizer."""
    source = odd(front, seed=2)
    optimizer = adamw(source)
    train(source, optimizer, rank, range(1))
    whole = get_optimizer_state_dict(source, optimizer, options=WHOLE)
    group = first_ranks(2, world)
    if rank < 2:
        model = odd(front, seed=2, **over(front, group))
        other = adamw(model)
        set_optimizer_state_dict(model, other, whole, options=WHOLE)
        assert_same_state(whole_state(model, other), whole["state"])
    plain = OddTransformer(blocks=2)
    alone = adamw(plain)
    set_optimizer_state_dict(plain, alone, whole)
    assert_same_state(get_optimizer_state_dict(plain, alone)["state"], whole["state"])


class Heads(nn.Module):
    """Two heads, one of which is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.used, self.unused = nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(torch.tanh(self.trunk(x)))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_parameters_without_state(front: str, rank: int) -> None:
    """Never used, frozen later and thawed again, added later: what there is is kept, the rest stays empty."""
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        twin = Heads()
        model = shard(twin, front, [twin.trunk, twin.used, twin.unused])
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        optimizer.zero_grad()
        value = loss(model, points(rank, number))
        value.backward()
        optimizer.step()
        return value.item()

    model, optimizer = build()
    step(model, optimizer, 0)
    model.trunk.requires_grad_(False)
    step(model, optimizer, 1)
    whole = get_state_dict(model, optimizer, options=WHOLE)
    assert set(whole[1]["state"]) == {"trunk.weight", "trunk.bias", "used.weight", "used.bias"}
    assert {float(v["step"]) for k, v in whole[1]["state"].items() if "trunk" in k} == {1.0}
    fresh, other = build()
    set_state_dict(fresh, other, model_state_dict=whole[0], optim_state_dict=whole[1])
    fresh.trunk.requires_grad_(False)
    for one in (model, fresh):
        one.trunk.requires_grad_(True)
    assert step(model, optimizer, 2) == step(fresh, other, 2)
    assert_same_state(whole_state(fresh, other), whole_state(model, optimizer))
    step(model, optimizer, 3)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_groups_and_several_optimizers(front: str, rank: int) -> None:
    """Options come from the group that a parameter was in; each optimizer takes its part; flat dicts too."""
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        twin = TinyMLP()
        model = shard(twin, front, [twin.middle])
        inward, rest = list(twin.inward.parameters()), [*twin.middle.parameters(), *twin.outward.parameters()]
        return model, [torch.optim.Adam(inward, lr=0.3),
                       torch.optim.SGD([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.5}], lr=0.1,
                                       momentum=0.9)]

    model, optimizers = build()
    loss(model, points(rank, 0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    optimizers[1].param_groups[0]["lr"] = 0.7
    state = get_optimizer_state_dict(model, optimizers, options=WHOLE)
    flat = get_optimizer_state_dict(model, optimizers, options=StateDictOptions(
        full_state_dict=True, flatten_optimizer_state_dict=True))
    assert "state.middle.weight.momentum_buffer" in flat and flat["param_groups.middle.weight.lr"] == 0.7
    for given in (state, flat):
        fresh, others = build()
        set_optimizer_state_dict(fresh, others, given, options=WHOLE)
        found = get_optimizer_state_dict(fresh, others, options=WHOLE)
        assert_same_state(found["state"], state["state"])
        assert [g["lr"] for g in found["param_groups"]] == [0.3, 0.7, 0.5]
    only = {"state": state["state"]}
    fresh, others = build()
    set_optimizer_state_dict(fresh, others, only, options=WHOLE)
    assert [g["lr"] for o in others for g in o.param_groups] == [0.3, 0.1, 0.5]


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_unsharded_strategy_and_plain_parts(front: str, rank: int) -> None:
    """NO_SHARD, and parameters outside of any unit."""
    twin = TinyMLP()
    twin.middle = shard(twin.middle, front, strategy="NO_SHARD")
    twin.outward = shard(twin.outward, front)
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-2)
    loss(twin, points(0, 0)).backward()
    optimizer.step()
    plain = TinyMLP()
    expected = torch.optim.Adam(plain.parameters(), lr=1e-2)
    loss(plain, points(0, 0)).backward()
    expected.step()
    with F.state_dict_type(twin, FULL):
        state = F.optim_state_dict(twin, optimizer)["state"]
        given = F.optim_state_dict(twin, optimizer, optimizer.state_dict())["state"]
    names = dict(plain.named_parameters())
    assert set(state) == set(names)
    for name, parameter in names.items():
        assert torch.allclose(state[name]["exp_avg"], expected.state[parameter]["exp_avg"], atol=1e-7)
        assert torch.equal(given[name]["exp_avg"], state[name]["exp_avg"])
    fresh = torch.optim.Adam(twin.parameters(), lr=1e-2)
    set_optimizer_state_dict(twin, fresh, {"state": state, "param_groups": []})
    assert_same_state(whole_state(twin, fresh), state)


@ranks(2)
def test_one_flat_parameter_takes_one_count(rank: int) -> None:
    """State that differs behind one flat parameter is refused with both names."""
    source, model = shard(TinyMLP(), "orig"), shard(TinyMLP(), "flat")
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (source, model)]
    loss(source, points(rank, 0)).backward()
    optimizers[0].step()
    state = get_optimizer_state_dict(source, optimizers[0], options=WHOLE)
    set_optimizer_state_dict(model, optimizers[1], state, options=WHOLE)
    state["state"]["middle.bias"]["step"] += 1
    with pytest.raises(CheckpointError, match=r"differ in 'step'.*middle.bias.*inward.weight"):
        set_optimizer_state_dict(model, optimizers[1], state, options=WHOLE)
    state["state"]["nobody"] = {}
    with pytest.raises(CheckpointError, match=r"names 1 parameters that the model does not have.*nobody"):
        set_optimizer_state_dict(model, optimizers[1], state, options=WHOLE)
    with pytest.raises(CheckpointError, match="this is no optimizer state dict"):
        set_optimizer_state_dict(model, optimizers[1], {"weights": 1}, options=WHOLE)
