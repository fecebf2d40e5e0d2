"""U58: ``optimizer.zero_grad()`` forgets gradients that were added up unsent, as on a model that DDP replicates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, units, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)


def _twins(front: str, rank: int, world: int) -> Twins:
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle])
    twins.train(1)  # the optimizer is noticed at its first step
    return twins


def _unsent(twins: Twins, rank: int, step: int = 9) -> None:
    with unsynced(twins.model, twins.front):
        loss(twins.model, points(rank, step)).backward()


@ranks(2)
@fronts
@pytest.mark.parametrize("set_to_none", [True, False])
def test_U58_zero_grad_of_an_optimizer(rank: int, world: int, front: str, set_to_none: bool) -> None:
    twins = _twins(front, rank, world)
    _unsent(twins, rank)
    assert any(unit.collector.holding for unit in units(twins.model).values())
    twins.optimizers[1].zero_grad(set_to_none)
    assert not any(unit.collector.holding for unit in units(twins.model).values())
    twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_U58_two_optimizers(rank: int, world: int, front: str) -> None:
    """Each forgets those of its own parameters; a unit may have some of both."""
    twins = _twins(front, rank, world)
    model: Any = twins.model
    ours = [torch.optim.SGD([model.inward.weight], lr=0.0), torch.optim.SGD([model.outward.weight], lr=0.0)]
    twins.backward()
    for optimizer in ours:
        optimizer.step()
    model.zero_grad()
    twins.plain.zero_grad()
    for step in (1, 2):
        _unsent(twins, rank, step)
    ours[0].zero_grad()
    for one in range(world):
        for step in (1, 2):
            (loss(twins.plain, points(one, step)) / world).backward()
    twins.plain.inward.weight.grad = None  # type: ignore[union-attr]
    twins.backward(3)
    twins.check_gradients()


@ranks(2)
@fronts
def test_U58_between_a_forward_and_its_backward(rank: int, world: int, front: str) -> None:
    """The usual places of zero_grad change nothing of what is under way."""
    twins = _twins(front, rank, world)
    late = loss(twins.model, points(rank, 0))
    twins.optimizers[1].zero_grad()
    late.backward()
    for one in range(world):
        (loss(twins.plain, points(one, 0)) / world).backward()
    twins.check_gradients()


@ranks(2)
@fronts
def test_U58_the_optimizer_stays_one_to_copy(rank: int, world: int, front: str) -> None:
    twins = _twins(front, rank, world)
    _unsent(twins, rank)
    before = full_gradients(twins.model, twins.names)
    copied = copy.deepcopy(twins.optimizers[1])
    copied.zero_grad()
    assert "zero_grad" not in vars(copied) and before.keys() == full_gradients(twins.model, twins.names).keys()
    assert any(unit.collector.holding for unit in units(twins.model).values())
    twins.optimizers[1].zero_grad()
    twins.train(1)
