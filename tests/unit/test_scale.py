"""Large worlds: the host's work does not grow with the number of ranks, nor does the plan's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks import scale
from benchmarks.scale import Row, faults
from shardwise import plan_of
from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.reduce import Groups
from shardwise.plan.layout import FlatLayout, ParameterSpec, plan_layout
from shardwise.plan.reduction import Piece, plan_reduction


def test_a_70b_shape_takes_as_many_calls_on_4096_ranks_as_on_8(tmp_path: Path, capsys: Any) -> None:
    """Two layers of the published shape; the whole model is in benchmarks/results/scale.json."""
    assert scale.main(["--models", "llama-70b", "--layers", "2", "--worlds", "8,4096",
                       "--json", str(tmp_path / "s.json")]) == 0
    few, many = [row for row in json.loads((tmp_path / "s.json").read_text())["rows"]][-2:]
    assert (few["world"], many["world"], few["calls"]) == (8, 4096, many["calls"])
    assert few["gathers"] == many["gathers"] == 2 * 2 + 1 and few["reductions"] == 3
    assert few["shard_bytes"] == pytest.approx(2 * few["parameters"] / 8, rel=0.01)
    gathered = 2 * few["parameters"] + 2 * (few["parameters"] - 2 * 128_256 * 8192 - 8192)
    assert few["wire_bytes"] == pytest.approx((gathered + 2 * few["parameters"]) * 7 / 8, rel=0.01)
    assert "do not depend on the world size" in capsys.readouterr().out


def test_growth_is_a_fault() -> None:
    def row(layers: int, world: int, calls: int) -> Row:
        return Row("m", layers, world, 0, 10 * layers, layers, 0.0, 0, 0, 0.0, 0, 0, 0, calls, 0.0)

    assert faults([row(2, 8, 200), row(4, 8, 400), row(4, 64, 400)]) == []
    assert faults([row(4, 8, 400), row(4, 64, 440)]) == ["m: 440 calls at 64 ranks, 400 elsewhere"]
    assert faults([row(2, 8, 200), row(4, 8, 500)]) == ["m: calls grow faster than parameters, 2 to 4 layers"]


@pytest.mark.parametrize("trained", [(True,) * 200, (True, False) * 100], ids=["all", "half"])
def test_planning_a_reduction_looks_at_the_holders_only(trained: tuple[bool, ...]) -> None:
    """Parameters times ranks would be 819,200 looks, for each unit."""
    specs = [ParameterSpec(f"p{i}", (64, 8), 8) for i in range(200)]
    layout, looks = plan_layout(specs, 4096, 4), 0
    original = FlatLayout.span

    def counted(self: FlatLayout, index: int, rank: int) -> Any:
        nonlocal looks
        looks += 1
        return original(self, index, rank)

    with patch.object(FlatLayout, "span", counted):
        plan = plan_reduction([layout], [trained], 3, 4)
    holders = sum(len(layout.holders(i)) for i, flag in enumerate(trained) if flag)
    assert looks <= 3 * holders + len(specs)
    for i, flag in enumerate(trained):
        assert sum(piece.numel for piece in plan.pieces[0][i]) == (512 if flag else 0)
    if all(trained):
        assert looks == len(specs)  # for this rank's own places; the buffer is as the flat parameter is
        assert plan.pieces[0][7] == (Piece(0, layout.offsets[7], 512),)


@pytest.mark.parametrize("world", [1, 3, 64])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_every_element_goes_to_the_chunk_of_its_rank(world: int, itemsize: int) -> None:
    """Whether the buffer is as the flat parameter is, or has longer chunks."""
    specs = [ParameterSpec("a", (7, 3), 3), ParameterSpec("none", (0, 4), 4), ParameterSpec("b", (900,), 1),
             ParameterSpec("scalar", (), 1), ParameterSpec("c", (40, 20), 20)]
    layout = plan_layout(specs, world, 4)
    plan = plan_reduction([layout], [(True,) * len(specs)], 0, itemsize)
    for i, spec in enumerate(specs):
        places = {piece.source + k: piece.target + k for piece in plan.pieces[0][i] for k in range(piece.numel)}
        expected = {}
        for rank in range(world):
            span = layout.span(i, rank)
            start = rank * plan.chunk_numel + span.shard_offset
            expected.update({span.start + k: start + k for k in range(span.numel)})
        assert places == expected and len(places) == spec.numel


def test_holders_are_the_ranks_with_a_span() -> None:
    layout = plan_layout([ParameterSpec("a", (7, 3), 3), ParameterSpec("none", (0, 4), 4),
                          ParameterSpec("b", (900,), 1), ParameterSpec("c", (40, 20), 20)], 5, 4)
    for i in range(4):
        assert list(layout.holders(i)) == [r for r in range(5) if layout.span(i, r).numel]


def test_a_plan_for_thousands_of_ranks_is_printed_without_asking_for_each() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    build_unit([model], Choices(Groups(SimulatedCollectives(0, 4096)), torch.device("meta")))
    plan = plan_of(model)
    assert len(plan.units[0].parameters[0].rows) == 4096 and sum(plan.units[0].parameters[0].rows) == 64
    with patch.object(FlatLayout, "span", side_effect=FlatLayout.span, autospec=True) as span:
        assert "…" in str(plan)
    assert span.call_count == 16
