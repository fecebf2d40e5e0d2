"""U73, U74, U75: torch's own state dict helpers, and ``torch.distributed.checkpoint`` with optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as theirs
from torch import Tensor, nn

from shardwise.checkpoint import (
    ShardedRecord,
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, first_ranks, odd, over, train, values
from tests.bed.fronts import FRONTS, full_parameters, shard
from tests.bed.models import OddTransformer, TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
VISIBLE = ("orig", "fully_shard")
WHOLE = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)


def _common(path: Path) -> str:
    """Rank 0's folder, on every rank."""
    box = [str(path)]
    dist.broadcast_object_list(box)
    return box[0]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> dict[str, Any]:
    if way == "helpers":
        weights, state = theirs.get_state_dict(model, optimizer)
        return {"model": weights, "optim": state}
    return {"optim": optimizer.state_dict()}


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, way: str, path: str, group: Any = None) -> None:
    if way == "plain":
        optimizer.zero_grad()
        theirs._init_optim_state(optimizer)  # a step with zeros, as everyone does before a load
    state = _states(model, optimizer, way)
    dcp.load(state, checkpoint_id=path, process_group=group)
    if way == "helpers":
        theirs.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    else:
        optimizer.load_state_dict(state["optim"])


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]


def _assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys() and expected
    for fqn, kept in expected.items():
        assert_same_tensors(found[fqn], kept, fqn, bitwise=True)


@ranks(4, timeout=240)
@pytest.mark.parametrize(("way", "counts"), [("plain", (2, 3)), ("helpers", (4, 2)), ("helpers", (2, 1))])
@pytest.mark.parametrize("front", FRONTS)
def test_U73_U75_optimizer_state_is_saved_whole(
    front: str, way: str, counts: tuple[int, int], rank: int, world: int, tmp_path: Path
) -> None:
    path = _common(tmp_path)
    groups = [first_ranks(count, world) for count in counts]
    box: list[Any] = [None]
    if rank < counts[0]:
        model = odd(front, seed=2, **over(front, groups[0]))
        optimizer = adamw(model)
        train(model, optimizer, rank, range(2))
        dcp.save(_states(model, optimizer, way), checkpoint_id=path, process_group=groups[0])
        box = [_whole_state(model, optimizer)]
    dist.broadcast_object_list(box)
    if rank < counts[1]:
        model = odd(front, seed=2, **over(front, groups[1]))
        optimizer = adamw(model)
        _load(model, optimizer, way, path, groups[1])
        _assert_same_states(_whole_state(model, optimizer), box[0])
        train(model, optimizer, rank, range(2, 3))  # it works with rows
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U74_a_run_goes_on_bit_for_bit(front: str, rank: int, tmp_path: Path) -> None:
    path = _common(tmp_path)
    model = odd(front, seed=2)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, rank, range(2, 4))
    again = odd(front, seed=2, blank=True)
    again.load_state_dict(weights)
    fresh = adamw(again)
    _load(again, fresh, "plain", path)
    train(again, fresh, rank, range(2, 4))
    assert_same_tensors(values(again), values(model), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("front", FRONTS)
def test_each_rank_saves_its_own_optimizer_state(front: str, stepped: bool, rank: int) -> None:
    """``torch.save`` of ``optimizer.state_dict()``, read back by an optimizer that stepped, or never did."""
    model = odd(front, seed=2)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    file = io.BytesIO()
    torch.save({"optim": optimizer.state_dict(), "model": model.state_dict()}, file)
    train(model, optimizer, rank, range(2, 4))
    again = odd(front, seed=2, blank=True)
    fresh = adamw(again)
    if stepped:
        train(again, fresh, rank, range(1))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    again.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optim"])
    train(again, fresh, rank, range(2, 4))
    assert_same_tensors(values(again), values(model), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_an_optimizer_that_only_loaded_can_be_saved(front: str, rank: int, tmp_path: Path) -> None:
    path = _common(tmp_path)
    model = odd(front, seed=2)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    ours = get_optimizer_state_dict(model, optimizer)
    fresh = adamw(model)
    set_optimizer_state_dict(model, fresh, ours)
    dcp.save({"optim": fresh.state_dict()}, checkpoint_id=path)
    last = adamw(model)
    _load(model, last, "plain", path)
    _assert_same_states(_whole_state(model, last), _whole_state(model, optimizer))


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_whole_tensors_are_cut_for_the_optimizer(front: str, rank: int, world: int) -> None:
    """State of an unsharded run goes into a sharded one by position."""
    plain = TinyMLP(seed=2)
    theirs_ = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        for one in range(world):
            (loss(plain, points(one, step)) / world).backward()
        theirs_.step()
        theirs_.zero_grad()
    twin = TinyMLP(seed=2)
    twin.load_state_dict(plain.state_dict())
    model = shard(twin, front, [twin.middle])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(theirs_.state_dict()))
    loss(model, points(rank, 2)).backward()
    optimizer.step()
    for one in range(world):
        (loss(plain, points(one, 2)) / world).backward()
    theirs_.step()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), dict(plain.named_parameters()))


