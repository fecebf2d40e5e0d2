"""Optimizer state by name: equal to the unsharded optimizer's, for any optimizer and any front end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from shardwise.checkpoint import ShardedRecord, get_optimizer_state_dict
from shardwise.errors import CheckpointError, OptionTypeError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

F = FullyShardedDataParallel
FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT,
                        StateDictType.LOCAL_STATE_DICT)
Make = Callable[[Any], torch.optim.Optimizer]


class Factored(torch.optim.Optimizer):
    """Keeps a mean for each row and one for each column, numbers, None, and a 0-d tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.5, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                square = p.grad.as_subclass(Tensor).square()
                if p.dim() >= 2:
                    columns = square.mean(0) if square.shape[0] else square.new_zeros(square.shape[1:])
                    state["row"], state["column"] = square.mean(dim=-1), columns
                else:
                    state["square"] = square
                state["count"] = state.get("count", 0) + 1
                state["nothing"], state["rate"], state["scale"] = None, 0.25, torch.tensor(0.5)
                p.sub_(p.grad, alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "plain": lambda ps: torch.optim.SGD(ps, lr=1e-2),
}


class Pair:
    """A plain model that sees all ranks' data, and its sharded twin."""

    def __init__(self, front: str, make: Make, rank: int, world: int, build: Any = TinyMLP) -> None:
        self.plain, twin = build(), build()
        self.model = shard(twin, front, [twin.middle])
        self.make, self.rank, self.world = make, rank, world
        self.optimizers = [make(self.plain.parameters()), make(self.model.parameters())]

    def train(self, steps: range) -> None:
        for step in steps:
            torch.stack([loss(self.plain, points(r, step)) for r in range(self.world)]).mean().backward()
            loss(self.model, points(self.rank, step)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def expected(self) -> dict[str, Any]:
        """The plain optimizer's state by name."""
        return F.rekey_optim_state_dict(copy.deepcopy(self.optimizers[0].state_dict()),
                                        OptimStateKeyType.PARAM_NAME, self.plain, optim=self.optimizers[0])

    def state(self, kind: StateDictType = FULL, config: Any = None) -> dict[str, Any]:
        with F.state_dict_type(self.model, kind, None, config):
            return F.optim_state_dict(self.model, self.optimizers[1])


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], **tolerance: Any) -> None:
    """Names, kinds and values."""
    assert list(found) == list(expected)
    for fqn, values in expected.items():
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        assert set(found[fqn]) == set(values)
        if tensors:
            assert_same_tensors({name: found[fqn][name] for name in tensors}, tensors, fqn, **tolerance)
        assert all(found[fqn][name] == values[name] for name in values if name not in tensors)


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {fqn: {name: v.full_tensor() if isinstance(v, ShardedRecord) else v for name, v in values.items()}
            for fqn, values in state.items()}


