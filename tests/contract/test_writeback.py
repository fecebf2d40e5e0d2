"""Edits between steps are honoured or refused, never ignored (rows A18-A20, C1, U16-U18)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

VISIBLE = ("orig", "fully_shard")


def _value(like: Tensor, step: int) -> Tensor:
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(step))


def _in_place(model: Any, whole: TinyMLP, rows: Any) -> None:
    with torch.no_grad():
        for p, other in zip(model.parameters(), whole.parameters(), strict=True):
            p.mul_(1.5)
            other.mul_(1.5)


def _data_rows(model: Any, whole: TinyMLP, rows: Any) -> None:
    for p, other in zip(model.parameters(), whole.parameters(), strict=True):
        p.data, other.data = p.data + 0.25, other.data + 0.25


def _data_whole(model: Any, whole: TinyMLP, rows: Any) -> None:
    value = _value(whole.middle.weight, 1)
    model.middle.weight.data, whole.middle.weight.data = value.clone(), value.clone()


def _new_parameter(model: Any, whole: TinyMLP, rows: Any) -> None:
    value = _value(whole.middle.weight, 2)
    model.middle.weight, whole.middle.weight = nn.Parameter(value.clone()), nn.Parameter(value.clone())


def _new_rows(model: Any, whole: TinyMLP, rows: Any) -> None:
    model.inward.weight = nn.Parameter(model.inward.weight.detach() * 2)
    whole.inward.weight = nn.Parameter(whole.inward.weight.detach() * 2)


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
@pytest.mark.parametrize("edit", [_in_place, _data_rows, _data_whole, _new_parameter, _new_rows])
def test_A20_C1_U16_edits_between_steps(front: str, edit: Any, rank: int, world: int) -> None:
    """Training equals the unsharded run that does the same."""
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda m: [m.middle])
    twins.train(1)
    edit(twins.model, twins.plain, None)
    twins.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twins.plain, twins.model)]
    twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_in_place_changes_are_seen_by_the_next_forward(front: str, rank: int) -> None:
    model = shard(TinyMLP(), front)
    expected = TinyMLP()
    with torch.no_grad():
        before = model(points(rank, 0)[0])
        for p in (*model.parameters(), *expected.parameters()):
            p.add_(0.5)
        after = model(points(rank, 0)[0])
        torch.testing.assert_close(after, expected(points(rank, 0)[0]))
    assert not torch.equal(before, after)


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A18_U18_another_shape_is_refused(front: str, rank: int) -> None:
    """Naming parameter, rank, what was expected, what came; and the old value stays usable."""
    model: Any = shard(TinyMLP(), front)
    weight = model.middle.weight
    rows = tuple(weight.shape)
    model.middle.weight = nn.Parameter(torch.rand(2, 9))
    with pytest.raises(WritebackError) as caught:
        model(points(rank, 0)[0])
    assert str(caught.value) == (
        "shardwise: Cannot writeback: the shape changed (parameter 'middle.weight', unit '(root)', "
        f"rank {rank}): expected {rows} (this rank's rows) or (3, 7) (the whole), got (2, 9). "
        "Assign a value of one of the expected shapes.")
    model.middle.weight = weight
    loss(model, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A18_a_gradient_of_another_shape_is_refused(front: str, rank: int) -> None:
    """It can only come with data of that shape; whole ones are honoured."""
    model: Any = shard(TinyMLP(), front)
    loss(model, points(rank, 0)).backward()
    weight, rows = model.middle.weight, tuple(model.middle.weight.shape)
    weight.data, weight.grad = torch.ones(3, 7), torch.rand(3, 7)
    loss(model, points(rank, 1)).backward()
    assert tuple(weight.grad.shape) == tuple(weight.shape) == rows
    weight.data = torch.rand(9, 9)
    weight.grad = torch.rand(9, 9)
    with pytest.raises(WritebackError, match=r"Cannot writeback: the shape changed \(parameter "
                                             rf"'middle.weight', .*rank {rank}\).*got \(9, 9\)"):
        model(points(rank, 1)[0])


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_no_false_writeback(front: str, rank: int) -> None:
    """Nothing is copied between training, evaluation and names when nothing was edited."""
    model = shard(TinyMLP(), front)
    pointers = [p.data_ptr() for p in model.parameters()]
    for _ in range(2):
        loss(model, points(rank, 0)).backward()
        model.eval()
        with torch.no_grad():
            model(points(rank, 0)[0])
        model.train()
        model.zero_grad()
    assert [p.data_ptr() for p in model.parameters()] == pointers
