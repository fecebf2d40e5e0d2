"""Shards on the host, and the dtypes of gradients (rows A29, C18, U30, U37, U40, U41)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, full_gradients, shard, units, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins


def _offloaded(front: str) -> dict[str, Any]:
    if front == "fully_shard":
        return {"offload_policy": CPUOffloadPolicy()}
    return {"cpu_offload": CPUOffload(True)}


# ---------------------------------------------------------------------- the matrix of A29
_PARAM = (None, torch.bfloat16, torch.float16)
_REDUCE = (None, torch.float32, torch.bfloat16, torch.float16)


def _rank_gradients(dtype: torch.dtype | None, rank: int) -> dict[str, Tensor]:
    """What one rank alone gets in ``dtype``."""
    model = TinyMLP().to(dtype or torch.float32)
    inputs, targets = points(rank, 0)
    loss(model, (inputs.to(dtype or torch.float32), targets)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _expected(param: torch.dtype | None, wire: torch.dtype, world: int) -> dict[str, Tensor]:
    """The mean, summed on the wire; fp16 is divided by a part of the ranks before the sum."""
    before = 2.0 if wire is torch.float16 and world == 2 else 1.0
    parts = [_rank_gradients(param, rank) for rank in range(world)]
    return {name: sum((part[name] / before).to(wire) for part in parts).div_(world / before)
            for name in parts[0]}


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_A29_C18_U30_U41_dtype_device_and_value_of_gradients(
    front: str, rank: int, world: int
) -> None:
    """{offload} × {keep} × {param dtype} × {reduce dtype}: the wire's dtype is not the final one unless kept."""
    names = [name for name, _ in TinyMLP().named_parameters()]
    for param, reduce in itertools.product(_PARAM, _REDUCE):
        wire = reduce or param or torch.float32
        expected = _expected(param, wire, world)
        for offload, keep in itertools.product((False, True), (False, True)):
            case = f"param {param}, reduce {reduce}, offload {offload}, keep {keep}"
            precision = MixedPrecision(param_dtype=param, reduce_dtype=reduce, keep_low_precision_grads=keep)
            model = shard(TinyMLP(), front, mixed_precision=precision, cpu_offload=CPUOffload(offload))
            loss(model, points(rank, 0)).backward()
            final = wire if keep else torch.float32
            for parameter in model.parameters():
                assert parameter.dtype is torch.float32 and parameter.device.type == "cpu", case
                assert parameter.grad.dtype is final and parameter.grad.device == parameter.device, case
            for name, gradient in full_gradients(model, names).items():
                torch.testing.assert_close(gradient, expected[name].to(final), rtol=0, atol=0,
                                           msg=lambda text, case=case, name=name: f"{case}, {name}: {text}")
            _step(model)


def _step(model: nn.Module) -> None:
    """An optimizer takes gradients of another dtype than the parameter's, if they are fp32 by then."""
    if all(p.grad.dtype is torch.float32 for p in model.parameters()):
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.zero_grad()


@ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_A29_C18_every_dtype_chosen_apart(offload: bool, rank: int) -> None:
    """Parameters in use, wire, unsent sums and ``.grad``: four dtypes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16,
                                  accumulate_dtype=torch.float32, grad_dtype=torch.float64)
    model: Any = shard(TinyMLP(), "fully_shard", mp_policy=policy,
                       **(_offloaded("fully_shard") if offload else {}))
    collector = units(model)[""].collector
    with unsynced(model, "fully_shard"):
        loss(model, points(rank, 0)).backward()
        assert collector.buffer.tensor.dtype is torch.float32 and collector.wire_dtype is torch.float16
    loss(model, points(rank, 1)).backward()
    assert all(p.grad.dtype is torch.float64 and p.dtype is torch.float32 for p in model.parameters())


# ---------------------------------------------------------------------- training
@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("quiet", [False, True])
def test_U37_U40_accumulation_with_and_without_no_sync(
    front: str, quiet: bool, rank: int, world: int
) -> None:
    """Three backwards, clipping, a step: as without offload, whether each is sent or only the last."""
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda m: [m.middle], **_offloaded(front))
    for step in range(2):
        with unsynced(twins.model, front, quiet):
            twins.backward(3 * step)
            twins.backward(3 * step + 1)
        twins.backward(3 * step + 2)
        twins.check_gradients()
        norm = torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.05)
        expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05)
        torch.testing.assert_close(torch.as_tensor(float(norm)), expected)
        twins.update()
        twins.check_parameters()
    states = [value for state in twins.optimizers[1].state.values() for value in state.values()]
    assert all(value.device.type == "cpu" for value in states if isinstance(value, Tensor))


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_U37_every_strategy(front: str, strategy: str, rank: int, world: int) -> None:
    Twins(TinyMLP, front, (rank, world), inner=lambda m: [m.middle], strategy=strategy,
          cpu_offload=CPUOffload(True)).train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U40_U41_accumulated_low_precision_gradients(front: str, rank: int, world: int) -> None:
    """Sent twice and added in the dtype in which ``.grad`` is kept; unsent sums are made in fp32."""
    precision: dict[str, Any] = {
        "mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)}
    if front == "fully_shard":
        precision = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, grad_dtype=torch.bfloat16)}
    names = [name for name, _ in TinyMLP().named_parameters()]
    reference = _expected(torch.bfloat16, torch.bfloat16, world)
    for quiet in (False, True):
        model: Any = shard(TinyMLP(), front, **precision, **_offloaded(front))
        with unsynced(model, front, quiet):
            loss(model, points(rank, 0)).backward()
        loss(model, points(rank, 0)).backward()
        for name, gradient in full_gradients(model, names).items():
            assert gradient.dtype is torch.bfloat16
            torch.testing.assert_close(gradient, reference[name] * 2, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U37_parameter_groups_and_a_summon(front: str, rank: int, world: int) -> None:
    twins = Twins(TinyMLP, front, (rank, world), **_offloaded(front))
    twins.train(1)
    with shardwise.summon_full_params(twins.model):
        whole = dict(twins.model.named_parameters())
        for name, parameter in twins.plain.named_parameters():
            torch.testing.assert_close(whole[name].detach().as_subclass(Tensor), parameter.detach())
    twins.train(1)
    assert all(storage.shard.device.type == "cpu" for storage in units(twins.model)[""].storages)