class Factored(torch.optim.Optimizer):
    """Keeps a mean of each column of the rows that it sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() == 2:
                self.state[p]["column"] = p.grad.as_subclass(Tensor).square().sum(0)


@ranks(4)
@pytest.mark.parametrize("front", VISIBLE)
def test_state_of_other_shapes_is_kept_for_each_rank(front: str, rank: int, world: int, tmp_path: Path) -> None:
    """On as many ranks each gets its own back; on fewer it is an error, and not one rank's values."""
    path = _common(tmp_path)
    plain = nn.Sequential(nn.Linear(6, 8))
    model = shard(plain, front)
    optimizer = Factored(model.parameters())
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    kept = {p: state["column"].clone() for p, state in optimizer.state.items()}
    assert all(value.shape == (6,) for value in kept.values()) and kept
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=path)
    for state in optimizer.state.values():
        state["column"].zero_()
    state = {"optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_state_dict(state["optim"])
    assert all(torch.equal(optimizer.state[p]["column"], value) for p, value in kept.items())
    shown = optimizer.state_dict()["state"][0]["column"]
    assert isinstance(shown, ShardedRecord) and shown.shape == (world, 6)
    half = first_ranks(2, world)
    if rank < 2:
        fewer = shard(nn.Sequential(nn.Linear(6, 8)), front, **over(front, half))
        other = Factored(fewer.parameters())
        fewer(torch.randn(3, 6)).sum().backward()
        other.step()
        with pytest.raises((ValueError, dcp.api.CheckpointException), match=r"[Ss]ize"):
            dcp.load({"optim": other.state_dict()}, checkpoint_id=path, process_group=half)
    dist.barrier()


@ranks(2)
def test_what_a_rank_keeps_of_a_whole_square_matrix_stays(rank: int, world: int, tmp_path: Path) -> None:
    """State shaped like a whole parameter by chance, on its owner alone, beside rows."""
    model = shard(nn.Linear(64, 64, bias=False), "fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    if rank == 0:
        state["factor"] = torch.eye(64)
    get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shard(nn.Linear(8, 8), "fully_shard")  # optimizers are looked at again
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model.weight]
    assert state["momentum_buffer"].shape == model.weight.shape == (32, 64)
    assert ("factor" in state) == (rank == 0)
    assert rank or torch.equal(state["factor"], torch.eye(64))


# ---------------------------------------------------------------------- full state dicts
@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U68_torchs_full_state_dict_is_whole(front: str, rank: int, tmp_path: Path) -> None:
    """What rank 0 saves is read by one process with torch alone; other ranks get nothing, as torch has it."""
    model = odd(front, seed=2)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    weights = theirs.get_model_state_dict(model, options=WHOLE)
    state = theirs.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    everywhere = theirs.get_model_state_dict(model, options=theirs.StateDictOptions(full_state_dict=True))
    expected = values(model)
    assert bool(weights) == (rank == 0) and bool(state) == (rank == 0)
    assert_same_tensors({name: everywhere[name] for name in expected}, expected, bitwise=True)
    if rank == 0:
        file = tmp_path / "whole.pt"
        torch.save((weights, state), file)
        read, _ = torch.load(file, weights_only=True)
        bare = OddTransformer(blocks=2)
        bare.load_state_dict(read)
        found = dict(bare.named_parameters()) | dict(bare.named_buffers())
        assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)
    again = odd(front, seed=2, blank=True)
    fresh = adamw(again)
    spread = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    theirs.set_model_state_dict(again, weights, options=spread)
    found = {name: value for name, value in values(again).items() if "running_" not in name}
    assert_same_tensors(found, {name: expected[name] for name in found}, bitwise=True)
    theirs.set_optimizer_state_dict(again, fresh, state, options=spread)
    _assert_same_states(_whole_state(again, fresh), _whole_state(model, optimizer))


@ranks(2)
def test_frozen_parameters_can_be_left_out_of_a_full_state_dict(rank: int) -> None:
    model = odd("fully_shard", seed=2)
    options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights = theirs.get_model_state_dict(model, options=options)
    assert not rank or not weights
    assert rank or ("adapter.weight" not in weights and weights["embedding.weight"].shape == (37, 21))


@ranks(2)
def test_records_cannot_be_sent_by_torchs_helper(rank: int) -> None:
    model = shard(nn.Linear(4, 6), "fully_shard")
    record = model.state_dict()["weight"]
    with pytest.raises(CheckpointError, match=r"shardwise\.checkpoint\.set_model_state_dict"):
        dist.broadcast(record, 0)
