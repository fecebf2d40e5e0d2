"""Dtypes of parameters and of their gradients in every phase: rows A29, C18, U27, U30, U57, U58."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import (
    FRONTS,
    WRAPPERS,
    counted,
    full_gradients,
    full_parameters,
    shard,
    units,
    unsynced,
)
from tests.bed.models import TinyMLP, points
from tests.bed.parity import assert_same_tensors

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = [name for name, _ in TinyMLP().named_parameters()]


class Probe(TinyMLP):
    """Notes the dtypes that its forward sees."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["seen"] = (x.dtype, self.inward.weight.dtype, self.middle.weight.dtype)
        return super().forward(x)


def mixed(front: str, **options: Any) -> dict[str, Any]:
    """Precision options as arguments of either front end."""
    if front == "fully_shard":
        return {"mp_policy": MixedPrecisionPolicy(**options)}
    return {"mixed_precision": MixedPrecision(**options)}


def local_gradients(rank: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of one rank's rows, computed in ``dtype`` without any sharding."""
    model = TinyMLP().to(dtype)
    model(points(rank, step)[0].to(dtype)).float().square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model(points(rank, step)[0]).float().square().sum().backward()


def expected_gradients(
    world: int, compute: torch.dtype, wire: torch.dtype, final: torch.dtype
) -> dict[str, Tensor]:
    """The mean over ranks with every rounding where the page says it is."""
    parts = [local_gradients(rank, 0, compute) for rank in range(world)]
    before = world if wire is FP16 else 1  # two ranks: all of the division comes first
    means: dict[str, Tensor] = {}
    for name in NAMES:
        total = sum((part[name] / before).to(wire) for part in parts)
        assert isinstance(total, Tensor)
        means[name] = (total / (world / before)).to(final)
    return means


@ranks(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("param", [None, BF16, FP16])
@pytest.mark.parametrize("front", WRAPPERS)
def test_A29_U30_dtype_device_and_value(
    front: str, param: torch.dtype | None, keep: bool, rank: int, world: int
) -> None:
    for reduce in (None, BF16, FP16, FP32):
        options = {"param_dtype": param, "reduce_dtype": reduce, "keep_low_precision_grads": keep}
        compute, wire = param or FP32, reduce or param or FP32
        plain = Probe()
        with counted() as traffic:
            model = shard(plain, front, [plain.middle], **mixed(front, **options))
            backward(model, rank)
        assert plain.seen[1] is compute
        assert {c.dtype for c in traffic.calls if c.operation == "all_gather"} == {compute}
        assert {c.dtype for c in traffic.calls if c.operation == "reduce_scatter"} == {wire}
        final = wire if keep else FP32
        for parameter in model.parameters():
            assert parameter.dtype is FP32
            assert parameter.grad is not None
            assert (parameter.grad.dtype, parameter.grad.device.type) == (final, "cpu")
        assert_same_tensors(full_gradients(model, NAMES), expected_gradients(world, compute, wire, final),
                            "gradient", bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C18_each_dtype_chosen_by_itself(front: str, rank: int, world: int) -> None:
    plain = Probe()
    model = shard(plain, front, [plain.middle], **mixed(
        front, param_dtype=BF16, reduce_dtype=FP16, accumulate_dtype=FP64, grad_dtype=BF16))
    with unsynced(model, front):
        backward(model, rank)
    buffers = [unit.collector.buffer for unit in units(model).values()]
    assert plain.seen[1] is BF16
    assert [buffer.tensor.dtype for buffer in buffers if buffer is not None] == [FP64, FP64]
    backward(model, rank)
    parts = [local_gradients(r, 0, BF16) for r in range(world)]
    expected = {name: sum(part[name].to(FP16) for part in parts).to(BF16) for name in NAMES}
    assert_same_tensors(full_gradients(model, NAMES), expected, "gradient", rtol=1e-2, atol=1e-3)
    assert all(p.grad.dtype is BF16 for p in model.parameters())


class Ones(nn.Module):
    """Its gradient is one at each element, in each backward."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.level * x).sum()


@ranks(2)
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("front", FRONTS)
def test_U58_small_gradients_add_up_on_a_large_one(front: str, quiet: bool, rank: int) -> None:
    """In bf16 256 + 1 is 256, whichever of the two ways gradients are added up."""
    model = shard(Ones(), front, **mixed(front, param_dtype=BF16, reduce_dtype=FP32))
    with unsynced(model, front, quiet=quiet):
        for value in (256.0, *[1.0] * 7):
            model(torch.full((6,), value)).backward()
    model(torch.ones(6)).backward()
    assert torch.equal(full_gradients(model, ["level"])["level"], torch.full((6,), 264.0))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U58_low_precision_masters_add_up_in_fp32_while_unsent(front: str, rank: int) -> None:
    model = shard(Ones(BF16), front)
    with unsynced(model, front):
        for value in (256.0, *[1.0] * 7):
            model(torch.full((6,), value, dtype=BF16)).backward()
    model(torch.ones(6, dtype=BF16)).backward()
    assert torch.equal(full_gradients(model, ["level"])["level"], torch.full((6,), 264.0, dtype=BF16))


@ranks(2)
def test_U59_chunks_that_wait_for_replicas_add_up_in_fp32(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = shard(Ones(), "fully_shard", mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16))
    model.set_requires_all_reduce(False)
    for value in (256.0, *[1.0] * 7):
        model(torch.full((6,), value)).backward()
    model.set_requires_all_reduce(True)
    model(torch.ones(6)).backward()
    assert torch.equal(full_gradients(model, ["level"])["level"], torch.full((6,), 264.0))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U57_fp16_is_divided_before_the_sum(front: str, rank: int) -> None:
    """40,000 on both ranks: their sum is infinite in fp16, their mean is not."""
    model = shard(Ones(), front, **mixed(front, param_dtype=FP16))
    model(torch.full((6,), 40_000.0)).backward()
    assert torch.equal(full_gradients(model, ["level"])["level"], torch.full((6,), 40_000.0))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U57_divided_before_the_cast_to_fp16(front: str, rank: int) -> None:
    """100,000 computed in fp32 is infinite in fp16, its half is not; accumulated or not."""
    for quiet in (False, True):
        model = shard(Ones(), front, **mixed(front, reduce_dtype=FP16))
        with unsynced(model, front, quiet=quiet):
            model(torch.full((6,), 100_000.0 * (1 - rank))).backward()
        if quiet:
            model(torch.zeros(6)).backward()
        expected = torch.full((6,), 50_000.0).half().float()
        assert torch.equal(full_gradients(model, ["level"])["level"], expected)


@ranks(4)
def test_U57_powers_of_two_on_both_sides(rank: int) -> None:
    model: Any = shard(Ones(), "fully_shard", mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    reducer = units(model)[""].reducer
    assert (reducer.pre_divisor(FP16), reducer.pre_divisor(BF16)) == (2.0, 1.0)
    model(torch.full((6,), 30_000.0)).backward()
    assert torch.equal(full_gradients(model, ["level"])["level"], torch.full((6,), 30_000.0))


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_U30_kept_low_gradients_accumulate_are_clipped_and_cleared(front: str, rank: int) -> None:
    model: Any = shard(TinyMLP(), front, **mixed(
        front, param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True))
    backward(model, rank)
    first = full_gradients(model, NAMES)
    backward(model, rank)
    second = full_gradients(model, NAMES)
    assert_same_tensors(second, {n: g + g for n, g in first.items()}, "gradient", bitwise=True)
    assert all(p.grad_dtype is BF16 for p in model.parameters())
    whole = torch.cat([g.float().flatten() for g in second.values()]).norm()
    norm = model.clip_grad_norm_(0.5)
    assert norm.dtype is BF16
    torch.testing.assert_close(norm.float(), whole, rtol=1e-2, atol=0.0)
    clipped = torch.cat([g.float().flatten() for g in full_gradients(model, NAMES).values()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=2e-2, atol=0.0)
    model.zero_grad(set_to_none=False)
    assert all(p.grad.dtype is BF16 and not p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
@pytest.mark.parametrize("front", FRONTS)
def test_another_stored_dtype_after_sharding(front: str, change: str, rank: int, world: int) -> None:
    dtype = getattr(torch.zeros(1), change)().dtype
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    backward(model, rank)
    model.zero_grad()
    getattr(model, change)()
    model(points(rank, 0)[0].to(dtype)).float().square().sum().backward()
    assert all(p.dtype is dtype and p.grad.dtype is dtype for p in model.parameters())
    expected = expected_gradients(world, dtype, dtype, dtype)
    assert_same_tensors(full_gradients(model, NAMES), expected, "gradient", bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_another_stored_dtype_while_gradients_are_unsent(front: str, rank: int, world: int) -> None:
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle], **mixed(front, param_dtype=BF16, reduce_dtype=FP32))
    with unsynced(model, front):
        backward(model, rank)
        model.double()
        backward(model, rank)
    backward(model, rank)
    parts = [local_gradients(r, 0, BF16) for r in range(world)]
    expected = {n: (3 * sum(part[n].float() for part in parts) / world).double() for n in NAMES}
    assert_same_tensors(full_gradients(model, NAMES), expected, "gradient", rtol=1e-5, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U35_units_that_differ(front: str, rank: int, world: int) -> None:
    """The root in bf16, one unit in fp16, one as stored; inputs are cast where asked for."""
    plain = Probe()
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor]) -> None:
            seen[name] = (args[0].dtype, module.weight.dtype)
        return hook

    if front == "fully_shard":
        shardwise.fully_shard(plain.middle, mp_policy=MixedPrecisionPolicy(FP16, FP32))
        shardwise.fully_shard(plain.outward, mp_policy=MixedPrecisionPolicy(FP32))
        model: Any = shardwise.fully_shard(plain, mp_policy=MixedPrecisionPolicy(BF16))
    else:
        orig = {"use_orig_params": front == "orig"}
        wrap = shardwise.FullyShardedDataParallel
        half, whole = (MixedPrecision(dtype, FP32, cast_forward_inputs=True) for dtype in (FP16, FP32))
        plain.middle = wrap(plain.middle, mixed_precision=half, **orig)
        plain.outward = wrap(plain.outward, mixed_precision=whole, **orig)
        model = wrap(plain, mixed_precision=MixedPrecision(BF16), **orig)
    for name in ("inward", "middle", "outward"):
        inner = getattr(plain, name)
        getattr(inner, "module", inner).register_forward_pre_hook(note(name))
    backward(model, rank)
    assert seen == {"inward": (BF16, BF16), "middle": (FP16, FP16), "outward": (FP32, FP32)}
    reference = [copy.deepcopy(TinyMLP()) for _ in range(world)]
    for r, one in enumerate(reference):
        one.inward.bfloat16()
        one.middle.half()
        x = torch.tanh(one.inward(points(r, 0)[0].bfloat16()))
        x = torch.tanh(one.middle(x.half()))
        one.outward(x.float()).square().sum().backward()
    wires = {"inward": BF16, "middle": FP32, "outward": FP32}
    expected = {
        n: (sum(one.get_parameter(n).grad.to(wires[n.split(".")[0]]) for one in reference) / world).float()
        for n in NAMES
    }
    assert_same_tensors(full_gradients(model, NAMES), expected, "gradient", bitwise=True)
    assert all(t.dtype is FP32 for t in full_parameters(model, NAMES).values())
