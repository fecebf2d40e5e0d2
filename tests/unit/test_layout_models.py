"""How little padding the planner leaves on decoder layers of published models, and whom it blames."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shardwise.plan.layout import Offender, ParameterSpec, find_offenders, plan_layout, row_granule

BF16 = 2

Shapes = dict[str, tuple[int, ...]]


def specs_of(shapes: Shapes, granule: Callable[[Sequence[int]], int] = row_granule) -> list[ParameterSpec]:
    return [ParameterSpec(fqn, shape, granule(shape)) for fqn, shape in shapes.items()]


def attention(hidden: int, query: int, key_value: int) -> Shapes:
    return {"q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden),
            "o_proj": (hidden, query), "input_norm": (hidden,), "post_norm": (hidden,)}


def gated_mlp(hidden: int, inner: int, prefix: str = "mlp") -> Shapes:
    widen, narrow = (inner, hidden), (hidden, inner)
    return {f"{prefix}.gate": widen, f"{prefix}.up": widen, f"{prefix}.down": narrow}


LLAMA3_70B = attention(8192, 8192, 1024) | gated_mlp(8192, 28672)

QWEN3_8B = attention(4096, 4096, 1024) | {"q_norm": (128,), "k_norm": (128,)} | gated_mlp(4096, 12288)

GPT_OSS_ATTENTION = attention(2880, 4096, 512) | {
    "q_bias": (4096,), "k_bias": (512,), "v_bias": (512,), "o_bias": (2880,), "sinks": (64,),
    "router": (128, 2880), "router_bias": (128,)}  # fmt: skip
GPT_OSS_120B = dict(GPT_OSS_ATTENTION)  # each expert a matrix of its own
for _e in range(128):
    GPT_OSS_120B |= {f"{_e}.gate_up": (5760, 2880), f"{_e}.gate_up_bias": (5760,),
                     f"{_e}.down": (2880, 2880), f"{_e}.down_bias": (2880,)}  # fmt: skip
GPT_OSS_120B_FUSED = GPT_OSS_ATTENTION | {
    "gate_up": (128, 2880, 5760), "gate_up_bias": (128, 5760),
    "down": (128, 2880, 2880), "down_bias": (128, 2880)}  # fmt: skip

DEEPSEEK_V3_ATTENTION: Shapes = {
    "q_a": (1536, 7168), "q_a_norm": (1536,), "q_b": (24576, 1536), "kv_a": (576, 7168), "kv_a_norm": (512,),
    "kv_b": (32768, 512), "o_proj": (7168, 16384), "input_norm": (7168,), "post_norm": (7168,)}  # fmt: skip
DEEPSEEK_V3_DENSE = DEEPSEEK_V3_ATTENTION | gated_mlp(7168, 18432)  # its first three layers
DEEPSEEK_V3 = DEEPSEEK_V3_ATTENTION | {"router": (256, 7168), "router_bias": (256,)}
for _e in range(257):  # the last one stands for the shared expert
    DEEPSEEK_V3 |= gated_mlp(7168, 2048, str(_e))

MODELS = {"Llama-3-70B": LLAMA3_70B, "Qwen3-8B": QWEN3_8B, "GPT-OSS-120B": GPT_OSS_120B,
          "DeepSeek-V3": DEEPSEEK_V3}  # fmt: skip


@pytest.mark.parametrize(("world_size", "mark"), [(8, 0.001), (64, 0.005), (256, 0.0125)])
@pytest.mark.parametrize("model", MODELS)
def test_row_granules_cost_little_on_published_layers(model: str, world_size: int, mark: float) -> None:
    assert plan_layout(specs_of(MODELS[model]), world_size, BF16).padding_ratio <= mark


@pytest.mark.parametrize("world_size", [1, 2, 8, 64, 1024])
@pytest.mark.parametrize("model", MODELS)
def test_element_granules_cost_less_than_256_bytes_per_rank(model: str, world_size: int) -> None:
    layout = plan_layout(specs_of(MODELS[model], lambda shape: 1), world_size, BF16)
    assert layout.padding * BF16 < 256 * world_size


def test_fused_experts_are_cheap_with_a_granule_of_one_inner_row() -> None:
    specs = specs_of(GPT_OSS_120B_FUSED, lambda shape: shape[-1] if len(shape) > 1 else 1)
    assert plan_layout(specs, 8, BF16).padding_ratio <= 0.001
    assert plan_layout(specs, 64, BF16).padding_ratio <= 0.005


def test_dense_layers_of_deepseek_v3_have_no_better_size_at_64_ranks() -> None:
    # Granules 7168, 16384 and 18432 all have to divide S, so S is a multiple of 1,032,192: 1.9 %.
    layout = plan_layout(specs_of(DEEPSEEK_V3_DENSE), 64, BF16)
    total = sum(spec.numel for spec in layout.parameters)
    assert layout.shard_numel == -(-total // 64 // 1_032_192) * 1_032_192
    assert plan_layout(specs_of(DEEPSEEK_V3_DENSE), 8, BF16).padding_ratio <= 0.001


def test_offenders_name_the_granules_that_cost_and_what_they_cost() -> None:
    layout = plan_layout(specs_of(GPT_OSS_120B_FUSED), 64, BF16)
    first, second = find_offenders(layout)
    # Four experts of `gate_up` per rank where three and a bit would do; freed, seven of `down`.
    assert layout.shard_numel == 4 * 2880 * 5760
    assert first == Offender(2880 * 5760, ("gate_up",), 64 * (4 * 2880 * 5760 - 7 * 2880 * 2880))
    assert (second.granule, second.fqns) == (2880 * 2880, ("down",))
    rest = layout.padding - first.saving - second.saving
    assert 0 <= rest < 0.005 * (layout.flat_numel - layout.padding)


def test_no_offenders_while_padding_is_small_or_owed_to_alignment_alone() -> None:
    assert find_offenders(plan_layout(specs_of(LLAMA3_70B), 64, BF16)) == ()
    tiny = plan_layout([ParameterSpec("bias", (3,), 1)], 8, BF16)
    assert tiny.padding_ratio > 1
    assert find_offenders(tiny) == ()


def test_a_lower_threshold_finds_smaller_offenders() -> None:
    layout = plan_layout(specs_of(LLAMA3_70B), 64, BF16)
    assert [offender.fqns for offender in find_offenders(layout, 0.003)] == [("mlp.down",)]
