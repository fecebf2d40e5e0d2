"""Whose memory a caching allocator hands out on which lane: B19, D5 of the design.

Such an allocator gives a freed piece to the next request *of the stream that it was made on*, at
once, whoever still reads it elsewhere. So memory must come and go on one lane, and a lane that
takes memory must be behind all work that may have used what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Handle
from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.collect import Collector
from shardwise.engine.reduce import Groups
from shardwise.plan.options import Precision
from tests.bed.recording import Recorder, recorded

MIXED = Precision(param=torch.bfloat16, reduce=torch.float32, cast_inputs=True)


class Watched(SimulatedCollectives):
    """Tells which lane each collective is issued on, and what that lane is behind."""

    overlaps = True

    def __init__(self, rank: int, size: int, recorder: Recorder) -> None:
        super().__init__(rank, size)
        self._recorder = recorder
        self.issued: list[tuple[str, str, bool]] = []

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = 0) -> Handle:
        self._note("gather")
        return super().all_gather(out, shard, tag=tag)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = 0) -> Handle:
        self._note("reduce")
        return super().reduce_scatter(out, full, tag=tag)

    def _note(self, kind: str) -> None:
        lane, compute = self._recorder.lane[self._recorder.entered[-1]], self._recorder.lane["compute"]
        self.issued.append((kind, lane.name, lane.clock["compute"] == compute.clock["compute"]))


def _trained(recorder: Recorder, precision: Precision) -> Watched:
    comm = Watched(1, 4, recorder)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 3))
    for module in (*list(model)[:4], model):
        build_unit([module], Choices(Groups(comm), torch.device("cpu"), precision))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        recorder.optimizer(model)
        optimizer.zero_grad()
    return comm


@pytest.mark.parametrize("precision", [Precision(), MIXED])
def test_B19_a_reduction_is_behind_all_readers_of_the_chunks_before_it(precision: Precision) -> None:
    """The chunk is new memory of the reduce lane: perhaps that of gradients that compute has just read.

    The optimizer's reads and ``zero_grad`` precede it on compute, so the lane must know all of compute.
    """
    with recorded() as recorder:
        issued = _trained(recorder, precision).issued
    assert [lane for kind, lane, _ in issued if kind == "reduce"] == ["reduce"] * 15
    assert all(behind for kind, _, behind in issued if kind == "reduce")


@pytest.mark.parametrize("precision", [Precision(), MIXED])
def test_B19_collectives_are_issued_on_their_own_lanes(precision: Precision) -> None:
    with recorded() as recorder:
        issued = _trained(recorder, precision).issued
    assert {(kind, lane) for kind, lane, _ in issued} == {("gather", "gather"), ("reduce", "reduce")}


def _lanes_of_memory(recorder: Recorder, run: Callable[[], Any]) -> dict[str, set[str]]:
    """Who (gather, or collector) took memory on which lanes."""
    found: dict[str, set[str]] = {}
    take = type(recorder.pool).take

    def watched(pool: Any, storage: torch.UntypedStorage, nbytes: int) -> None:
        owner = "collect" if opening else "gather" if recorder.entered[-1] == "gather" else "other"
        found.setdefault(owner, set()).add(recorder.entered[-1])
        take(pool, storage, nbytes)

    opening: list[bool] = []
    original = Collector.open

    def opened(collector: Collector, *args: Any, **kwargs: Any) -> None:
        opening.append(True)
        original(collector, *args, **kwargs)
        opening.pop()

    with patch.object(type(recorder.pool), "take", watched), patch.object(Collector, "open", opened):
        run()
    return found


def test_B19_reduce_buffers_come_and_go_on_compute() -> None:
    """They are filled there; the reduce lane only reads, and compute waits for it before they go."""
    with recorded() as recorder:
        found = _lanes_of_memory(recorder, lambda: _trained(recorder, MIXED))
    assert found["collect"] == {"compute"} and found["gather"] == {"gather"}


def test_B19_without_its_wait_a_reduction_would_not_be_behind() -> None:
    with recorded() as recorder:
        recorder.lane["reduce"].deaf = True
        with patch.object(Recorder, "access", lambda *a, **k: None):
            recorder.lane["compute"].clock["compute"] = 1
            comm = Watched(0, 2, recorder)
            model = nn.Linear(8, 8)
            build_unit([model], Choices(Groups(comm), torch.device("cpu")))
            model(torch.ones(2, 8)).sum().backward()
    assert [behind for kind, _, behind in comm.issued if kind == "reduce"] == [False]
