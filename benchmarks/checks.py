"""What the checks of an undisturbed run cost: one model, trained with them and without, step by step in turn.

Start it with torchrun. The checks: in shared memory every collective carries what it is for, and all ranks compare;
over gloo its messages are marked with it, and the call is put down in a logbook, which a thread looks at. A wait is
noted for reports and looks for dead peers. ``--calls`` counts Python and C calls of one step, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.models import CONTENDERS, GPT, Block
from shardwise.bench.meter import count_calls
from shardwise.comm import gate, mesh
from shardwise.comm.agreement import Call
from shardwise.comm.choose import close_all, collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.comm.exchanges import Messages, Steps
from shardwise.comm.gate import Gate, Sources
from shardwise.comm.watch import Watch
from shardwise.comm.wire import Exchange, Post, Wire

MARK = 1.01


def _bare_meet(self: Gate, call: Call, sources: Sources = gate.NOTHING) -> list[Sources]:
    """Only what sharing memory needs: where the data lie."""
    place = gate._CALLS + gate._STRIDE * ((self._count + 1) % gate._PLACES)
    for word, value in enumerate(sources, place):
        self._own[word] = value
    self.cross(call)
    return [Sources(*block[place : place + 2].tolist()) for block in self._blocks]


def _bare_wait(self: Gate, call: Call, _: object) -> None:
    while self._missing():
        self._listen(60.0)


def _bare_start(self: Wire, owner: Collectives, call: Call, steps: Callable[[Messages], Steps]) -> Exchange:
    """Messages with the number of their collective, as gloo has it."""
    line = self._line
    assert line is not None
    line.book.number = number = line.book.number + 1
    line.underway[number] = exchange = Exchange(self, owner, line, number, call)
    exchange.begin(steps(Post(self, line.channel, number)))
    return exchange


def _bare_exchange_wait(self: Exchange) -> None:
    steps, self._steps = self._steps, None
    for work in (*self._works, *(steps or ())):
        work.wait()
    self._line.underway.pop(self._number, None)


@contextmanager
def _unchecked() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, bare in ((Gate, "meet", _bare_meet), (Gate, "_wait", _bare_wait), (Watch, "things", []),
                                  (Wire, "start", _bare_start), (Exchange, "wait", _bare_exchange_wait)):
            stack.enter_context(patch.object(owner, name, bare))
        yield


class _Run:
    """A model in training."""

    def __init__(self, shape: dict[str, int], batch: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = CONTENDERS["fully_shard"](GPT(**shape), Block)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        source = torch.Generator().manual_seed(dist.get_rank())
        self.ids = torch.randint(256, (batch, shape["context"]), generator=source)

    def step(self) -> None:
        F.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        self.step()
        dist.barrier()
        return time.perf_counter() - began

    def calls(self) -> int:
        return count_calls(self.step)


def _measure(run: _Run, rounds: int) -> tuple[float, float]:
    """The median of the ratios of neighbours, and the median seconds of a step with checks."""
    ratios, checked = list[float](), list[float]()
    for number in range(rounds):
        pair = dict[bool, float]()
        for bare in ((True, False) if number % 2 else (False, True)):
            with _unchecked() if bare else ExitStack():
                pair[bare] = run.timed()
        ratios.append(pair[False] / pair[True])
        checked.append(pair[False])
    return statistics.median(ratios), statistics.median(checked)


def main() -> int:
    """Measure each transport, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ratios: dict[str, float] = {}
    for name, shared in (("shared memory", None), ("gloo", False)):
        def chosen(group: Any, device: Any, *, _shared: bool | None = shared, **_: Any) -> Any:
            return collectives_for(group, device, shared_memory=_shared)

        with patch.object(mesh, "collectives_for", chosen):
            run = _Run({"width": options.width, "layers": options.layers, "context": options.context}, options.batch)
        for _ in range(3):
            run.step()
        text = ""
        if options.calls:
            checked = run.calls()
            with _unchecked():
                text = f", {checked} calls with the checks and {run.calls()} without"
        ratio, seconds = _measure(run, options.rounds)
        ratios[name] = ratio
        if dist.get_rank() == 0:
            print(f"{name}: a step of {seconds * 1e3:.1f} ms takes {100 * (ratio - 1):+.2f} % with the checks{text}",
                  flush=True)
    close_all()
    dist.destroy_process_group()
    return 0 if max(ratios.values()) <= MARK else 1


if __name__ == "__main__":
    sys.exit(main())
