"""The page on edits runs as written (rows A21, A24), the one on internals says what is (A13, A14)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import FlatParameter, ShardedParameter, is_sharded, summon_full_params
from shardwise.errors import WritebackError
from shardwise.plan import lifecycle
from shardwise.storage.guard import GuardedParameter
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.pages import script_of
from tests.guard.source import ROOT

fronts = pytest.mark.parametrize("front", FRONTS)


@ranks(1, 2)
def test_A21_A24_the_page_on_edits_runs(rank: int, world: int) -> None:
    script = script_of("docs/writeback.md")
    assert script.count("assert") > 5
    exec(compile(script, "docs/writeback.md", "exec"), {"__name__": "page"})


def test_A14_the_internals_page_names_every_state_and_real_things() -> None:
    text = (ROOT / "docs" / "internals.md").read_text()
    for state in (*lifecycle.Residency, *lifecycle.Pass):
        assert state.name in text
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", text):
        assert re.search(rf"\b{name}\b", sources) or name in dir(torch.Tensor) or name == "id", name


class _Looks(nn.Module):
    """Notes what its parameter is inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 3)
        self.seen: list[tuple[type, tuple[int, ...], bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inside.weight
        self.seen.append((type(weight), tuple(weight.shape), is_sharded(weight)))
        return self.inside(x)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_A13_is_sharded_in_every_state(rank: int, front: str) -> None:
    """For a parameter and for its gradient."""
    module = _Looks()
    weight = module.inside.weight
    assert not is_sharded(weight)
    model: Any = shard(module, front)
    assert (type(weight), is_sharded(weight)) == (ShardedParameter, True)
    y = model(points(rank, 0)[0])
    assert module.seen == [(nn.Parameter, (3, 5), False)]
    assert (type(weight), is_sharded(weight)) == (GuardedParameter, True)
    y.sum().backward()
    assert (type(weight), is_sharded(weight), is_sharded(weight.grad)) == (ShardedParameter, True, True)
    with summon_full_params(model, with_grads=True):
        assert (tuple(weight.shape), is_sharded(weight), is_sharded(weight.grad)) == ((3, 5), False, False)
    with summon_full_params(model, rank0_only=True, writeback=False):
        assert is_sharded(weight) is (rank != 0)
    assert is_sharded(weight)
    assert is_sharded(weight.grad)


@ranks(1)
@fronts
def test_A13_one_rank_has_nothing_sharded(rank: int, front: str) -> None:
    model = shard(TinyMLP(), front)
    assert not any(is_sharded(p) for p in model.parameters())


@ranks(2)
def test_a_flat_parameter_tells_what_is_in_it(rank: int, world: int) -> None:
    """Names, shapes, offsets: the originals can be cut out of the whole."""
    plain = TinyMLP()
    model = shard(TinyMLP(), "flat")
    (flat,) = model.parameters()
    assert isinstance(flat, FlatParameter)
    assert flat.fqns == tuple(name for name, _ in plain.named_parameters())
    assert flat.shapes == tuple(p.shape for p in plain.parameters())
    whole = flat.full_tensor()
    for fqn, shape, offset in zip(flat.fqns, flat.shapes, flat.offsets, strict=True):
        original = plain.get_parameter(fqn)
        assert torch.equal(whole[offset : offset + original.numel()].view(shape), original)
    held = sum(stop - start for start, stop in flat.local_ranges)
    loss(model, points(rank, 0))
    assert isinstance(flat, FlatParameter)
    counts = torch.tensor([held])
    torch.distributed.all_reduce(counts)
    assert int(counts) == sum(p.numel() for p in plain.parameters())


@ranks(2)
def test_U26_a_parameter_added_to_a_flat_unit_is_refused(rank: int) -> None:
    """By name, whether it comes alone or in a new module; ordinary children may come and go."""
    model: Any = shard(TinyMLP(), "flat")
    inner = model.module
    inner.middle.extra = nn.Identity()
    model(points(rank, 0)[0])
    inner.middle.register_parameter("late", nn.Parameter(torch.ones(2)))
    with pytest.raises(WritebackError, match=r"added after sharding.*'middle.late'.*use_orig_params=True"):
        model(points(rank, 0)[0])
    del inner.middle.late
    inner.middle.adapter = nn.Linear(2, 2)
    with pytest.raises(WritebackError, match=r"added after sharding.*'middle.adapter.weight'"):
        model(points(rank, 0)[0])
    del inner.middle.adapter
    loss(model, points(rank, 0)).backward()
