"""Buffers under mixed precision, one unit at a time: rows B1-B5, B9-B11, C5, U32-U34."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.buffers import UnitBuffers, buffers_for_checkpoint, buffers_for_compute, cast_buffers
from tests.bed.models import TwinBuffers

FLOATS = {"gain_fp32": torch.float32, "table_fp64": torch.float64, "tilt_fp16": torch.float16,
          "shift_bf16": torch.bfloat16}
OTHERS = ("count_int64", "keep_bool", "phase_complex")


class Holder(nn.Module):
    """A buffer of every kind, with values that a narrower dtype cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for size, (name, dtype) in enumerate(FLOATS.items(), start=2):
            self.register_buffer(name, (torch.rand(size, dtype=torch.float64) / 3).to(dtype))
        self.register_buffer("count_int64", torch.tensor(2**40 + 1))
        self.register_buffer("keep_bool", torch.tensor([True, False, True]))
        self.register_buffer("phase_complex", torch.rand(4, dtype=torch.complex64))
        self.register_buffer("absent", None)
        self.register_buffer("scratch", torch.rand(7) / 11, persistent=False)


def observed(module: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> UnitBuffers:
    buffers = UnitBuffers()
    buffers.observe(module.named_modules(), dtype)
    return buffers


def same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.dtype is b.dtype and torch.equal(a, b)


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_B5_B10_only_floating_buffers_are_cast() -> None:
    module = Holder()
    objects = dict(module.named_buffers())
    observed(module).for_compute()
    for name, buffer in module.named_buffers():
        if name in OTHERS:
            assert buffer is objects[name], name
        else:
            assert same(buffer, objects[name].to(torch.bfloat16)), name
    assert module.shift_bf16 is objects["shift_bf16"]
    assert module.absent is None
    assert "scratch" in module._non_persistent_buffers_set


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_B1_B11_originals_come_back_as_the_same_objects(dtype: torch.dtype) -> None:
    module = Holder()
    objects, values = dict(module.named_buffers()), copies(module)
    buffers = observed(module, dtype)
    buffers.for_compute()
    for name, value in values.items():
        exact = buffers.exact(name)
        assert same(value if exact is None else exact, value), name
    buffers.for_checkpoint()
    assert dict(module.named_buffers()) == objects
    assert all(same(buffer, values[name]) for name, buffer in module.named_buffers())


def test_no_dtype_leaves_everything() -> None:
    module = Holder()
    objects = dict(module.named_buffers())
    buffers = observed(module, None)
    buffers.for_compute()
    assert dict(module.named_buffers()) == objects
    assert not buffers.is_cast
    assert buffers.exact("gain_fp32") is None


def test_casting_is_idempotent_and_alternates() -> None:
    module = Holder()
    buffers, values = observed(module), copies(module)
    for _ in range(3):
        buffers.for_compute()
        cast = module.gain_fp32
        buffers.for_compute()
        assert module.gain_fp32 is cast
        assert buffers.is_cast
        buffers.for_checkpoint()
        buffers.for_checkpoint()
        assert not buffers.is_cast
    assert same(module.table_fp64, values["table_fp64"])


def test_B4_one_local_name_with_three_dtypes() -> None:
    module = TwinBuffers()
    buffers, values = observed(module, torch.float16), copies(module)
    assert buffers.original_dtypes == {
        "level": torch.float32, "inner.level": torch.float64, "inner.inner.level": torch.bfloat16}
    buffers.for_compute()
    for name, value in values.items():
        assert same(buffers.exact(name), value), name
    assert buffers.exact("inner.inner.inner.level") is None


def test_B5_three_functions() -> None:
    module, other = Holder(), TwinBuffers()
    units = [observed(module), observed(other, torch.float64)]
    chosen = [(entry.name, dtype) for entry, dtype in buffers_for_compute(units)]
    assert chosen == [("gain_fp32", torch.bfloat16), ("table_fp64", torch.bfloat16),
                      ("tilt_fp16", torch.bfloat16), ("scratch", torch.bfloat16),
                      ("level", torch.float64), ("level", torch.float64)]
    assert buffers_for_checkpoint(units) == []
    cast_buffers(buffers_for_compute(units))
    back = [(entry.name, dtype) for entry, dtype in buffers_for_checkpoint(units)]
    assert back == [("gain_fp32", torch.float32), ("table_fp64", torch.float64), ("tilt_fp16", torch.float16),
                    ("scratch", torch.float32), ("level", torch.float32), ("level", torch.bfloat16)]
    cast_buffers(buffers_for_compute(units), torch.device("cpu"))
    assert module.gain_fp32.dtype is torch.bfloat16


def test_cast_buffers_moves_to_a_device() -> None:
    module = Holder()
    cast_buffers(buffers_for_compute([observed(module)]), torch.device("meta"))
    assert module.gain_fp32.is_meta
    assert module.gain_fp32.dtype is torch.bfloat16
    assert not module.count_int64.is_meta


def test_B2_a_unit_casts_only_its_own_modules() -> None:
    module = TwinBuffers()
    outer, inner = UnitBuffers(), UnitBuffers()
    inner.observe(module.inner.named_modules(), torch.float16)
    outer.observe([("", module)], torch.bfloat16)
    outer.for_compute()
    assert [b.dtype for b in module.buffers()] == [torch.bfloat16, torch.float64, torch.bfloat16]
    inner.for_compute()
    assert [b.dtype for b in module.buffers()] == [torch.bfloat16, torch.float16, torch.float16]
    outer.for_checkpoint()
    assert [b.dtype for b in module.buffers()] == [torch.float32, torch.float16, torch.float16]


CHANGES: dict[str, Callable[[Holder], object]] = {
    "in place": lambda m: m.gain_fp32.mul_(3),
    "behind autograd's back": lambda m: m.gain_fp32.data.copy_(torch.tensor([7.0, 9.0])),
    "assigned": lambda m: setattr(m, "gain_fp32", m.gain_fp32 * 3),
    "registered again": lambda m: m.register_buffer("gain_fp32", m.gain_fp32 - 1),
    "another shape": lambda m: setattr(m, "gain_fp32", torch.cat([m.gain_fp32, m.gain_fp32])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_B11_what_changed_is_given_in_the_original_dtype(change: str) -> None:
    module = Holder()
    original = module.gain_fp32
    buffers = observed(module)
    buffers.for_compute()
    CHANGES[change](module)
    expected = module.gain_fp32.float()
    assert same(buffers.exact("gain_fp32"), expected)
    assert module.gain_fp32.dtype is torch.bfloat16
    buffers.for_checkpoint()
    assert same(module.gain_fp32, expected)
    if change != "another shape":
        assert module.gain_fp32 is original  # the registered object, with its new value
    buffers.for_compute()
    assert same(module.gain_fp32, expected.bfloat16())


def test_B11_a_change_that_rounds_away_costs_no_bit() -> None:
    module = Holder()
    value = module.gain_fp32.clone()
    buffers = observed(module)
    buffers.for_compute()
    module.gain_fp32.add_(0.0)
    assert same(buffers.exact("gain_fp32"), value)


def test_B11_not_a_number_is_compared_by_its_bits() -> None:
    module = Holder()
    module.gain_fp32[0] = float("nan")
    value = module.gain_fp32.clone()
    buffers = observed(module)
    buffers.for_compute()
    exact = buffers.exact("gain_fp32")
    assert exact is not None
    assert torch.equal(exact[1:], value[1:])


def test_a_third_dtype_is_a_new_original() -> None:
    module = Holder()
    buffers = observed(module)
    buffers.for_compute()
    value = torch.rand(2, dtype=torch.float64) / 3
    module.gain_fp32 = value
    assert buffers.exact("gain_fp32") is None
    buffers.for_compute()
    assert same(module.gain_fp32, value.bfloat16())
    assert buffers.exact("gain_fp32") is value
    assert buffers.original_dtypes["gain_fp32"] is torch.float64


def test_a_buffer_that_comes_late_or_goes() -> None:
    module = Holder()
    buffers = observed(module)
    buffers.for_compute()
    module.absent = torch.rand(2) / 3
    module.register_buffer("late", torch.rand(3) / 3)
    late, module.gain_fp32 = module.late.clone(), None
    del module.table_fp64
    buffers.for_compute()
    assert module.absent.dtype is module.late.dtype is torch.bfloat16
    assert same(buffers.exact("late"), late)
    assert buffers.exact("gain_fp32") is None
    assert buffers.exact("table_fp64") is None
    buffers.for_checkpoint()
    assert same(module.late, late)
    assert module.gain_fp32 is None


def test_a_dtype_changed_before_the_first_cast_is_the_original_one() -> None:
    module = Holder()
    buffers = observed(module)
    module.bfloat16()
    buffers.for_compute()
    assert buffers.exact("gain_fp32") is None
    assert buffers.original_dtypes["gain_fp32"] is torch.bfloat16


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.rand(3) / 3)
        self.register_buffer("right", self.left)
        self.child = nn.Module()
        self.child.register_buffer("again", self.left)


def test_a_shared_buffer_stays_shared_within_and_across_units() -> None:
    module = Sharing()
    original, value = module.left, module.left.clone()
    inner, outer = UnitBuffers(), UnitBuffers()
    inner.observe([("", module.child)], torch.bfloat16)
    outer.observe([("", module)], torch.bfloat16)
    inner.for_compute()
    outer.for_compute()
    assert module.left is module.right is module.child.again
    assert same(outer.exact("left"), value)
    module.left.mul_(2)
    assert same(inner.exact("again"), module.left.float())
    outer.for_checkpoint()
    inner.for_checkpoint()
    assert module.left is module.right is module.child.again is original


def test_a_shared_buffer_loaded_through_one_unit_is_seen_by_its_cast() -> None:
    module = Sharing()
    inner, outer = UnitBuffers(), UnitBuffers()
    inner.observe([("", module.child)], torch.bfloat16)
    outer.observe([("", module)], torch.bfloat16)
    cast_buffers(buffers_for_compute([inner, outer]))
    outer.for_checkpoint()
    module.left.copy_(torch.tensor([1.0, 2.0, 3.0]))
    outer.for_compute()
    assert same(module.left, torch.tensor([1.0, 2.0, 3.0]).bfloat16())
    assert same(outer.exact("left"), torch.tensor([1.0, 2.0, 3.0]))


def test_a_module_of_two_units_is_cast_by_the_first() -> None:
    module = TwinBuffers(2)
    value = module.level.clone().float()
    module.level = value.clone()
    first, second = UnitBuffers(), UnitBuffers()
    first.observe([("a", module)], torch.float16)
    second.observe([("b", module)], torch.bfloat16)
    cast_buffers(buffers_for_compute([second, first]))
    assert module.level.dtype is torch.float16
    assert same(first.exact("a.level"), value)
    assert same(second.exact("b.level"), value)


def test_a_unit_that_is_gone_decides_nothing() -> None:
    module = TwinBuffers(2).float()
    observed(module, torch.float16)
    later = observed(module, torch.bfloat16)
    later.for_compute()
    assert module.level.dtype is torch.bfloat16


def test_suspended_buffers_stay() -> None:
    module = Holder()
    buffers = observed(module)
    buffers.suspended = True
    buffers.for_compute()
    assert module.gain_fp32.dtype is torch.float32


def test_casts_made_in_inference_mode_can_be_trained_with() -> None:
    module = Holder()
    buffers = observed(module)
    with torch.inference_mode():
        buffers.for_compute()
    assert not module.gain_fp32.is_inference()
    module.gain_fp32.add_(1)
    with torch.inference_mode():
        module.scratch = module.scratch + 1
    assert same(buffers.exact("scratch"), module.scratch.float())
    buffers.for_checkpoint()
