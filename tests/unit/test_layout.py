"""The flat layout: that its spans add up, that no naive planner is better, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigurationError
from shardwise.plan.layout import FlatLayout, ParameterSpec, Span, find_offenders, plan_layout, row_granule

BF16 = 2
UNIT = 128  # bf16 elements in 256 bytes
START = 8  # bf16 elements in 16 bytes

Shapes = dict[str, tuple[int, ...]]


def specs_of(shapes: Shapes, granule: Callable[[Sequence[int]], int] = row_granule) -> list[ParameterSpec]:
    return [ParameterSpec(fqn, shape, granule(shape)) for fqn, shape in shapes.items()]


def make_layout(*placed: tuple[tuple[int, ...], int, int], ranks: int = 2, shard: int = UNIT) -> FlatLayout:
    """A layout by hand, from (shape, granule, offset)."""
    specs = tuple(ParameterSpec(f"p{i}", shape, granule) for i, (shape, granule, _) in enumerate(placed))
    return FlatLayout(specs, tuple(offset for *_, offset in placed), ranks, shard, BF16)


def test_spans_of_a_matrix_on_every_rank_and_one_on_the_last() -> None:
    layout = plan_layout([ParameterSpec("a", (512, 4), 4), ParameterSpec("b", (3, 100), 100)], 4, BF16)
    assert (layout.shard_numel, layout.offsets, layout.padding) == (640, (0, 2048), 4 * 640 - 2048 - 300)
    assert [layout.span(0, rank) for rank in range(4)] == [
        Span(0, 640, 0), Span(640, 1280, 0), Span(1280, 1920, 0), Span(1920, 2048, 0)]  # fmt: skip
    assert [layout.span(1, rank).numel for rank in range(4)] == [0, 0, 0, 300]
    assert layout.span(1, 3) == Span(0, 300, 128)


def test_empty_spans_lie_at_the_near_end_of_the_parameter() -> None:
    layout = make_layout(((16,), 1, UNIT), ranks=4)
    assert layout.span(0, 0) == Span(0, 0, 0)
    assert layout.span(0, 1) == Span(0, 16, 0)
    assert layout.span(0, 2) == layout.span(0, 3) == Span(16, 16, 0)


@pytest.mark.parametrize(("shape", "granule"), [((), 1), ((7,), 1), ((7, 3), 3), ((7, 3, 2), 6), ((7, 0), 1)])
def test_row_granule(shape: tuple[int, ...], granule: int) -> None:
    assert row_granule(shape) == granule


def test_empty_and_zero_dimensional_parameters() -> None:
    shapes: Shapes = {"empty": (0, 5), "scalar": (), "hollow": (4, 0), "bias": (3,)}
    layout = plan_layout(specs_of(shapes), 8, BF16)
    assert layout.shard_numel == UNIT
    assert [sum(layout.span(i, rank).numel for rank in range(8)) for i in range(4)] == [0, 1, 0, 3]


@pytest.mark.parametrize("specs", [[], [ParameterSpec("empty", (0, 4), 4)]])
def test_nothing_to_place(specs: list[ParameterSpec]) -> None:
    layout = plan_layout(specs, 4, BF16)
    assert (layout.flat_numel, layout.padding, layout.padding_ratio) == (0, 0, 0.0)
    assert find_offenders(layout) == ()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16, 32])
def test_alignment_follows_the_item_size(itemsize: int) -> None:
    shapes: Shapes = {f"p{i}": (i + 1, 3) for i in range(9)}
    for world_size, shard_bytes in ((1, 16), (3, 256)):
        layout = plan_layout(specs_of(shapes), world_size, itemsize)
        assert layout.shard_numel * itemsize % shard_bytes == 0
        assert all(offset * itemsize % 16 == 0 for offset in layout.offsets)


def test_one_rank_needs_no_more_than_the_aligned_parameters() -> None:
    layout = plan_layout(specs_of({"a": (5, 3), "b": (9,), "c": (1,)}), 1, BF16)
    assert (layout.shard_numel, layout.offsets) == (16 + 16 + 8, (0, 16, 32))


def test_a_whole_tensor_granule_is_never_cut() -> None:
    """U22: owned by one rank each."""
    shapes: Shapes = {f"w{i}": (rows, 96) for i, rows in enumerate((61, 40, 40, 33, 21, 7))}
    layout = plan_layout(specs_of(shapes, prod), 4, BF16)
    for index, spec in enumerate(layout.parameters):
        assert sorted(layout.span(index, rank).numel for rank in range(4)) == [0, 0, 0, spec.numel]
    assert layout.shard_numel == 46 * UNIT  # the longest alone fills one: 61 rows of 96 are 45.75 units


def test_4096_ranks_and_a_single_parameter() -> None:
    layout = plan_layout([ParameterSpec("w", (4096, 384), 384)], 4096, BF16)
    assert (layout.shard_numel, layout.padding) == (384, 0)
    assert layout.span(0, 4095) == Span(4095 * 384, 4096 * 384, 0)
    small = plan_layout([ParameterSpec("w", (3, 100), 100)], 4096, BF16)
    assert small.shard_numel == 256  # a start that is aligned leaves room for a cut after two rows only


def test_equal_units_share_one_search_but_keep_their_names() -> None:
    first = plan_layout([ParameterSpec("a", (8, 8), 8)], 2, BF16)
    second = plan_layout([ParameterSpec("b", (8, 8), 8)], 2, BF16)
    assert first.offsets is second.offsets
    assert second.parameters[0].fqn == "b"


# ---- against a naive planner


def naive_shard(specs: Sequence[ParameterSpec], world_size: int) -> int:
    """Every shard size in turn, every aligned offset in turn, every boundary looked at; order as given."""
    size = UNIT
    while not naive_fits(specs, world_size, size):
        size += UNIT
    return size


def naive_fits(specs: Sequence[ParameterSpec], world_size: int, size: int) -> bool:
    cursor = 0
    for spec in specs:
        while any((cut - cursor) % spec.granule for cut in range(size, world_size * size, size)
                  if cursor < cut < cursor + spec.numel):  # fmt: skip
            cursor += START
        cursor += spec.numel
        if cursor > world_size * size:
            return False
        cursor = -(-cursor // START) * START
    return True


def uncut_shard(specs: Sequence[ParameterSpec], world_size: int) -> int:
    """The trivial plan: no parameter is cut, and a shard is as long as the longest plus an even share."""
    rooms = [-(-spec.numel // START) * START for spec in specs]
    return -(-(max(rooms) - (-sum(rooms) // world_size)) // UNIT) * UNIT


@st.composite
def parameters(draw: st.DrawFn, count: int, size: int) -> list[ParameterSpec]:
    specs: list[ParameterSpec] = []
    for index in range(draw(st.integers(1, count))):
        shape = tuple(draw(st.lists(st.integers(0, size), max_size=2)))
        row = row_granule(shape)
        granule = draw(st.sampled_from([1, row, 2 * row, 3, max(1, prod(shape))]))
        specs.append(ParameterSpec(f"p{index}", shape, granule))
    return specs


def check_partition(layout: FlatLayout) -> None:
    """Spans cover each parameter once, in rank order, in whole granules, and no two share an element."""
    held = set[tuple[int, int]]()
    for index, spec in enumerate(layout.parameters):
        reached = 0
        for rank in range(layout.world_size):
            span = layout.span(index, rank)
            assert span.start == reached
            reached = span.stop
            if span.numel:
                assert reached % spec.granule == 0 or reached == spec.numel
                assert rank * layout.shard_numel + span.shard_offset == layout.offsets[index] + span.start
                assert span.shard_offset + span.numel <= layout.shard_numel
                places = {(rank, span.shard_offset + i) for i in range(span.numel)}
                assert held.isdisjoint(places)
                held |= places
        assert reached == spec.numel
    assert layout.padding == layout.flat_numel - len(held)


@pytest.mark.fuzz
@given(parameters(count=7, size=40), st.integers(1, 9))
def test_spans_partition_every_parameter(specs: list[ParameterSpec], world_size: int) -> None:
    check_partition(plan_layout(specs, world_size, BF16))


@pytest.mark.fuzz
@given(parameters(count=5, size=40), st.integers(2, 9))
def test_never_worse_than_the_naive_and_the_trivial_plan(specs: list[ParameterSpec], world_size: int) -> None:
    found = plan_layout(specs, world_size, BF16).shard_numel
    filled = [spec for spec in specs if spec.numel]
    if filled:
        assert found <= naive_shard(filled, world_size)
        assert found <= uncut_shard(filled, world_size)


@pytest.mark.fuzz
@given(parameters(count=1, size=60), st.integers(2, 20))
def test_a_single_parameter_gets_exactly_the_naive_size(specs: list[ParameterSpec], world_size: int) -> None:
    if specs[0].numel:
        assert plan_layout(specs, world_size, BF16).shard_numel == naive_shard(specs, world_size)


@pytest.mark.fuzz
@given(parameters(count=12, size=3000), st.sampled_from([2, 3, 8, 64, 1000, 4096]))
def test_large_plans_are_valid_and_beat_the_trivial_one(specs: list[ParameterSpec], world: int) -> None:
    layout = plan_layout(specs, world, BF16)
    filled = [spec for spec in specs if spec.numel]
    assert layout.shard_numel <= (uncut_shard(filled, world) if filled else 0)
    for index, spec in enumerate(specs):
        assert sum(layout.span(index, rank).numel for rank in range(world)) == spec.numel


@pytest.mark.parametrize(("world_size", "sizes"), [
    (3, [(30 * 56, 56), (19 * 72, 72), (41 * 40, 40)]),
    (5, [(30 * 56, 56), (19 * 72, 72), (41 * 40, 40)]),
    (4, [(3 * 19, 19), (15 * 16, 16), (18, 18), (9 * 15, 15)]),  # long ones first
    (2, [(156, 12), (580, 29), (140, 5), (81, 81)]),  # long ones first
    (2, [(242, 242), (23, 23), (322, 322), (114, 114)]),  # with gaps filled
])  # fmt: skip
def test_no_order_is_better_than_the_plan(world_size: int, sizes: list[tuple[int, int]]) -> None:
    specs = [ParameterSpec(f"p{i}", (numel,), granule) for i, (numel, granule) in enumerate(sizes)]
    best = min(naive_shard(order, world_size) for order in permutations(specs))
    assert plan_layout(specs, world_size, BF16).shard_numel == best


def test_coarse_granules_first_can_be_the_better_order() -> None:
    sizes = [(11001, 57), (59718, 269), (32964, 268), (42444, 162)]
    specs = [ParameterSpec(f"p{i}", (numel,), granule) for i, (numel, granule) in enumerate(sizes)]
    ordered = [specs[1], specs[2], specs[3], specs[0]]
    assert naive_fits(ordered, 2, 73216)
    assert plan_layout(specs, 2, BF16).shard_numel <= 73216


# ---- what is refused


@pytest.mark.parametrize(("make", "text"), [
    (lambda: ParameterSpec("w", (2, 2), 0),
     "a granule must hold at least one element (parameter 'w'): expected 1 or more, got 0."),
    (lambda: ParameterSpec("w", (2, -2), 1), "a shape cannot be negative (parameter 'w'): got (2, -2)."),
    (lambda: plan_layout([], 0, 2), "layout: the world size must be positive: expected 1 or more, got 0."),
    (lambda: plan_layout([], 1, 0), "layout: the item size must be positive: expected 1 or more, got 0."),
    (lambda: make_layout(shard=100),
     "layout: the shard is not aligned: expected a multiple of 128 elements, got 100."),
    (lambda: FlatLayout((), (0,), 2, UNIT, BF16),
     "layout: one offset per parameter is needed: expected 0, got 1."),
    (lambda: make_layout(((20,), 1, 0), ((4,), 1, 16)),
     "layout: the parameter overlaps 'p0' (parameter 'p1'): expected an offset of 20 or more, got 16."),
    (lambda: make_layout(((4,), 1, -8)),
     "layout: the parameter overlaps the buffer's start (parameter 'p0'): "
     "expected an offset of 0 or more, got -8."),
    (lambda: make_layout(((4,), 1, 4)),
     "layout: the parameter is not aligned (parameter 'p0'): expected a multiple of 8 elements, got 4."),
    (lambda: make_layout(((16,), 1, 248)),
     "layout: the parameter ends behind the flat buffer (parameter 'p0'): expected 256 or less, got 264."),
    (lambda: make_layout(((4, 48), 48, 0)),
     "layout: a shard boundary cuts a granule (parameter 'p0'): "
     "expected boundaries at multiples of 48 elements, got shards of 128 and offset 0."),
    (lambda: make_layout(((4, 48), 48, 128 - 96), ranks=3).span(0, 3),
     "layout: no such rank (rank 3): expected 0 to 2."),
    (lambda: make_layout(((6, 48), 48, 128 - 96), ranks=3),
     "layout: a shard boundary cuts a granule (parameter 'p0'): "
     "expected boundaries at multiples of 48 elements, got shards of 128 and offset 32."),
])  # fmt: skip
def test_refusals(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == "shardwise: " + text
