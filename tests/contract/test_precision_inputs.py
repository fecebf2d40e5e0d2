"""Inputs, outputs and norms under mixed precision: rows A38, B9, U28, U29, U31."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from shardwise.wrap import ModuleWrapPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, full_gradients, shard
from tests.bed.parity import assert_same_tensors

BF16, FP32 = torch.bfloat16, torch.float32


class Inner(nn.Module):
    """Takes a scale beside its input, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5))

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> Tensor:
        self.__dict__["seen"] = (x.dtype, extra["scale"].dtype, extra["ids"].dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype)) * extra["scale"][0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.bias = nn.Parameter(torch.linspace(0, 1, 7))

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        self.__dict__["seen"] = (x.dtype, extra["scale"].dtype, extra["ids"].dtype)
        return self.inner(x.float(), extra=extra) + self.bias


def arguments() -> tuple[Tensor, dict[str, Any]]:
    x = torch.linspace(-2, 2, 15).view(3, 5).requires_grad_()
    return x, {"scale": torch.tensor([0.5]), "ids": torch.tensor([301])}


@ranks(2)
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("front", WRAPPERS)
def test_U29_which_inputs_the_wrapper_casts(front: str, nested: bool, root: bool, rank: int) -> None:
    plain = Outer()
    mp = MixedPrecision(BF16, FP32, cast_forward_inputs=nested, cast_root_forward_inputs=root)
    model = shard(plain, front, [plain.inner], mixed_precision=mp)
    inner = plain.inner.module
    x, extra = arguments()
    for _ in range(2):  # in evaluation as in training
        model(x, extra)
        at_root = BF16 if root or nested else FP32
        assert plain.seen == (at_root, at_root, torch.int64)
        assert inner.seen == (BF16 if nested else FP32, BF16 if nested else at_root, torch.int64)
        model.eval()
    model(x, extra).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32
    assert extra["scale"].dtype is FP32  # the caller's dict is not changed


@ranks(2)
@pytest.mark.parametrize("cast", [True, False])
def test_U29_which_inputs_fully_shard_casts(cast: bool, rank: int) -> None:
    plain = Outer()
    policy = MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=cast)
    model = shard(plain, "fully_shard", [plain.inner], mp_policy=policy)
    x, extra = arguments()
    model(x, extra).float().sum().backward()
    seen = (BF16, BF16, torch.int64) if cast else (FP32, FP32, torch.int64)
    assert plain.seen == seen
    assert plain.inner.seen == seen
    assert x.grad.dtype is FP32


