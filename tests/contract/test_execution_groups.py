"""Units by execution order, across module boundaries (rows A11, A12, C14, U85, U86)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise import ExecutionGroups, FullyShardedDataParallel
from shardwise.errors import ConfigurationError, LifecycleError, OptionTypeError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, full_gradients, full_parameters, on_streams, shard, units
from tests.bed.models import OddBlock, OddTransformer, TinyMLP, batch, loss, points
from tests.bed.parity import assert_same_tensors


class Crooked(nn.Module):
    """Registered in another order than it runs, with a weight that a parent uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(9, 1)
        self.lent = nn.Linear(7, 9, bias=False)
        self.first = nn.Linear(5, 7)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(torch.tanh(self.first(x)), self.lent.weight).tanh())


def _grouped(front: str, groups: ExecutionGroups, model: nn.Module, **arguments: Any) -> Any:
    if front == "fully_shard":
        return shardwise.fully_shard(model, groups=groups, **arguments)
    return FullyShardedDataParallel(model, auto_wrap_policy=groups, use_orig_params=front == "orig", **arguments)


def _members(groups: ExecutionGroups) -> list[Sequence[str]]:
    return [group.modules for group in groups.groups]


def test_A12_the_order_is_that_of_use() -> None:
    """Not that of registration; a weight that a parent uses stays with it, and so does what is idle."""
    groups = shardwise.group_by_execution(Crooked(), torch.randn(4, 5), unit_bytes=1)
    assert _members(groups) == [("first",), ("last",)] and groups.rest == ("lent.weight", "idle.weight", "idle.bias")
    assert groups.groups[0].nbytes == 4 * (5 * 7 + 7)
    assert _members(shardwise.group_by_execution(Crooked(), torch.randn(4, 5), unit_bytes=10**6)) == [
        ("first", "last")]


def test_A12_groups_are_of_about_equal_bytes_and_cross_modules() -> None:
    """Attention has a parameter of its own, so it stays whole; everything else is cut where bytes say."""
    model, (tokens, _) = OddTransformer(blocks=3), batch(0, 0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    groups = shardwise.group_by_execution(model, tokens, unit_bytes=14_000)
    assert_same_tensors(dict(model.named_buffers()), before, "buffer", bitwise=True)
    sizes = [group.nbytes for group in groups.groups]
    assert len(sizes) == round(sum(sizes) / 14_000) and max(sizes) < 2 * min(sizes)
    inside = [{name.split(".")[1] for name in group.modules if name.startswith("blocks.")} for group in groups.groups]
    assert any(len(blocks) == 2 for blocks in inside), "no group crosses the boundary of a block"
    assert "embedding.weight" in groups.rest  # tied to the head: used at both ends


def test_C14_traced_on_meta() -> None:
    """The same groups without computing anything; the random state is left alone."""
    real = shardwise.group_by_execution(OddTransformer(blocks=2), batch(0, 0)[0], unit_bytes=9_000)
    with torch.device("meta"):
        model = OddTransformer(blocks=2)
    state = torch.get_rng_state()
    assert shardwise.group_by_execution(model, batch(0, 0)[0], unit_bytes=9_000) == real
    assert torch.equal(torch.get_rng_state(), state)


def test_C14_groups_are_printable_and_storable(tmp_path: Path) -> None:
    """A file, read back equal; another file or another model is refused."""
    groups = shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=150)
    assert "group 0: 168 B, 1 modules: inward" in str(groups) and "2 groups of about 150 B" in str(groups)
    groups.save(tmp_path / "groups.json")
    assert ExecutionGroups.load(tmp_path / "groups.json") == groups
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"this is no file of execution groups"):
        ExecutionGroups.load(tmp_path / "other.json")
    with pytest.raises(ConfigurationError, match=r"no modules of the names in the execution groups \('inward'"):
        groups.modules_of(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="unit_bytes of 1 or more, got 0"):
        shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=0)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A12_equal_to_recursive_wrapping(front: str, rank: int) -> None:
    """Bit for bit in fp32 on two ranks, over three steps of AdamW."""
    names = [name for name, _ in OddTransformer(blocks=2).named_parameters()]
    model = OddTransformer(blocks=2)
    groups = shardwise.group_by_execution(model, batch(0, 0)[0], unit_bytes=9_000)
    ours = _grouped(front, groups, model)
    assert len(units(ours)) == len(groups.groups) + 1
    reference = OddTransformer(blocks=2)
    theirs = shard(reference, front, reference.units())
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.is_floating_point()]) for m in (ours, theirs)]
    for step in range(3):
        results = []
        for sharded, optimizer in zip((ours, theirs), optimizers, strict=True):
            result = loss(sharded, batch(rank, step))
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(result)
        assert torch.equal(*results)
    assert_same_tensors(full_parameters(ours, names), full_parameters(theirs, names), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U86_one_gather_and_one_reduction_for_several_modules(front: str, rank: int) -> None:
    """A group is gathered once in forward and once in backward, whatever number of modules it has."""
    if on_streams():
        pytest.skip("counts what is freed at once")
    with counted() as traffic:
        model = _grouped(front, shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=150), TinyMLP())
        loss(model, points(rank, 0)).backward()
        traffic.clear()
        loss(model, points(rank, 1)).backward()
    assert [len(unit.modules) for unit in units(model).values()] in ([1, 1, 2], [1, 2, 1])
    assert traffic.count("all_gather") == 4 and traffic.count("reduce_scatter") == 2
    assert shardwise.memory_of(model).gathered == 0
    with torch.no_grad():
        model(points(rank, 0)[0])
    assert shardwise.memory_of(model).gathered == 0
    model.get_submodule("middle")(torch.randn(2, 7))  # one member alone, outside of the root
    assert shardwise.memory_of(model).gathered == 0


