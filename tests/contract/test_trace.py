"""Traces: one step of each kind of transport, on lanes as on the CPU, and what the file says."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import shardwise
from shardwise.cli.app import app
from shardwise.comm.collectives import Collectives
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.reduce import Groups
from shardwise.errors import ConfigurationError
from shardwise.frontend import trace as trace_module
from shardwise.frontend.spans import Span, covered, read, summarise, write
from tests.bed import ranks
from tests.bed.recording import recorded


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)], nn.Linear(32, 4))


def sharded(comm: Collectives) -> Net:
    model = Net()
    for module in (*list(model)[:3], model):
        build_unit([module], Choices(Groups(comm), torch.device("cpu")))
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(2, 32)).sum().backward()


@ranks(2)
@pytest.mark.parametrize("process_group", [False, True])
def test_a_step_is_traced_on_every_rank(rank: int, world: int, process_group: bool, tmp_path: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    if process_group:
        model: nn.Module = sharded(ProcessGroupCollectives(group))
    else:
        model = Net()
        for module in (*list(model)[:3], model):
            shardwise.fully_shard(module)
    step(model)
    with shardwise.trace(tmp_path / "step.json") as traced:
        step(model)
    assert traced.path == tmp_path / f"step.rank{rank}.json"
    spans = read(traced.path)
    seen = {(s.unit, s.kind, s.phase) for s in spans}
    for unit in ("0", "1", "2", "(root)"):
        for wanted in ((unit, "compute", "forward"), (unit, "compute", "backward"), (unit, "gather", ""),
                       (unit, "reduce", "backward"), (unit, "copy", "backward")):
            assert wanted in seen, (wanted, seen)
    assert sum(s.kind == "gather" for s in spans) == 7 and sum(s.kind == "reduce" for s in spans) == 4
    whole = {u.name: u.gathered_bytes for u in shardwise.plan_of(model).units}
    assert {(s.unit, s.nbytes) for s in spans if s.kind == "gather"} == set(whole.items())
    assert all(s.end >= s.begin >= 0 for s in spans)
    share = traced.summary.share
    assert 0 < share <= 1 and (process_group or share == pytest.approx(1))  # shared memory works in the call
    with pytest.raises(ZeroDivisionError), shardwise.trace(tmp_path / "failed.json"):
        raise ZeroDivisionError
    assert not (tmp_path / f"failed.rank{rank}.json").exists()


class Event:
    """An accelerator's event, whose time is the number of events before it."""

    numbers = count()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = next(self.numbers)

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: Event) -> float:
        return float(other.time - self.time)


class Overlapping(SimulatedCollectives):
    overlaps = True


def test_on_streams_events_stand_on_the_lane_of_the_work(tmp_path: Path) -> None:
    class Api:
        pass

    Api.Event = Event  # type: ignore[attr-defined]
    with recorded(), patch.object(trace_module.torch, "get_device_module", lambda device: Api):
        model = sharded(Overlapping(0, 4))
        step(model)
        with shardwise.trace(tmp_path / "step.json") as traced:
            step(model)
    lanes: dict[str, set[str]] = {}
    for span in traced.spans:
        lanes.setdefault(span.kind, set()).add(span.lane)
    assert lanes == {"compute": {"compute"}, "copy": {"compute"}, "gather": {"gather"}, "reduce": {"reduce"}}
    # gathers ahead of need and reductions run while other units compute
    assert traced.summary.share < 1


def test_untraced_steps_are_not_touched(tmp_path: Path) -> None:
    methods = [(owner, name, getattr(owner, name)) for owner, name, _ in trace_module._Watcher().stand_ins()]
    with shardwise.trace(tmp_path / "t.json"):
        assert all(getattr(owner, name) is not method for owner, name, method in methods)
    assert all(getattr(owner, name) is method for owner, name, method in methods)


def test_what_is_not_hidden_is_communication_without_computation(tmp_path: Path) -> None:
    spans = [Span("gather", "a", "gather", 0, 10), Span("compute", "b", "compute", 4, 20),
             Span("reduce", "b", "reduce", 15, 25), Span("gather", "c", "gather", 5, 12)]
    summary = summarise(spans)
    assert (summary.communication, summary.exposed) == (22, 4 + 5) and summary.share == pytest.approx(9 / 22)
    assert covered([(0, 10), (5, 12)], [(4, 6), (11, 30)]) == 3
    write(tmp_path / "t.json", spans, rank=3)
    assert read(tmp_path / "t.json") == spans
    raw: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
    assert {e["ph"] for e in raw["traceEvents"]} == {"M", "X"} and raw["otherData"]["exposed_us"] == 9
    shown = CliRunner().invoke(app, ["trace", str(tmp_path / "t.json")])
    assert shown.exit_code == 0 and "not hidden 0.01 ms (41%)" in shown.output


def test_a_summary_is_printed_as_a_table() -> None:
    spans = [Span("gather", "layers.0", "gather", 0, 1500), Span("compute", "(root)", "compute", 750, 20_000)]
    assert str(summarise(spans)).splitlines() == [
        "unit      compute ms  copy ms  gather ms  reduce ms",
        "layers.0        0.00     0.00       1.50       0.00",
        "(root)         19.25     0.00       0.00       0.00",
        "communication 1.50 ms, of which not hidden 0.75 ms (50%)"]
    assert str(summarise([])).splitlines()[-1] == "communication 0.00 ms, of which not hidden 0.00 ms (0%)"
    traced = trace_module.Trace(Path("step.json"), spans)
    assert str(traced) == f"step.json\n{traced.summary}"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"x.json is no trace of shardwise"):
        read(tmp_path / "x.json")
