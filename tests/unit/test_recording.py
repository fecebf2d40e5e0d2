"""The order of streams, checked without any: B19, D5 of the design.

The engine runs on recording lanes, as rank 0 of a simulated group; nothing else is replaced.
Then each wait is taken away in turn, and the same run must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine.build import Choices, build_unit, session_of
from shardwise.engine.gather import Gather
from shardwise.engine.reduce import Groups, Reducer
from shardwise.engine.residents import Residents
from shardwise.engine.settings import Schedule, Settings
from shardwise.engine.unit import Unit
from shardwise.plan.lifecycle import Residency
from shardwise.plan.options import BackwardPrefetch, Precision
from tests.bed.bomb import bomb
from tests.bed.recording import Race, Recorder, RecordingLane, recorded

SCHEDULES = {
    "pre": Schedule(BackwardPrefetch.BACKWARD_PRE, forward=False),
    "post": Schedule(BackwardPrefetch.BACKWARD_POST, forward=False),
    "none": Schedule(None, forward=False),
    "pre and forward": Schedule(BackwardPrefetch.BACKWARD_PRE, forward=True),
    "unlimited": Schedule(BackwardPrefetch.BACKWARD_PRE, forward=True, limit=False),
}


class Overlapping(SimulatedCollectives):
    overlaps = True


class Stack(nn.Module):
    """Equal blocks, so that each takes the memory of the one before; one of them is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inward(tokens)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(x)


def build(schedule: Schedule, precision: Precision | None = None, *, replicas: int = 1,
          **settings: bool) -> tuple[Stack, list[Unit]]:
    model = Stack()
    groups = Groups(Overlapping(0, 2), Overlapping(0, replicas) if replicas > 1 else None)
    units = []
    for module in (*model.blocks, model):
        choices = Choices(groups, torch.device("cpu"), precision or Precision(), Settings(**settings), schedule)
        units.append(build_unit([module], choices))
    return model, units