@ranks(2)
def test_A12_all_ranks_take_the_first_ranks_groups(rank: int) -> None:
    """Ranks that observed different forwards shard alike."""
    groups = shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=150 if rank == 0 else 50)
    model = shardwise.fully_shard(TinyMLP(), groups=groups)
    assert len(units(model)) == 3
    loss(model, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A12_state_dict_and_clipping(front: str, rank: int) -> None:
    """Names and values are the bare module's; gradients have one global norm."""
    groups = shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=150)
    model, plain = _grouped(front, groups, TinyMLP()), TinyMLP()
    found = {name: value.full_tensor() if isinstance(value, shardwise.ShardedParameter) else value
             for name, value in model.state_dict().items()}
    if front != "fully_shard":
        assert_same_tensors(found, plain.state_dict(), bitwise=True)
    assert list(found) == list(plain.state_dict())
    model.load_state_dict({name: 2 * value for name, value in plain.state_dict().items()})
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), {n: 2 * p for n, p in plain.named_parameters()}, bitwise=True)
    loss(model, points(0, 0)).backward()
    plain.load_state_dict({name: 2 * value for name, value in plain.state_dict().items()})
    loss(plain, points(0, 0)).backward()
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
                               torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A12_from_meta(front: str, rank: int) -> None:
    """Sharded on the meta device, then given values: trains."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))
    groups = shardwise.group_by_execution(model, torch.randn(2, 5), unit_bytes=150)
    sharded = _grouped(front, groups, model, **({} if front == "fully_shard" else {"device_id": torch.device("cpu")}))
    if front == "fully_shard":
        shardwise.materialise(sharded)
    loss(sharded, points(rank, 0)).backward()
    assert all(p.grad is not None for p in sharded.parameters())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A12_a_copy_has_the_same_units(front: str, rank: int) -> None:
    """deepcopy keeps units of several modules; the copy trains by itself."""
    groups = shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=150)
    model = _grouped(front, groups, TinyMLP())
    copied = copy.deepcopy(model)
    assert {n: len(u.modules) for n, u in units(copied).items()} == {n: len(u.modules) for n, u in units(model).items()}
    losses = [loss(one, points(rank, 0)) for one in (model, copied)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert all(p.grad is not None for p in copied.parameters()) and all(p.grad is None for p in model.parameters())


class Branching(nn.Module):
    """Three layers, of which the first may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = x if skip else torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(x)))


@ranks(2)
def test_U86_U56_a_rank_may_skip_one_module_of_a_unit(rank: int) -> None:
    """With ``allow_skipped_units``: the other rank's forward and the sum of gradients are right."""
    model, plain = Branching(), Branching()
    shardwise.fully_shard([model.first, model.last])
    shardwise.fully_shard(model.second)
    shardwise.fully_shard(model, allow_skipped_units=True)
    names = [name for name, _ in plain.named_parameters()]
    for step in range(2):
        model(points(rank, step)[0], skip=rank == 1).sum().backward()
        torch.stack([plain(points(one, step)[0], skip=one == 1).sum() for one in range(2)]).mean().backward()
        assert_same_tensors(full_gradients(model, names), {n: p.grad for n, p in plain.named_parameters()})
        model.zero_grad()
        plain.zero_grad()


@ranks(2)
def test_A12_refusals(rank: int) -> None:
    """A sharded model cannot be observed; groups are for one module; ignored modules stay out."""
    groups = shardwise.group_by_execution(TinyMLP(), torch.randn(2, 5), unit_bytes=50)
    model = TinyMLP()
    with pytest.raises(OptionTypeError, match=r"groups takes the execution groups of one module"):
        shardwise.fully_shard([model.inward, model.middle], groups=groups)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=groups, ignored_modules=[model.middle],
                                       use_orig_params=True)
    assert not shardwise.is_sharded(model.middle.weight) and shardwise.is_sharded(model.inward.weight)
    with pytest.raises(LifecycleError, match="Call group_by_execution before sharding"):
        shardwise.group_by_execution(sharded, torch.randn(2, 5))


def test_A12_attention_that_reads_a_childs_weight() -> None:
    """torch's own attention never calls its output layer: both are one."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    groups = shardwise.group_by_execution(model, torch.randn(2, 3, 8), unit_bytes=1)
    assert [name for name in _members(groups) if "self_attn" in name[0]] == [("self_attn",)]
    assert not groups.rest and isinstance(OddBlock(3), nn.Module)