@ranks(2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("front", FRONTS)
def test_equals_the_unsharded_optimizers(front: str, kind: str, rank: int, world: int) -> None:
    """U74, U76, A27: full and sharded, keyed by clean names, with all options of the groups."""
    pair = Pair(front, OPTIMIZERS[kind], rank, world)
    pair.train(range(3))
    expected = pair.expected()
    for state in (pair.state(), pair.state(SHARDED)):
        assert_same_state(gathered(state["state"]), expected["state"], rtol=1e-4, atol=1e-6)
        named = [name for group in state["param_groups"] for name in group["params"]]
        assert named == [name for name, _ in pair.plain.named_parameters()]
        options = {k: v for k, v in state["param_groups"][0].items() if k != "params"}
        assert options == {k: v for k, v in expected["param_groups"][0].items() if k != "params"}


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_state_of_other_shapes(front: str, rank: int, world: int) -> None:
    """Factored state: rows by rows; columns are one value out of all ranks'; the rest as it is."""
    pair = Pair(front, Factored, rank, world)
    pair.train(range(2))
    state, expected = pair.state()["state"], pair.expected()["state"]
    assert_same_state(state, expected, rtol=1e-4, atol=1e-7)
    records = pair.state(SHARDED)["state"]["inward.weight"]
    assert isinstance(records["row"], ShardedRecord) and not isinstance(records["column"], ShardedRecord)
    fresh = Pair(front, Factored, rank, world)
    for given in (pair.state(), pair.state(SHARDED)):
        with F.state_dict_type(fresh.model, FULL):
            fresh.optimizers[1].load_state_dict(
                F.optim_state_dict_to_load(fresh.model, fresh.optimizers[1], given))
        assert_same_state(fresh.state()["state"], state, bitwise=True)
    parameter = next(iter(fresh.model.parameters()))
    assert fresh.optimizers[1].state[parameter]["row"].shape == parameter.shape[:1]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_settings(front: str, rank: int, world: int) -> None:
    """U71: on the host by default; ``rank0_only``; a local state loads into the same layout."""
    pair = Pair(front, OPTIMIZERS["adam"], rank, world)
    pair.train(range(1))
    only = pair.state(FULL, FullOptimStateDictConfig(rank0_only=True))
    assert bool(only) == (rank == 0)
    local = pair.state(LOCAL)
    fresh = Pair(front, OPTIMIZERS["adam"], rank, world)
    with F.state_dict_type(fresh.model, LOCAL):
        F.optim_state_dict_to_load(fresh.model, fresh.optimizers[1], local, load_directly=True)
    assert_same_state(fresh.state()["state"], pair.state()["state"], bitwise=True)
    with F.state_dict_type(fresh.model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        loaded = F.optim_state_dict_to_load(fresh.model, fresh.optimizers[1], only)
    fresh.optimizers[1].load_state_dict(loaded)
    assert_same_state(fresh.state()["state"], pair.state()["state"], bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_the_older_calls(front: str, rank: int, world: int) -> None:
    """full_, sharded_, scatter_full_, shard_full_ and flatten_sharded_; a deprecated argument warns."""
    pair = Pair(front, OPTIMIZERS["adam"], rank, world)
    pair.train(range(2))
    model, optimizer = pair.model, pair.optimizers[1]
    full = F.full_optim_state_dict(model, optimizer)
    assert bool(full) == (rank == 0)
    everywhere = F.full_optim_state_dict(model, optimizer, rank0_only=False)
    records = F.sharded_optim_state_dict(model, optimizer)
    results = [F.scatter_full_optim_state_dict(full or None, model, optim=optimizer),
               F.shard_full_optim_state_dict(everywhere, model, optim=optimizer),
               F.flatten_sharded_optim_state_dict(records, model, optimizer)]
    with pytest.warns(FutureWarning, match="optim_input is deprecated"):
        results.append(F.shard_full_optim_state_dict(everywhere, model, list(model.parameters())))
    expected = pair.state()["state"]
    for result in results:
        fresh = Pair(front, OPTIMIZERS["adam"], rank, world)
        fresh.optimizers[1].load_state_dict(result)
        assert_same_state(fresh.state()["state"], expected, bitwise=True)
    with warnings.catch_warnings(), pytest.raises(OptionTypeError, match="optim_input has the wrong type"):
        warnings.simplefilter("ignore")
        F.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, model, [3])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_names_and_ids(front: str, rank: int, world: int) -> None:
    """Sharded and unsharded runs swap their states."""
    pair = Pair(front, OPTIMIZERS["adam"], rank, world)
    pair.train(range(2))
    by_id = F.rekey_optim_state_dict(pair.state(), OptimStateKeyType.PARAM_ID, pair.plain,
                                     optim=pair.optimizers[0])
    taken = OPTIMIZERS["adam"](pair.plain.parameters())
    taken.load_state_dict(by_id)
    assert_same_tensors({str(i): taken.state[p]["exp_avg"] for i, p in enumerate(pair.plain.parameters())},
                        {str(i): pair.optimizers[0].state[p]["exp_avg"]
                         for i, p in enumerate(pair.plain.parameters())}, rtol=1e-4)
    fresh = Pair(front, OPTIMIZERS["adam"], rank, world)
    with F.state_dict_type(fresh.model, FULL):
        F.optim_state_dict_to_load(fresh.model, fresh.optimizers[1], pair.expected(), load_directly=True)
    assert_same_state(fresh.state()["state"], pair.expected()["state"], bitwise=True)
    with F.state_dict_type(fresh.model, FULL), pytest.raises(
            CheckpointError, match=r"names 6 parameters.*Use rekey_optim_state_dict"):
        F.optim_state_dict_to_load(fresh.model, fresh.optimizers[1], by_id)
    with pytest.raises(CheckpointError, match="are not in this optimizer"):
        F.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_ID, pair.plain, optim=pair.optimizers[0])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_before_the_first_step(front: str, rank: int, world: int) -> None:
    """An empty state saves and loads; the template for reading into leaves the optimizer as it was."""
    pair = Pair(front, OPTIMIZERS["adam"], rank, world)
    assert pair.state()["state"] == {}
    with F.state_dict_type(pair.model, FULL):
        F.optim_state_dict_to_load(pair.model, pair.optimizers[1], pair.state(), load_directly=True)
    before = [p.detach().clone() for p in pair.model.parameters()]
    template = get_optimizer_state_dict(pair.model, pair.optimizers[1])
    assert {float(v["step"]) for v in template["state"].values()} == {0.0}
    assert len(template["state"]) == 6 and not pair.optimizers[1].state
    assert all(torch.equal(a, b) for a, b in zip(before, pair.model.parameters(), strict=True))
    assert all(p.grad is None for p in pair.model.parameters())


@ranks(2)
def test_another_set_of_parameters_on_a_rank(rank: int) -> None:
    """Found by all ranks, with the name."""
    model = shard(TinyMLP(), "orig")
    chosen = [p for n, p in model.named_parameters() if rank == 0 or n != "middle.bias"]
    with F.state_dict_type(model, FULL), pytest.raises(
            CheckpointError, match=r"optimizers of the ranks hold different parameters.*middle.bias"):
        F.optim_state_dict(model, torch.optim.SGD(chosen, lr=0.1, momentum=0.9))
    foreign = nn.Parameter(torch.zeros(2))
    with F.state_dict_type(model, FULL), pytest.raises(CheckpointError, match="not a parameter of the model"):
        F.optim_state_dict(model, torch.optim.SGD([foreign], lr=0.1))


