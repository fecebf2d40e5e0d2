"""The rounds: every contender takes one step in each of them, so that a busy machine slows all alike.

The order turns from round to round. After the timed rounds each contender takes one more step
under the meter and one under a profile hook, whose costs are no part of the times.

A contender that raises, at whatever point, is left out from there on, on all ranks; the report says why.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.build import units_below
from ..errors import ConfigurationError
from .contenders import Contender, Setup
from .meter import count_calls, metered
from .results import LeftOut, Report, Row
from .workload import Batch, Workload

__all__ = ["Rounds", "measure"]

Result = TypeVar("Result")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Rounds:
    """How long, and how."""

    timed: int = 9
    warmup: int = 2
    accumulation: int = 1  #: batches of one optimizer step
    seed: int = 0


def measure(workload: Workload, contenders: Mapping[str, Contender], setup: Setup, rounds: Rounds) -> Report:
    """Train ``workload`` with each contender. Collective: all ranks call it with the same arguments.

    Raises ``ConfigurationError`` if there is nothing to measure, or no contender runs.
    """
    if not contenders or rounds.timed < 1 or rounds.accumulation < 1:
        raise ConfigurationError("nothing to measure", expected="a contender, a timed round, a batch",
                                 got=f"{len(contenders)}, {rounds.timed}, {rounds.accumulation}")
    runs = [_Run(name, contender, workload, setup, rounds) for name, contender in contenders.items()]
    for number in range(rounds.warmup + rounds.timed):
        turn = number % len(runs)
        for run in _running((*runs[turn:], *runs[:turn])):
            run.step(number, timed=number >= rounds.warmup)
    for run in _running(runs):
        run.weigh(rounds.warmup + rounds.timed)
    left_out = [run.left_out for run in runs if run.left_out is not None]
    if len(left_out) == len(runs):
        raise ConfigurationError("no contender ran", got="; ".join(f"{one.name}: {one.error}" for one in left_out),
                                 remedy=f"The first of them was here:\n{left_out[0].trace}")
    items, unit = workload.items()
    world = dist.get_world_size()
    return Report(
        workload.name, items * rounds.accumulation * world, unit, world, _device_name(setup.device),
        str(setup.compute or torch.float32).removeprefix("torch."),
        "free after forward" if setup.reshard else "keep until backward", rounds.accumulation,
        _TOLERANCE.get(setup.compute or torch.float32, 5e-2), [run.row for run in _running(runs)], left_out)


def _running(runs: Sequence[_Run]) -> list[_Run]:
    return [run for run in runs if run.left_out is None]


class _Run:
    """One contender in the run."""

    def __init__(self, name: str, contender: Contender, workload: Workload, setup: Setup, rounds: Rounds) -> None:
        self.row = Row(name)
        self.left_out: LeftOut | None = None  #: known on every rank
        self._raised: LeftOut | None = None  #: what happened on this one
        self._workload, self._setup, self._rounds = workload, setup, rounds
        before = self._allocated()
        torch.manual_seed(rounds.seed)
        with setup.device:  # initialised where it is used: much faster for a large model
            model = workload.build().to(setup.device)
        self._trainer: Any = self._attempt(lambda: contender(model, setup))  # a Trainer, until it is left out
        self._held = self._allocated() - before
        self._settle()

    def step(self, number: int, *, timed: bool) -> None:
        """One step of training; its time and its loss."""
        batches, before = self._batches(number), self._allocated()
        self._wait()
        dist.barrier()
        began = time.perf_counter()
        loss: Any = self._attempt(lambda: self._trainer.step(batches))
        issued = time.perf_counter() - began
        self._wait()
        dist.barrier()
        seconds = time.perf_counter() - began
        if not self._settle():
            return
        if timed:
            self.row.seconds.append(_over_ranks(seconds, dist.ReduceOp.MAX, self._setup.device))
            if self._setup.device.type != "cpu":
                self.row.issue_seconds.append(_over_ranks(issued, dist.ReduceOp.MAX, self._setup.device))
        else:
            self._held += self._allocated() - before  # the state of the optimizer comes with the first step
        total = _over_ranks(float(loss), dist.ReduceOp.SUM, self._setup.device)
        self.row.losses.append(total / dist.get_world_size())

    def weigh(self, number: int) -> None:
        """Bytes and calls of one more step each."""
        batches, device = self._batches(number), self._setup.device
        found: Any = self._attempt(lambda: self._costs(batches))
        if self._settle():
            self.row.wire_bytes, peak, calls = found
            self.row.peak_bytes = int(_over_ranks(peak, dist.ReduceOp.MAX, device))
            self.row.calls = int(_over_ranks(calls, dist.ReduceOp.MAX, device))

    def _costs(self, batches: Sequence[Batch]) -> tuple[float, float, int]:
        trainer = self._trainer
        with metered(trainer.module, dist.get_world_size(), own=bool(units_below(trainer.module))) as cost:
            trainer.step(batches)
        on_host = self._setup.device.type == "cpu"
        peak = cost.peak if on_host else self._peak_of(lambda: trainer.step(batches))
        return cost.wire, peak, count_calls(lambda: trainer.step(batches))

    def _attempt(self, action: Callable[[], Result]) -> Result | None:
        """What ``action`` gives; None where it raises."""
        try:
            return action()
        except Exception as error:  # of another library, or of the model in it: anything
            first = (str(error).strip() or "no text").splitlines()[0]
            self._raised = LeftOut(self.row.name, f"{type(error).__name__}: {first}", traceback.format_exc())
            return None

    def _settle(self) -> bool:
        """Has nothing raised, on any rank? A collective; otherwise this contender is left out and its memory free."""
        if not _over_ranks(self._raised is not None, dist.ReduceOp.MAX, self._setup.device):
            return True
        raised: list[LeftOut | None] = [None] * dist.get_world_size()
        dist.all_gather_object(raised, self._raised)
        self.left_out = next(one for one in raised if one is not None)
        self._trainer = None
        return False

    def _batches(self, number: int) -> list[Batch]:
        first, rank = number * self._rounds.accumulation, dist.get_rank()
        return [tuple(_on(self._setup.device, value) for value in self._workload.batch(rank, first + k))
                for k in range(self._rounds.accumulation)]

    def _peak_of(self, run: Callable[[], object]) -> int:
        """What the allocator of the device says, less what the other contenders hold."""
        api: Any = torch.get_device_module(self._setup.device)
        api.reset_peak_memory_stats(self._setup.device)
        before = self._allocated()
        run()
        return api.max_memory_allocated(self._setup.device) - before + self._held

    def _allocated(self) -> int:
        device = self._setup.device
        return 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)

    def _wait(self) -> None:
        if self._setup.device.type != "cpu":
            torch.accelerator.synchronize(self._setup.device)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _over_ranks(value: float, operation: Any, device: torch.device) -> float:
    table = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(table, operation)
    return float(table)


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
