"""deepcopy, weight averaging, swapping weights, pickling (rows C13, U3)."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import FSDPModule, FullyShardedDataParallel, is_sharded, summon_full_params
from shardwise.errors import LifecycleError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, full_parameters, shard, units
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points
from tests.bed.parity import assert_same_tensors
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)


def _twins(front: str, rank: int, world: int) -> Twins:
    return Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle])


@ranks(2)
@fronts
def test_C13_a_copy_is_sharded_alike_and_its_own(rank: int, world: int, front: str) -> None:
    """No collective; equal outputs; training one leaves the other; the copy trains, saves and loads."""
    twins = _twins(front, rank, world)
    twins.train(1)
    with counted() as traffic:
        copied = copy.deepcopy(twins.model)
    assert traffic.operations == []
    assert type(copied) is type(twins.model)
    assert isinstance(copied, FullyShardedDataParallel if front != "fully_shard" else FSDPModule)
    values = full_parameters(twins.model, twins.names)
    assert_same_tensors(full_parameters(copied, twins.names), values, bitwise=True)
    shapes = [(name, p.shape) for name, p in twins.model.named_parameters()]
    assert [(name, p.shape) for name, p in copied.named_parameters()] == shapes
    assert all(is_sharded(p) for p in copied.parameters())
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in twins.model.parameters()}
    mine, theirs = units(copied), units(twins.model)
    assert list(mine) == list(theirs)
    for name, unit in mine.items():
        assert [s.layout for s in unit.storages] == [s.layout for s in theirs[name].storages]

    twins.train(1)
    assert_same_tensors(full_parameters(copied, twins.names), values, bitwise=True)
    copied.load_state_dict(twins.model.state_dict())
    assert list(copied.state_dict()) == twins.names
    trained = full_parameters(twins.model, twins.names)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    loss(copied, points(rank, 0)).backward()
    optimizer.step()
    assert_same_tensors(full_parameters(twins.model, twins.names), trained, bitwise=True)
    assert not torch.equal(full_parameters(copied, twins.names)["inward.weight"], trained["inward.weight"])


@ranks(2)
@fronts
def test_C13_everything_a_model_may_have(rank: int, front: str) -> None:
    """Ties, frozen parts, an integer parameter, buffers of every kind, nested units."""
    model = OddTransformer()
    names = [name for name, _ in model.named_parameters()]
    sharded = shard(model, front, model.units())
    copied: Any = copy.deepcopy(sharded)
    assert copied.head.weight is copied.embedding.weight
    assert_same_tensors(full_parameters(copied, names), full_parameters(sharded, names), bitwise=True)
    assert_same_tensors(dict(copied.named_buffers()), dict(sharded.named_buffers()), "buffer", bitwise=True)
    losses = [loss(m, batch(rank, 0)) for m in (sharded, copied)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert all(p.grad is None for p in sharded.parameters())
    assert any(p.grad is not None for p in copied.parameters())


@ranks(2)
@fronts
def test_C13_a_copy_inside_a_plain_parent(rank: int, front: str) -> None:
    """Two units that share a weight, below a module that is no unit itself."""
    parent = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parent[2].weight = parent[0].weight  # type: ignore[union-attr]
    for place in ("2", "0"):  # the owner comes second in the copy's order
        setattr(parent, place, shard(parent.get_submodule(place), front))
    copied = copy.deepcopy(parent)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(parent(x), copied(x))
        assert not set(units(copied).values()) & set(units(parent).values())
    copied(x).sum().backward()
    assert all(p.grad is None for p in parent.parameters())


@ranks(2)
@fronts
def test_C13_weight_averaging(rank: int, world: int, front: str) -> None:
    """torch's AveragedModel follows the sharded model as it follows a plain one."""
    twins = _twins(front, rank, world)
    ours, theirs = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
                    for m in (twins.model, twins.plain))
    inputs, _ = points(rank, 9)
    for _ in range(3):
        twins.train(1)
        ours.update_parameters(twins.model)
        theirs.update_parameters(twins.plain)
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(inputs), theirs.eval()(inputs))


@ranks(2)
@fronts
@pytest.mark.parametrize("style", ["copy_", "data"])
def test_C13_swapping_weights_in_and_back(rank: int, world: int, front: str, style: str) -> None:
    """For an evaluation, in place or through ``.data``: what was kept aside is not overwritten."""
    twins = _twins(front, rank, world)
    twins.train(1)
    inputs, _ = points(rank, 9)
    for model in (twins.model, twins.plain):
        kept = [p.data if style == "data" else p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            if style == "data":
                parameter.data = parameter.data * 0.5
            else:
                parameter.data.mul_(0.5)
        with torch.no_grad():
            output = model(inputs)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            if style == "data":
                parameter.data = value
            else:
                parameter.data.copy_(value)
        if model is twins.model:
            half = output
    torch.testing.assert_close(half, output)
    twins.train(1)


@ranks(2)
@fronts
def test_C13_a_whole_copy_inside_a_summon(rank: int, world: int, front: str) -> None:
    """An ordinary model, which can be pickled; the sharded one cannot, and says what to do."""
    twins = _twins(front, rank, world)
    twins.train(1)
    with pytest.raises(LifecycleError, match=r"cannot be pickled .*state_dict\(\).*copy.deepcopy"):
        pickle.dumps(twins.model)
    with summon_full_params(twins.model, writeback=False):
        plain = pickle.loads(pickle.dumps(copy.deepcopy(twins.model)))
    assert type(plain) is TinyMLP
    assert_same_tensors(dict(plain.named_parameters()), dict(twins.plain.named_parameters()), bitwise=False)
    loss(plain, points(0, 0)).backward()
    twins.train(1)
    with summon_full_params(twins.model, rank0_only=True, writeback=False):
        if rank == 0:
            assert type(copy.deepcopy(twins.model)) is TinyMLP
        else:
            with pytest.raises(LifecycleError, match="rank0_only"):
                copy.deepcopy(twins.model)


@ranks(2)
def test_C13_the_inside_of_a_wrapper_is_not_copied_alone(rank: int) -> None:
    model: Any = shard(TinyMLP(), "orig")
    with pytest.raises(LifecycleError, match=r"on the wrapper"):
        copy.deepcopy(model.module)


@ranks(2)
@fronts
def test_C13_nothing_keeps_a_model_alive(rank: int, front: str) -> None:
    """Parameters of a deleted model, or copy, are freed."""
    model = shard(TinyMLP(), front)
    copied = copy.deepcopy(model)
    watched = [weakref.ref(p) for m in (model, copied) for p in m.parameters()]
    for one in (model, copied):
        loss(one, points(rank, 0)).backward()
    del model, copied, one
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
