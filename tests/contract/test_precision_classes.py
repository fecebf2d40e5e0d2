"""Classes of modules that keep their dtype among others that do not (rows U31, U35)."""

from __future__ import annotations

import torch
from torch import nn

import shardwise
from shardwise import MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import counted, full_gradients
from tests.bed.models import points
from tests.bed.parity import assert_same_tensors

BF16, FP32 = torch.bfloat16, torch.float32


@ranks(2)
def test_U35_classes_that_keep_their_dtype_inside_a_unit(rank: int) -> None:
    """Norms in fp32 among bf16 layers: one gather and one reduction; the wrapper's option gives the same bits."""
    seen: dict[str, torch.dtype] = {}

    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))

    with counted() as traffic:
        model = shardwise.fully_shard(build(), mp_policy=MixedPrecisionPolicy(BF16, kept_classes=(nn.LayerNorm,)))
        for module in model:
            module.register_forward_pre_hook(
                lambda m, args: seen.update({type(m).__name__: m.weight.dtype, "input": args[0].dtype}))
        model(points(rank, 0)[0]).sum().backward()
    assert seen["Linear"] is BF16 and seen["LayerNorm"] is FP32
    assert traffic.count("all_gather") == traffic.count("reduce_scatter") == 1
    twin = shardwise.FullyShardedDataParallel(
        build(), use_orig_params=True,
        mixed_precision=MixedPrecision(BF16, _module_classes_to_ignore=(nn.LayerNorm,)))
    twin(points(rank, 0)[0]).sum().backward()
    names = [name for name, _ in build().named_parameters()]
    assert_same_tensors(full_gradients(model, names), full_gradients(twin, names), "gradient", bitwise=True)
