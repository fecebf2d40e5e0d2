"""Buffers of sharded models under mixed precision, into checkpoints and back: rows B1-B11, C5, U32-U34.

Names, dtypes, shapes and values all differ, and ``test_precision_mutations.py`` shows that the
checks here notice the mistakes that are easily made.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise
from shardwise import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import WRAPPERS, shard
from tests.bed.models import OddTransformer, TwinBuffers, batch, loss
from tests.bed.parity import assert_same_tensors

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MIXED = MixedPrecision(BF16, FP32, BF16)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the bare module holds."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value.clone() for name, value in model.state_dict().items() if name not in parameters}


def saved_buffers(model: nn.Module, names: Any) -> dict[str, Tensor]:
    """The buffers in a full state dict, under their keys there."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if name in names}


def step(model: nn.Module, rank: int) -> None:
    loss(model, batch(rank, 0)).backward()


def check_dtypes(model: nn.Module, before: dict[str, torch.dtype], compute: torch.dtype) -> None:
    """Floating-point buffers in the compute dtype, but for norms; all others as registered."""
    for name, buffer in model.named_buffers():
        cast = before[name].is_floating_point and not name.startswith("steady.")
        assert buffer.dtype is (compute if cast else before[name]), name


def check_round_trip(front: str, rank: int) -> None:
    """Cast in forward, exact in checkpoints, cast again behind them; three units deep."""
    plain = OddTransformer()
    expected, before = persistent_buffers(plain), {n: b.dtype for n, b in plain.named_buffers()}
    model = shard(plain, front, plain.units(), mixed_precision=MIXED)
    assert {n: b.dtype for n, b in plain.named_buffers()} == before  # casts wait for the first forward
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)
    model.eval()
    for _ in range(2):
        with torch.no_grad():
            loss(model, batch(rank, 0))
        check_dtypes(plain, before, BF16)
        assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)
        check_dtypes(plain, before, BF16)
    assert plain.absent is None


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_B1_B10_B11_C5_saved_bit_for_bit(front: str, rank: int) -> None:
    check_round_trip(front, rank)


def check_changed(front: str, rank: int) -> None:
    """In place, assigned, and by the module itself."""
    plain = OddTransformer()
    expected = persistent_buffers(plain)
    model = shard(plain, front, plain.units(), mixed_precision=MIXED)
    step(model, rank)
    plain.gain_fp32.mul_(2)
    plain.table_fp64 = plain.table_fp64 + 1
    expected["gain_fp32"] = plain.gain_fp32.float()
    expected["table_fp64"] = plain.table_fp64.double()
    expected["forwards_int64"] = expected["forwards_int64"] + 1
    expected |= {name: plain.get_buffer(name) for name in expected if name.startswith("steady.")}
    assert plain.steady.running_mean.dtype is FP32
    assert plain.steady.num_batches_tracked.item() == 1
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)
    assert plain.gain_fp32.dtype is plain.table_fp64.dtype is BF16


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_B11_changed_buffers_are_saved_in_their_dtype(front: str, rank: int) -> None:
    check_changed(front, rank)


class Chain(nn.Module):
    """Three levels of one buffer name, so that each may be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = TwinBuffers()

    def forward(self, x: Tensor) -> Tensor:
        return self.twins(x).sum()


def check_units_that_differ(rank: int) -> None:
    """One local name with three dtypes; a unit with another policy, and one with none, inside."""
    plain = Chain()
    twins = plain.twins
    expected = persistent_buffers(plain)
    twins.inner.inner = FullyShardedDataParallel(twins.inner.inner, mixed_precision=MixedPrecision(BF16))
    twins.inner = FullyShardedDataParallel(twins.inner, mixed_precision=MixedPrecision(BF16, FP32, FP16))
    model = FullyShardedDataParallel(plain, mixed_precision=MIXED)
    model(torch.ones(2)).backward()
    assert [b.dtype for b in plain.buffers()] == [BF16, FP16, BF16]
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)
    inner = {name.removeprefix("twins."): value for name, value in expected.items() if ".inner." in name}
    inner = {name.removeprefix("inner."): value for name, value in inner.items()}
    assert_same_tensors(saved_buffers(twins.inner, inner), inner, "buffer", bitwise=True)  # B6: not the root
    assert [b.dtype for b in plain.buffers()] == [BF16, FP16, BF16]


@ranks(2)
def test_B4_B6_B9_each_unit_by_its_own_policy(rank: int) -> None:
    check_units_that_differ(rank)


def check_twins_in_one_unit(rank: int) -> None:
    """One local name with three dtypes and shapes, in one unit."""
    plain = Chain()
    expected = persistent_buffers(plain)
    model = FullyShardedDataParallel(plain, mixed_precision=MixedPrecision(BF16, FP32, FP16))
    model(torch.ones(2)).backward()
    assert [b.dtype for b in plain.buffers()] == [FP16, FP16, FP16]
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)


@ranks(2)
def test_B4_one_local_name_in_one_unit(rank: int) -> None:
    check_twins_in_one_unit(rank)


def check_nested_wrappers(rank: int) -> None:
    """Wrappers around wrappers' children, checkpoint wrappers between them."""
    plain = OddTransformer(blocks=2)
    expected = persistent_buffers(plain)
    for block in plain.blocks:
        inner = checkpoint_wrapper(block.feed_forward)
        block.feed_forward = FullyShardedDataParallel(inner, mixed_precision=MIXED)
    plain.blocks[1] = FullyShardedDataParallel(checkpoint_wrapper(plain.blocks[1]), mixed_precision=MIXED)
    model = FullyShardedDataParallel(plain, mixed_precision=MIXED)
    model.eval()
    step(model, rank)
    inside = "_checkpoint_wrapped_module."
    state = {name.replace(inside, ""): value for name, value in model.state_dict().items()}
    assert {name: state.get(name) for name in expected}.keys() == expected.keys()
    assert_same_tensors({n: state.get(n) for n in expected}, expected, "buffer", bitwise=True)
    slopes = [buffer.dtype for name, buffer in model.named_buffers() if "slope" in name]
    assert slopes == [BF16, BF16]


