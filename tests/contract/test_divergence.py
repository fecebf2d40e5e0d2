"""C8, U94: ranks that do different things all raise the same error, which names unit and ranks.

Nothing here waits: the error comes with the collective that would have mixed or hung.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
from shardwise.comm import mesh
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.errors import DivergenceError, LifecycleError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, shard, transport


class Net(nn.Module):
    """Units of equal sizes, run in the order that is asked for."""

    def __init__(self, width: int = 9, rows: int = 9) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(width, rows)

    def forward(self, x: Tensor, path: str = "abc") -> Tensor:
        for name in path:
            x = torch.tanh(getattr(self, name)(x))
        return x


def _data(rank: int) -> Tensor:
    return torch.randn(3, 9, generator=torch.Generator().manual_seed(rank))


def _sharded(front: str, net: Net | None = None, **options: Any) -> Any:
    net = net or Net()
    return shard(net, front, [net.a, net.b, net.c], "FULL_SHARD", **options)


def _agreed(action: Callable[[], object], world: int) -> str:
    """The text of the ``DivergenceError`` that ``action`` raises, the same on every rank."""
    with pytest.raises(DivergenceError) as caught:
        action()
    said: list[Any] = [None] * world
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


def _step(model: Any, rank: int, path: str = "abc") -> None:
    model(_data(rank), path).square().sum().backward()


both = pytest.mark.parametrize("over", ["shared", "group"])
every_front = pytest.mark.parametrize("front", FRONTS)


@ranks(2, 4)
@every_front
@both
def test_C8_other_units_in_forward(front: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        model = _sharded(front)
    text = _agreed(lambda: model(_data(rank), "ab" if rank == world - 1 else "ac"), world)
    assert "ranks run different units" in text
    assert "rank 0 runs gather of 'c'" in text and f"rank {world - 1} runs gather of 'b'" in text


@ranks(2)
@every_front
@both
def test_C8_another_order(front: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        model = _sharded(front)
    text = _agreed(lambda: _step(model, rank, "cab" if rank else "abc"), world)
    assert "rank 0 runs gather of 'a', rank 1 runs gather of 'c'" in text


@ranks(2)
@every_front
@both
def test_C8_a_unit_skipped_in_backward(front: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        model = _sharded(front)

    def step() -> None:
        x = model(_data(rank), "a")
        model.zero_grad()
        y = model(_data(rank), "b")
        (x + y if rank else y).sum().backward()

    assert "rank 1 runs gather of 'a'" in _agreed(step, world)


@ranks(2)
@every_front
@both
def test_C8_another_number_of_forwards(front: str, over: str, rank: int, world: int) -> None:
    """Rank 0 evaluates once more; found in the next step, before anything is mixed."""
    with transport(over):
        model = _sharded(front)
    _step(model, rank)

    def run() -> None:
        if rank == 0:
            with torch.no_grad():
                model(_data(9))
        _step(model, rank)
        _step(model, rank)

    assert "ranks run different units" in _agreed(run, world)


@ranks(2, 4)
@both
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_C8_ranks_may_go_on_after_it(place: str, over: str, rank: int, world: int) -> None:
    with transport(over):
        model, twin = _sharded("fully_shard"), _sharded("fully_shard")
    odd = rank == world - 1

    def diverge() -> None:
        if place == "forward":
            _step(model, rank, "cab" if odd else "abc")
        else:
            x, y = model(_data(rank), "a"), model(_data(rank), "b")
            (x if odd else y).sum().backward()

    for _ in range(2):
        _agreed(diverge, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradients of the backward that failed are void, it says
            model.zero_grad()
        _step(model, rank)
        model.zero_grad()
    _step(model, rank)
    _step(twin, rank)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@ranks(2)
@every_front
def test_C8_a_step_without_backward(front: str, rank: int, world: int) -> None:
    model = _sharded(front)

    def run() -> None:
        for number in range(2):
            loss = model(_data(rank)).sum()
            if rank or number:
                loss.backward()

    assert "ranks run different units" in _agreed(run, world)


@ranks(2, 4)
@every_front
def test_C8_other_shapes_of_equal_size(front: str, rank: int, world: int) -> None:
    """The bytes would fit, and be mixed."""
    last = rank == world - 1
    model = _sharded(front, Net(3, 27) if last else Net(27, 3))
    text = _agreed(lambda: model(_data(rank), "ab"), world)
    assert "ranks were given different models (parameter 'weight', unit 'c')" in text
    assert "rank 0 has (3, 27) float32 trained" in text
    assert f"rank {world - 1} has (27, 3) float32 trained" in text


@ranks(2)
def test_C8_one_unit_less(rank: int, world: int) -> None:
    model: Any = Net()
    for module in (model.a, *([model.b] if rank else []), model):
        shardwise.fully_shard(module)
    assert "different models (parameter " in _agreed(lambda: model(_data(rank)), world)


@ranks(2)
@every_front
def test_C8_frozen_on_one_rank(front: str, rank: int, world: int) -> None:
    net = Net()
    net.b.requires_grad_(rank == 0)
    model = _sharded(front, net)
    text = _agreed(lambda: _step(model, rank), world)
    assert "rank 0 has (9, 9) float32 trained, rank 1 has (9, 9) float32 frozen" in text


@ranks(2)
def test_C8_other_options(rank: int, world: int) -> None:
    net = Net()
    shardwise.fully_shard(net.a, reshard_after_forward=rank == 0)
    shardwise.fully_shard(net)
    text = _agreed(lambda: net(_data(rank)), world)
    assert "ranks shard a unit with different options (unit 'a')" in text
    assert "rank 0 has reshard_after_forward=True" in text and "rank 1 has reshard_after_forward=False" in text
    model = FullyShardedDataParallel(Net(), forward_prefetch=rank == 1)
    assert "different options (unit '(root)')" in _agreed(lambda: model(_data(rank)), world)
    net = shardwise.fully_shard(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16 if rank else None))
    assert "param=torch.bfloat16" in _agreed(lambda: net(_data(rank)), world)


def _other_values(rank: int) -> Net:
    net = Net()
    with torch.no_grad():
        net.b.weight.add_(rank)
    return net


@ranks(2, 4)
@every_front
def test_C8_other_values(front: str, rank: int, world: int) -> None:
    """Without ``sync_module_states``; a replica of its own would even stay different for ever."""
    model = _sharded(front, _other_values(rank // 2 if world == 4 else rank))
    text = _agreed(lambda: model(_data(rank)), world)
    assert "ranks start from different values (parameter 'weight', unit 'b')" in text
    assert f"got other ones on rank {'2, 3' if world == 4 else '1'} than on rank 0. Seed all ranks alike" in text


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool], ids=str)
def test_C8_frozen_values_of_any_dtype_are_compared(rank: int, world: int, dtype: torch.dtype) -> None:
    class Frozen(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((9, 9), value).to(dtype), requires_grad=False)
            self.bias = nn.Parameter(torch.zeros(9))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.float() + self.bias

    shardwise.fully_shard(Frozen(1))(_data(rank)).sum().backward()
    model = shardwise.fully_shard(Frozen(rank))
    assert "different values (parameter 'weight'" in _agreed(lambda: model(_data(rank)), world)


@ranks(2)
def test_C8_other_values_of_copies(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(_other_values(rank), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert "different values" in _agreed(lambda: model(_data(rank)), world)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "flat"])
def test_C8_values_that_were_made_equal(front: str, rank: int, world: int) -> None:
    model = _sharded(front, _other_values(rank), sync_module_states=True)
    model(_data(rank))


@ranks(2)
@every_front
def test_C8_values_that_were_loaded_after_sharding(front: str, rank: int, world: int) -> None:
    """What the ranks started from is gone: nothing to compare."""
    model = _sharded(front, _other_values(rank))
    with shardwise.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    model(_data(rank))


@ranks(2)
def test_C8_costs_one_collective_before_the_first_forward(rank: int, world: int) -> None:
    with counted() as traffic:
        model = _sharded("orig")
        model(_data(rank))
        assert traffic.operations[0] == "all_reduce" and traffic.count("all_reduce") == 1
        traffic.clear()
        model(_data(rank))
    assert traffic.count("all_reduce") == 0


@ranks(2)
def test_C8_a_model_less_on_one_rank_is_no_divergence(rank: int, world: int) -> None:
    """What ranks made and threw away before, and how often, does not count."""
    if rank:
        _sharded("fully_shard")
    model = _sharded("fully_shard")
    _step(model, rank)
    assert "rank 0 runs gather of 'b', rank 1 runs gather of 'a'" in _agreed(
        lambda: model(_data(rank), "a" if rank else "b"), world)


@ranks(2)
def test_C8_transports_that_trust_can_be_asked_to_compare(rank: int, world: int) -> None:
    """As NCCL's do by default; here gloo's is told to trust."""
    assert dist.group.WORLD is not None
    trusting = ProcessGroupCollectives(dist.group.WORLD, check_tags=False)
    with patch.object(mesh, "collectives_for", lambda *_, **__: trusting):
        model = _sharded("fully_shard")
    model(_data(rank))
    with shardwise.check_order(model):
        text = _agreed(lambda: model(_data(rank), "a" if rank else "b"), world)
    assert "rank 0 runs gather of 'b', rank 1 runs gather of 'a'" in text
    with pytest.raises(LifecycleError, match="no sharded units"), shardwise.check_order(nn.Linear(2, 2)):
        pass