def train(recorder: Recorder, model: Stack, *, steps: int = 3, micro: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(micro):
            model(torch.arange(6) % 7).square().mean().backward()
        optimizer.step()
        recorder.optimizer(model)
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.arange(6) % 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("precision", [None, Precision(param=torch.bfloat16, reduce=torch.float32)])
def test_B19_every_schedule_is_ordered(schedule: str, reshard: bool, precision: Precision | None) -> None:
    with recorded() as recorder:
        model, _ = build(SCHEDULES[schedule], precision, reshard_after_forward=reshard)
        train(recorder, model)
    assert recorder.lanes_of("gather") == {"gather"}
    assert recorder.lanes_of("reduce") == {"reduce"}
    assert recorder.lanes_of("use") == recorder.lanes_of("collect") == recorder.lanes_of("bind") == {"compute"}


def test_B19_accumulation_over_replicas_is_ordered() -> None:
    with recorded() as recorder:
        model, units = build(SCHEDULES["pre"], replicas=2)
        for all_reduce in (False, True):
            for unit in units:
                unit.settings.all_reduce = all_reduce
            train(recorder, model, steps=1, micro=2)
        assert len([a for a in recorder.log if a.what == "bind"]) == 2 * len(units)


def test_B19_unsent_gradients_are_ordered() -> None:
    with recorded() as recorder:
        model, units = build(SCHEDULES["pre"], Precision(param=torch.bfloat16))
        for sync in (False, True):
            for unit in units:
                unit.settings.sync_gradients = sync
            model(torch.arange(6)).sum().backward()
        recorder.optimizer(model)


def test_C3_a_gradient_that_comes_after_the_reduction_waits_for_it() -> None:
    """The weight of a unit is used by another root too, whose backward comes when the unit's own is over."""
    with recorded() as recorder:
        parent = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        parent[2].weight = parent[0].weight
        groups = Groups(Overlapping(0, 2))
        made = [build_unit([parent[place]], Choices(groups, torch.device("cpu"))) for place in (2, 0)]
        parent(torch.randn(3, 4)).square().mean().backward()
        assert [access.what for access in recorder.log].count("combine") == 3  # the owner's twice
        assert all(unit.collector.nbytes == 0 for unit in made)


def test_B19_a_gather_at_rest_follows_the_optimizer() -> None:
    with recorded() as recorder:
        model, units = build(SCHEDULES["pre"])
        train(recorder, model, steps=1)
        recorder.optimizer(model)
        session = session_of(units[-1])
        assert session is not None
        session.gather(units[0])
        units[0].reshard()
        session.gather(units[1])


def test_U37_after_an_evaluation_the_host_may_change_offloaded_shards() -> None:
    """Copies from the host to the device are over when a forward without gradients returns."""
    finished: list[str] = []
    finish = patch.object(RecordingLane, "finish", lambda lane: finished.append(lane.name))
    with recorded(), finish:
        for offload in (False, True):
            model = nn.Linear(4, 4)
            build_unit([model], Choices(Groups(Overlapping(0, 2)), torch.device("cpu"), offload=offload))
            model(torch.ones(2, 4)).sum().backward()
            assert finished == []
            with torch.no_grad():
                model(torch.ones(2, 4))
    assert finished == ["gather"]


def test_A20_an_edit_inside_forward_is_seen_by_the_gather() -> None:
    with recorded() as recorder:
        model, _ = build(SCHEDULES["none"])

        def edit(module: nn.Module, args: Any) -> None:
            weight = model.blocks[2][0].weight
            weight.data = weight.detach() + 1

        model.blocks[1].register_forward_pre_hook(edit)
        train(recorder, model, steps=1)
        assert any(access.what == "edit" for access in recorder.log)


def test_C22_memory_is_not_reused_under_an_abandoned_reduction() -> None:
    with recorded() as recorder:
        model, units = build(SCHEDULES["pre"])
        hook = model.blocks[0].register_forward_hook(lambda *given: bomb(given[-1], MemoryError("on purpose")))
        with pytest.raises(MemoryError, match="on purpose"):
            model(torch.arange(6)).sum().backward()
        assert any(unit.sent is not None for unit in units)
        hook.remove()
        with pytest.warns(RuntimeWarning, match="did not finish"):
            train(recorder, model, steps=2)
        assert all(unit.gather.nbytes == 0 for unit in units)


# ---------------------------------------------------------------------- without this or that wait
@contextmanager
def _deaf(name: str, recorder: Recorder) -> Iterator[None]:
    recorder.lane[name].deaf = True
    yield


def _first_mark_counts(residents: Residents, unit: Unit) -> None:
    """What ``release`` must not do: keep the mark of an earlier use."""
    if unit.residency is not Residency.SHARDED:
        residents._behind.setdefault(unit, residents._lanes.compute.mark())
        residents.drain(keep=1)


def _not_at_once(gather: Gather, *, after: object = None) -> None:
    for buffer in gather.buffers:
        buffer.free()


def _keeps_waiting(residents: Residents, unit: Unit) -> None:
    """A unit that is gathered again does not leave the queue of those that are freed."""
    for owner in (unit, *unit.needs):
        owner.unshard()


def _eager_start(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
    with patch.object(type(reducer._lanes.reduce), "wait", lambda *_: None):
        return _START(reducer, *args, **kwargs)


_START = Reducer.start
MUTATIONS: dict[str, Callable[[Recorder], Any]] = {
    "compute waits for nothing": lambda recorder: _deaf("compute", recorder),
    "gathers wait for nothing": lambda recorder: _deaf("gather", recorder),
    "reductions wait for nothing": lambda recorder: _deaf("reduce", recorder),
    "the gather is not waited for": lambda _: patch.object(Gather, "finish", lambda self: None),
    "freed at once": lambda _: patch.object(Gather, "free", _not_at_once),
    "freed behind an earlier use": lambda _: patch.multiple(
        Residents, release=_first_mark_counts, gather=_keeps_waiting),
    "gathered without the optimizer": lambda _: patch.object(Residents, "follow_user", lambda self: None),
    "sent before it is collected": lambda _: patch.object(Reducer, "start", _eager_start),
    "bound before it is reduced": lambda _: patch.object(Reducer, "wait", lambda self, reduced: None),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_B19_each_wait_is_needed(mutation: str) -> None:
    with recorded() as recorder:
        model, _ = build(SCHEDULES["pre"])
        with MUTATIONS[mutation](recorder), pytest.raises(Race, match="without waiting for"):
            train(recorder, model)


# ---------------------------------------------------------------------- the recorder itself
def test_two_reads_need_no_order() -> None:
    recorder, memory = Recorder(), torch.zeros(3)
    recorder.lanes.compute.note("write", writes=[memory])
    recorder.lanes.gather.wait(recorder.lanes.compute.mark())
    recorder.lanes.gather.note("read", reads=[memory])
    recorder.lanes.compute.note("read", reads=[memory])


def test_an_order_is_passed_on() -> None:
    recorder, memory = Recorder(), torch.zeros(3)
    recorder.lanes.gather.note("write", writes=[memory])
    recorder.lanes.reduce.wait(recorder.lanes.gather.mark())
    recorder.lanes.compute.wait(recorder.lanes.reduce.mark())
    recorder.lanes.compute.note("write", writes=[memory])


def test_a_view_is_the_same_memory() -> None:
    recorder, memory = Recorder(), torch.zeros(6)
    recorder.lanes.compute.note("write", writes=[memory])
    with pytest.raises(Race, match=r"'read' reads on gather, without waiting for: 'write' writes on compute"):
        recorder.lanes.gather.note("read", reads=[memory[2:]])


def test_a_mark_covers_only_what_came_before_it() -> None:
    recorder, memory = Recorder(), torch.zeros(6)
    mark = recorder.lanes.compute.mark()
    recorder.lanes.compute.note("write", writes=[memory])
    recorder.lanes.gather.wait(mark)
    with pytest.raises(Race):
        recorder.lanes.gather.note("write", writes=[memory])


def test_freed_memory_must_not_be_touched() -> None:
    with recorded() as recorder:
        _model, units = build(SCHEDULES["pre"])
        with pytest.raises(Race, match="touches memory that was freed"):
            recorder.lanes.compute.note("read", reads=units[0].gather.buffers)