@ranks(2)
def test_B7_wrappers_in_the_path(rank: int) -> None:
    check_nested_wrappers(rank)


@ranks(2)
def test_B9_ignored_modules_are_untouched(rank: int) -> None:
    plain = OddTransformer()
    ignored = plain.blocks[1].feed_forward
    slope = ignored.slope_fp32
    model = FullyShardedDataParallel(plain, mixed_precision=MIXED, ignored_modules=[ignored])
    with torch.no_grad(), torch.autocast("cpu", BF16):
        loss(model, batch(rank, 0))
    assert ignored.slope_fp32 is slope
    assert plain.blocks[0].feed_forward.slope_fp32.dtype is BF16
    assert model.state_dict()["blocks.1.feed_forward.slope_fp32"].dtype is FP32


@ranks(2)
def test_U34_fully_shard_leaves_buffers(rank: int) -> None:
    plain = OddTransformer()
    objects = dict(plain.named_buffers())
    model = shard(plain, "fully_shard", plain.units(), mp_policy=MixedPrecisionPolicy(BF16, FP32))
    step(model, rank)
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    assert model.steady.running_mean.dtype is FP32


def check_load(front: str, rank: int) -> None:
    """A value that bf16 cannot hold goes in and out of a model in the middle of training."""
    plain = OddTransformer()
    model = shard(plain, front, plain.units(), mixed_precision=MIXED)
    step(model, rank)
    other = persistent_buffers(OddTransformer(seed=7))
    state = model.state_dict() | other
    model.load_state_dict(state)
    assert_same_tensors(saved_buffers(model, other), other, "buffer", bitwise=True)
    model.eval()
    with torch.no_grad():
        loss(model, batch(rank, 0))
    assert torch.equal(plain.gain_fp32, other["gain_fp32"].to(BF16))
    assert_same_tensors(saved_buffers(model, other), other, "buffer", bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_B11_loaded_exactly(front: str, rank: int) -> None:
    check_load(front, rank)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_module_to_another_dtype_converts_the_originals(front: str, rank: int) -> None:
    plain = OddTransformer().eval()
    expected = {name: value.double() if value.is_floating_point() else value
                for name, value in persistent_buffers(plain).items() if name != "phase_complex"}
    model = shard(plain, front, plain.units(), mixed_precision=MIXED)
    step(model, rank)
    model.double()
    assert plain.gain_fp32.dtype is FP64
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)
    with torch.no_grad():
        loss(model, batch(rank, 0))
    assert plain.gain_fp32.dtype is BF16
    assert_same_tensors(saved_buffers(model, expected), expected, "buffer", bitwise=True)


@ranks(2)
def test_C13_a_copy_has_the_originals(rank: int) -> None:
    plain = OddTransformer().eval()
    expected = persistent_buffers(plain)
    model = shard(plain, "orig", plain.units(), mixed_precision=MIXED)
    step(model, rank)
    twin = copy.deepcopy(model)
    assert_same_tensors(saved_buffers(twin, expected), expected, "buffer", bitwise=True)
    for one in (model, twin):
        with torch.no_grad():
            one(batch(rank, 0)[0])
        assert one.gain_fp32.dtype is BF16
        assert one.steady.running_mean.dtype is FP32
        assert_same_tensors(saved_buffers(one, expected), expected, "buffer", bitwise=True)


@ranks(2)
def test_original_dtypes_are_known_from_construction(rank: int) -> None:
    plain = OddTransformer()
    block = FullyShardedDataParallel(plain.blocks[0], mixed_precision=MIXED)
    unit = shardwise.engine.hooks.unit_of(block)
    assert unit is not None
    assert unit.buffers.original_dtypes == {"feed_forward.slope_fp32": FP32}
