"""Gradients of gradients (rows C16, U64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, units
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)


def _penalty(model: Any, rank: int, step: int) -> Tensor:
    """WGAN-GP: the norm of the gradient at the input, trained."""
    inputs, _ = points(rank, step)
    inputs = inputs.clone().requires_grad_(True)
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.mean() + 10 * (gradient.norm(2, dim=1) - 1).pow(2).mean()


def _penalty_then_more(model: Any, rank: int, step: int) -> Tensor:
    """Another forward between the two backward passes."""
    first = _penalty(model, rank, step)
    return first + model(points(rank, step + 7)[0]).pow(2).mean()


@ranks(2)
@fronts
@pytest.mark.parametrize("strategy", ["DEFAULT", "FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("run", [_penalty, _penalty_then_more])
def test_C16_gradient_penalty(rank: int, world: int, front: str, strategy: str, run: Any) -> None:
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle], run=run,
                  strategy=strategy)
    twins.train(3, rtol=1e-4, atol=1e-6)
    assert all(unit.gather.nbytes == 0 for unit in units(twins.model).values())


@ranks(2)
@fronts
def test_C16_a_graph_that_is_never_used(rank: int, world: int, front: str) -> None:
    """What stays gathered for it is not taken for the parameters of the next step."""
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle])
    for step in range(3):
        for model in (twins.model, twins.plain):
            _penalty(model, rank, step)
        twins.train(1)


@ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_C16_backward_with_create_graph_gives_gradients(rank: int, world: int) -> None:
    """Reduced as ever; the graph of the parameters' own gradients is not kept."""
    twins = Twins(TinyMLP, "orig", (rank, world))
    loss(twins.model, points(rank, 0)).backward(create_graph=True)
    parts = [loss(twins.plain, points(each, 0)) for each in range(world)]
    (torch.stack(parts).sum() / world).backward()
    twins.check_gradients()
    gradients = full_gradients(twins.model, twins.names).values()
    assert all(g is not None and not g.requires_grad for g in gradients)
    twins.update()
    twins.train(1)