@ranks(2)
def test_U28_outputs_in_the_dtype_asked_for(rank: int) -> None:
    class Several(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = super().forward(x)
            return {"y": [y], "ids": torch.tensor([1]), "low": y.double()}

    torch.manual_seed(3)
    linear = Several(5, 3)
    reference = copy.deepcopy(linear).bfloat16()
    model = shard(linear, "fully_shard", mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
    x = torch.linspace(-2, 2, 15).view(3, 5).requires_grad_()
    out = model(x)
    assert (out["y"][0].dtype, out["ids"].dtype, out["low"].dtype) == (FP32, torch.int64, FP32)
    assert torch.equal(out["y"][0], reference(x.bfloat16())["y"][0].float())
    out["y"][0].sum().backward()
    assert x.grad.dtype is FP32
    assert model.weight.grad is not None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rnn = nn.GRU(5, 3)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        assert packed.data.dtype is BF16
        return self.rnn(packed)[0]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A38_packed_sequences_go_in_and_out(front: str, rank: int, world: int) -> None:
    packed = pack_sequence([torch.ones(2, 5), torch.ones(4, 5) / 3], enforce_sorted=False)
    reference = Recurrent().bfloat16()
    reference(packed.to(BF16)).data.float().sum().backward()
    option = {"mp_policy": MixedPrecisionPolicy(BF16, FP32)} if front == "fully_shard" else {
        "mixed_precision": MixedPrecision(BF16, FP32)}
    model = shard(Recurrent(), front, **option)
    model(packed).data.float().sum().backward()
    grads = {name: p.grad.float() for name, p in reference.named_parameters()}
    assert_same_tensors(full_gradients(model, list(grads)), grads, "gradient", bitwise=True)


# ---------------------------------------------------------------------- norms
class Scale(nn.LayerNorm):
    """A norm of the user's, with a part below it; sees what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.after = nn.Linear(width, width)
        self.register_buffer("shift_fp32", torch.full((width,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["seen"] = (x.dtype, self.weight.dtype, self.after.weight.dtype, self.shift_fp32.dtype)
        return self.after(super().forward(x)) + self.shift_fp32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=0.01), nn.ReLU())
        self.scale = Scale(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale(self.body(x)))

    def by_hand(self, x: Tensor) -> Tensor:
        """The same in bf16 around full-precision norms, where this module itself is in those dtypes."""
        y = self.body[2](self.body[1](self.body[0](x.bfloat16()).float()).bfloat16())
        return self.head(self.scale(y.float()).bfloat16())


KEPT = (nn.modules.batchnorm._BatchNorm, Scale)


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank)) + 3


def _reference(rank: int, steps: int) -> Normed:
    model = Normed()
    for module in (model.body[0], model.head):
        module.bfloat16()
    for step in range(steps):
        model.by_hand(rows(rank, step)).float().sum().backward()
    return model


@ranks(2)
@pytest.mark.parametrize("buffer", [None, BF16])
@pytest.mark.parametrize("how", ["by hand", "whole", "auto"])
@pytest.mark.parametrize("front", WRAPPERS)
def test_U31_norm_classes_keep_full_precision(
    front: str, how: str, buffer: torch.dtype | None, rank: int, world: int
) -> None:
    mp = MixedPrecision(BF16, FP32, buffer, _module_classes_to_ignore=KEPT)
    plain, names = Normed(), [name for name, _ in Normed().named_parameters()]
    scale = plain.scale
    options = {"use_orig_params": front == "orig", "mixed_precision": mp}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "by hand":
            plain.body = FullyShardedDataParallel(plain.body, **options)
            plain.scale = FullyShardedDataParallel(plain.scale, **options)
        policy = ModuleWrapPolicy({nn.Sequential}) if how == "auto" else None
        model = FullyShardedDataParallel(plain, auto_wrap_policy=policy, **options)
    assert any("units of their own" in str(w.message) for w in caught) == (how == "auto")
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == {"by hand": 3, "whole": 1, "auto": 4}[how]
    for step in range(4):
        model(rows(rank, step)).float().sum().backward()
    assert scale.seen == (FP32, FP32, FP32, FP32)
    mine = _reference(rank, 4)
    assert_same_tensors({n: b for n, b in model.named_buffers() if "body" in n},
                        {n: b for n, b in mine.named_buffers() if "body" in n}, "buffer", bitwise=True)
    norm = plain.get_submodule("body.1")
    assert norm.num_batches_tracked.dtype is torch.int64
    assert norm.num_batches_tracked.item() == 4
    grads = [dict(_reference(r, 4).named_parameters()) for r in range(world)]
    expected = {n: sum(g[n].grad.float() for g in grads) / world for n in names}
    assert_same_tensors(full_gradients(model, names), expected, "gradient", rtol=2e-2, atol=2e-2)


@ranks(2)
def test_U31_batch_norm_under_fully_shard(rank: int) -> None:
    plain = Normed()
    plain.scale = nn.Identity()
    for module in (plain.body, plain):
        shardwise.fully_shard(module, mp_policy=MixedPrecisionPolicy(BF16))
    for step in range(4):
        plain(rows(rank, step)).float().sum().backward()
    norm, mine = plain.body[1], _reference(rank, 4).body[1]
    assert torch.equal(norm.running_mean, mine.running_mean)
    assert torch.equal(norm.running_var, mine.running_var)
    assert norm.num_batches_tracked.item() == 4


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_U31_norms_in_a_recomputed_part(reentrant: bool, rank: int) -> None:
    class Recomputed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return self.head(checkpoint(lambda y: self.scale(self.body(y)), x, use_reentrant=reentrant))

    plain, names = Recomputed(), [name for name, _ in Normed().named_parameters()]
    plain.body[1].eval()  # its statistics would move twice
    reference = Normed()
    reference.body[1].eval()
    mp = MixedPrecision(BF16, FP32, _module_classes_to_ignore=KEPT)
    models = [shard(one, "orig", mixed_precision=mp) for one in (plain, reference)]
    for model in models:
        for _ in range(2):
            model(rows(rank, 0)).float().sum().backward()
    ours, theirs = (full_gradients(model, names) for model in models)
    assert_same_tensors(ours, theirs, "gradient", bitwise=True)
