"""Loading model state dicts: whole, records, local rows; what does not fit; what stays as it was."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import FullyShardedDataParallel, StateDictType, fully_shard
from shardwise.checkpoint import (
    ShardedRecord,
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from shardwise.errors import CheckpointError, ConfigurationError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, odd, train
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import OddTransformer, TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

kind_of = FullyShardedDataParallel.state_dict_type
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def other_values(seed: int = 9) -> dict[str, Tensor]:
    """A state dict of the module that ``odd`` shards, with other values."""
    return {key: value.clone() for key, value in OddTransformer(seed=seed, blocks=2).state_dict().items()}


def full(model: nn.Module) -> dict[str, Any]:
    with kind_of(model, FULL):
        return model.state_dict()


@ranks(1, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_a_plain_dict_loads_in_place(front: str, assign: bool) -> None:
    """U9, U68, A15: the objects registered before are those registered after, for the next load too."""
    model = odd(front)
    before = list(model.parameters())
    for seed in (9, 10):
        assert not any(model.load_state_dict(other_values(seed), assign=assign))
        assert_same_tensors(full(model), other_values(seed), bitwise=True)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@ranks(2)
@pytest.mark.parametrize("into", FRONTS)
@pytest.mark.parametrize("front", FRONTS)
def test_records_load_into_any_wrapping(front: str, into: str, rank: int) -> None:
    """U69, A15: of the same layout without traffic, of another one gathered; then it trains."""
    source = odd(front, seed=9)
    with kind_of(source, SHARDED):
        state = source.state_dict()
    twin = OddTransformer(blocks=2)
    model = shard(twin, into, [twin.blocks[1]])
    assert not any(model.load_state_dict(state))
    assert_same_tensors(full(model), other_values(), bitwise=True)
    train(model, adamw(model), rank, range(1))
    model.load_state_dict(state)
    assert torch.equal(full(model)["last.weight"], other_values()["last.weight"])


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("front", FRONTS)
def test_the_next_forward_sees_what_was_loaded(front: str, strategy: str, rank: int) -> None:
    """Also where parameters stay gathered from forward to backward."""
    model = shard(TinyMLP(), front, strategy=strategy)
    loss(model, points(rank, 0))
    fresh = TinyMLP(seed=5)
    model.load_state_dict(fresh.state_dict())
    assert torch.equal(loss(model, points(rank, 1)), loss(fresh, points(rank, 1)))
    loss(model, points(rank, 1)).backward()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_missing_and_unexpected_keys(front: str) -> None:
    """Reported by their plain names, strict or not."""
    model, state = odd(front), other_values()
    del state["blocks.0.attention.mixing.bias"]
    state["blocks.1.extra"] = torch.zeros(2)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["blocks.0.attention.mixing.bias"]
    assert result.unexpected_keys == ["blocks.1.extra"]
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*blocks.0.attention.mixing.bias") as caught:
        model.load_state_dict(state)
    assert "_fsdp" not in str(caught.value) and "_flat" not in str(caught.value)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_value_that_does_not_fit_changes_nothing(front: str) -> None:
    """All of them are named, on every rank; also one of an unsharded part."""
    model, state = odd(front), other_values()
    state["blocks.1.feed_forward.widen.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"size mismatch for blocks.1.feed_forward.widen.weight.*"
                                              r"expected shape \(47, 21\).*got shape \(3, 3\)"):
        model.load_state_dict(state)
    state["last.bias"] = [0.0]
    state["gain_fp32"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"(?s)3 entries.*gain_fp32.*widen.weight") as caught:
        model.load_state_dict(state)
    assert "last.bias" in str(caught.value)
    state = other_values() | {"last.bias": torch.zeros(21, device="meta")}
    with pytest.raises(CheckpointError, match=r"has no values.*last.bias.*broadcast_from_rank0"):
        model.load_state_dict(state)
    assert_same_tensors(full(model), OddTransformer(blocks=2).state_dict(), bitwise=True)


class Guarded(TinyMLP):
    """Loads a state dict in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.load_state_dict(TinyMLP().state_dict())
        return super().forward(x)


@ranks(2)
def test_not_inside_forward(rank: int) -> None:
    with pytest.raises(CheckpointError, match="cannot load a state dict into a unit in use"):
        loss(fully_shard(Guarded()), points(rank, 0))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_one_submodule(front: str) -> None:
    """A module inside a unit loads and saves on its own."""
    model = odd(front)
    fresh = OddTransformer(seed=9, blocks=2).blocks[0].attention
    model.blocks[0].attention.load_state_dict(fresh.state_dict())
    assert_same_tensors(model.blocks[0].attention.state_dict() if front != "fully_shard" else
                        {k: v.full_tensor() for k, v in model.blocks[0].attention.state_dict().items()},
                        fresh.state_dict(), bitwise=True)


