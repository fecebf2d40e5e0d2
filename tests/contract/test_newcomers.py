"""Parameters and modules that are added after sharding (row U26)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwise
from shardwise import FullyShardedDataParallel, MixedPrecisionPolicy
from shardwise.errors import ConfigurationError, DivergenceError, LifecycleError
from tests.bed import ranks
from tests.bed.fronts import counted, full_gradients, full_parameters, shard, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

fronts = pytest.mark.parametrize("front", ["orig", "fully_shard"])


class Adapted(nn.Module):
    """A layer with a low-rank addition and a buffer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.linspace(-1, 1, 3 * 7).view(3, 7))
        self.up = nn.Parameter(torch.linspace(1, -1, 9).view(3, 3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up * self.scale


def _add(model: Any) -> None:
    """A module in place of another one, and a parameter that a hook uses."""
    model.middle = Adapted(model.middle)
    outward = _inner(model.outward)  # a hook of the wrapper itself would run outside of the unit
    outward.register_parameter("gain", nn.Parameter(torch.tensor([1.5])))
    outward.register_forward_pre_hook(lambda module, args: (args[0] * module.gain,))


def _inner(model: Any) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _run(model: Any, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    torch.stack([loss(model, one) for one in data]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
@fronts
@pytest.mark.parametrize("inner", [False, True])
def test_U26_what_is_added_trains_as_a_member(front: str, inner: bool, rank: int, world: int) -> None:
    """Bit for bit as the unsharded model to which the same was added; the objects stay the user's."""
    plain, twin = TinyMLP(), TinyMLP()
    model = shard(twin, front, [twin.outward] if inner else [])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    data = [points(one, 0) for one in range(world)]
    _run(plain, optimizers[0], data)
    _run(model, optimizers[1], data[rank : rank + 1])
    for bare, optimizer in ((plain, optimizers[0]), (_inner(model), optimizers[1])):
        before = set(bare.parameters())
        _add(bare)
        optimizer.add_param_group({"params": [p for p in bare.parameters() if p not in before]})
    added = _inner(model).middle.down
    for step in (1, 2):
        data = [points(one, step) for one in range(world)]
        _run(plain, optimizers[0], data)
        _run(model, optimizers[1], data[rank : rank + 1])
    assert _inner(model).middle.down is added and shardwise.is_sharded(added)
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), dict(plain.named_parameters()))
    assert [name for name, _ in model.named_parameters()] == names


@ranks(2)
@fronts
def test_U26_state_dicts_follow(front: str, rank: int) -> None:
    """Before the first forward they hold what was added as it is; after it, as any other member."""
    model = shard(TinyMLP(), front)
    _add(_inner(model))
    plain = TinyMLP()
    _add(plain)
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    loss(model, points(rank, 0)).backward()
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(doubled)
    state = model.state_dict()
    assert list(state) == list(doubled)
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, shardwise.ShardedParameter) else value
        got = full_parameters(model, [name])[name] if name in dict(plain.named_parameters()) else whole
        assert torch.equal(got, doubled[name]), name
    copied = copy.deepcopy(model)
    assert torch.equal(loss(copied, points(rank, 1)), loss(model, points(rank, 1)))


@ranks(2)
def test_U26_one_gather_and_one_reduction_still(rank: int) -> None:
    """What is added travels with its unit; frozen and low-precision parts too."""
    with counted() as traffic:
        model = shardwise.fully_shard(TinyMLP(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        loss(model, points(rank, 0)).backward()
        _add(model)
        model.middle.up.requires_grad_(False)
        loss(model, points(rank, 1)).backward()
        traffic.clear()
        loss(model, points(rank, 2)).backward()
    assert traffic.count("all_gather") == 1 and traffic.count("reduce_scatter") == 1
    assert model.middle.down.grad is not None and model.middle.up.grad is None
    with shardwise.full_precision(model):
        assert loss(model, points(rank, 2)).dtype is torch.float32


@ranks(2)
def test_U26_added_between_accumulated_steps(rank: int, world: int) -> None:
    """Unsent gradients of the old members are not lost, and nobody waits for the new one's."""
    plain, model = TinyMLP(), shardwise.fully_shard(TinyMLP())
    with unsynced(model, "fully_shard"):
        loss(model, points(rank, 0)).backward()
    torch.stack([loss(plain, points(one, 0)) for one in range(world)]).mean().backward()
    for bare in (plain, model):
        _add(bare)
    loss(model, points(rank, 1)).backward()
    torch.stack([loss(plain, points(one, 1)) for one in range(world)]).mean().backward()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(full_gradients(model, [name])[name], theirs[name])
    assert model.inward.weight.grad is not None


@ranks(2)
def test_U26_added_on_one_rank_only_is_an_error_everywhere(rank: int) -> None:
    """The ranks' shards would not fit; each of them says so."""
    model = shardwise.fully_shard(TinyMLP())
    if rank == 0:
        model.register_parameter("late", nn.Parameter(torch.ones(4096)))
    with pytest.raises(DivergenceError, match="ranks disagree on the size"):
        model(points(rank, 0)[0])


@ranks(2)
def test_U26_what_is_added_is_guarded_at_rest(rank: int) -> None:
    """A hook that runs when its unit is freed already sees rows: refused, as for any member."""
    model = TinyMLP()
    shardwise.fully_shard(model.outward)
    shardwise.fully_shard(model)
    model.outward.register_parameter("gain", nn.Parameter(torch.tensor([1.5])))
    model.outward.register_forward_hook(lambda module, _, output: output * module.gain)
    with pytest.raises(LifecycleError, match=r"outside of its unit's forward.*'gain'"):
        model(points(rank, 0)[0])


@ranks(2)
def test_U26_U24_a_tensor_made_of_tensors_is_refused_by_name(rank: int) -> None:
    """At construction and later; left whole on every rank it may stay."""
    model = TinyMLP()
    model.middle.weight = nn.Parameter(TwoTensor(torch.ones(3, 7), torch.ones(3, 7)))
    with pytest.raises(ConfigurationError, match=r"no rows in one memory.*'middle.weight'.*got TwoTensor.*ignored"):
        shardwise.fully_shard(model)
    shardwise.fully_shard(model, ignored_params={model.middle.weight})
    assert type(model.middle.weight) is TwoTensor and shardwise.is_sharded(model.inward.weight)


@ranks(2)
def test_U26_ignored_parameters_stay_ignored(rank: int) -> None:
    """Looking for what was added does not take in what was left out."""
    plain = TinyMLP()
    model = shardwise.fully_shard(plain, ignored_params=set(plain.middle.parameters()))
    model.register_parameter("late", nn.Parameter(torch.ones(3)))
    model(points(rank, 0)[0])
    assert shardwise.is_sharded(model.late) and not shardwise.is_sharded(model.middle.weight)