@ranks(2)
def test_inside_summon() -> None:
    """Whole values are shown, loaded and kept."""
    model = odd("orig")
    with FullyShardedDataParallel.summon_full_params(model):
        model.load_state_dict(other_values())
    assert_same_tensors(full(model), other_values(), bitwise=True)


# ---------------------------------------------------------------------- torch's names
@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_broadcast_from_rank0(front: str, rank: int) -> None:
    """U79: only rank 0 has the state; frozen, tied, integer and buffer values arrive too."""
    source, model = odd(front, seed=9), odd(front, seed=9, blank=True)
    optimizers = [adamw(m) for m in (source, model)]
    train(source, optimizers[0], rank, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, optimizer_state = get_state_dict(source, optimizers[0], options=options)
    assert bool(state) == bool(optimizer_state) == (rank == 0)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    result = set_state_dict(model, optimizers[1], model_state_dict=state,
                            optim_state_dict=optimizer_state, options=spread)
    assert not any(result)
    names = [name for name, _ in OddTransformer(blocks=2).named_parameters()]  # buffers are rank 0's
    assert_same_tensors({n: full(model)[n] for n in names}, {n: full(source)[n] for n in names}, bitwise=True)
    again = [train(m, o, rank, range(2, 4)) for m, o in zip((source, model), optimizers, strict=True)]
    assert again[0] == again[1]
    bad = {key: value for key, value in state.items() if key != "last.bias"} | (
        {"last.weight": torch.zeros(3)} if rank == 0 else {})
    with pytest.raises(CheckpointError, match=r"size mismatch for last.weight"):
        set_model_state_dict(model, bad, options=spread)
    with pytest.raises(ConfigurationError, match="broadcast_from_rank0 needs a full state dict"):
        StateDictOptions(broadcast_from_rank0=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_options(front: str, rank: int) -> None:
    """full, records, frozen parameters left out, submodules with and without their prefix, strict."""
    model = odd(front)
    assert isinstance(get_model_state_dict(model)["last.weight"], ShardedRecord)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same_tensors(whole, OddTransformer(blocks=2).state_dict(), bitwise=True)
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(whole) - set(trained) == {"place", "adapter.weight", "adapter.bias"}
    set_model_state_dict(model, trained, options=StateDictOptions(ignore_frozen_params=True))
    block = model.blocks[0]
    keys = set(get_model_state_dict(model, submodules={block}))
    assert keys == {key for key in whole if key.startswith("blocks.0.")}
    bare = get_model_state_dict(model, submodules={block}, options=StateDictOptions(
        keep_submodule_prefixes=False))
    assert set(bare) == {key.removeprefix("blocks.0.") for key in keys}
    del whole["last.weight"]
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*last\.weight"):
        set_model_state_dict(model, whole)
    result = set_model_state_dict(model, whole, options=StateDictOptions(strict=False))
    assert result.missing_keys == ["last.weight"]


@ranks(2)
def test_records_are_tensors(rank: int) -> None:
    """What people do with the entries of a sharded state dict, and what a record refuses."""
    model = odd("fully_shard")
    record = model.state_dict()["blocks.0.attention.mixing.weight"]
    bare = OddTransformer(blocks=2).blocks[0].attention.mixing.weight
    assert (record.shape, record.dtype, record.numel()) == (bare.shape, bare.dtype, bare.numel())
    for copied in (record.detach().clone(), record.cpu(), record.to(torch.float32), record.double().float()):
        assert isinstance(copied, ShardedRecord)
        assert torch.equal(copied.full_tensor(), bare)
    assert record.to(torch.bfloat16).full_tensor().dtype is torch.bfloat16
    empty = torch.empty_like(record).copy_(record)
    assert torch.equal(empty.full_tensor(), bare)
    with pytest.raises(CheckpointError, match=r"computes nothing.*to_local.*full_tensor"):
        record + 1
    with pytest.raises(CheckpointError, match="plain tensor cannot take in"):
        bare.detach().copy_(record)
    assert "rows" in repr(record)


@ranks(2)
@pytest.mark.filterwarnings("ignore:shardwise. torch.save writes sharded tensors")
def test_records_through_a_file(rank: int) -> None:
    """``torch.save`` keeps rows and their place; each rank reads its own file back."""
    model, other = odd("fully_shard"), odd("fully_shard", seed=9)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state)
    assert_same_tensors(full(other), full(model), bitwise=True)
    with pytest.raises(CheckpointError, match="cannot be gathered"):
        state["last.weight"].full_tensor()
