"""Pools of workers, one for each world size, started when first needed and replaced when broken."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.bed.job import Job, Report
from tests.bed.worker import Seat, serve

__all__ = ["Bed", "Pool", "describe"]

STARTUP_TIMEOUT = 120.0
#: how long the other ranks may still take once one has failed: it may be the one they wait for
GRACE = 5.0


class Pool:
    """The workers of one world size."""

    def __init__(self, world: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardwise-bed-"))
        self._seats = [Seat(rank, world, self.folder) for rank in range(world)]
        self._connections: list[Connection] = []
        self._processes = [self._start(seat) for seat in self._seats]
        reports = self._collect(STARTUP_TIMEOUT, GRACE)
        if broken := [report for report in reports if report.outcome != "passed"]:
            self.close()
            raise RuntimeError("\n".join(f"rank {report.rank} {report.outcome} at its start: {report.text}\n"
                                         f"{report.output}" for report in broken))

    def _start(self, seat: Seat):
        # A fork server imports torch once; workers are forks of it and inherit nothing from pytest.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(seat, there), name=f"rank {seat.rank}")
        process.start()
        there.close()
        self._connections.append(here)
        return process

    def run(self, job: Job, timeout: float, grace: float = GRACE) -> list[Report]:
        """Run the job on every rank. After any failure the pool is closed: its ranks may be out of step."""
        for connection in self._connections:
            with suppress(OSError):  # the worker died since its last job; the collection reports it
                connection.send(job)
        reports = self._collect(timeout, grace)
        if any(report.outcome not in ("passed", "skipped") for report in reports):
            self.close()
        return reports

    @property
    def closed(self) -> bool:
        """Whether the workers are gone."""
        return not self._processes

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, timeout: float, grace: float) -> list[Report]:
        """One report from each rank, made up here for a rank that died or does not answer."""
        reports: dict[int, Report] = {}
        waiting = dict(zip(self._connections, self._seats, strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                seat = waiting.pop(connection)  # type: ignore[arg-type]
                report = self._receive(connection, seat)  # type: ignore[arg-type]
                reports[seat.rank] = replace(report, output=_read(seat.output))
                if report.outcome != "passed":
                    deadline = min(deadline, time.monotonic() + grace)
        for seat in waiting.values():
            self._ask_for_stacks(seat)
        for seat in waiting.values():
            text = "no answer, while other ranks gave one" if reports else f"no answer in {timeout:g} s"
            reports[seat.rank] = Report(seat.rank, "stuck", f"{text}\n{_settled(seat.stacks)}",
                                        _read(seat.output))
        return [reports[seat.rank] for seat in self._seats]

    def _receive(self, connection: Connection, seat: Seat) -> Report:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            process = self._processes[seat.rank]
            process.join(timeout=5)
            return Report(seat.rank, "died", f"the process ended with exit code {process.exitcode}")
        return message if isinstance(message, Report) else Report(seat.rank, "passed")

    def _ask_for_stacks(self, seat: Seat) -> None:
        pid = self._processes[seat.rank].pid
        if pid is not None:
            os.kill(pid, signal.SIGUSR1)


class Bed:
    """All pools of one session."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, job: Job, timeout: float, grace: float = GRACE) -> list[Report]:
        """Run the job on ``world`` ranks and return one report for each."""
        pool = self._pools.get(world)
        if pool is None or pool.closed:
            pool = self._pools[world] = Pool(world)
        return pool.run(job, timeout, grace)

    def close(self) -> None:
        """End every worker."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _settled(path: Path, patience: float = 3.0) -> str:
    """A file's text once it has stopped growing."""
    seen, end = "", time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(0.1)
        text = _read(path)
        if text and text == seen:
            break
        seen = text
    return seen or "(no stacks: the process does not even answer signals)"


def describe(reports: Sequence[Report]) -> str:
    """The failures of a job, rank by rank; ranks that say the same are put together."""
    parts: dict[str, list[int]] = {}
    for report in reports:
        if report.outcome not in ("passed", "skipped"):
            text = f"{report.outcome}: {report.text}"
            text += f"\n--- printed ---\n{report.output.rstrip()}" if report.output.strip() else ""
            parts.setdefault(text, []).append(report.rank)
    passed = [report.rank for report in reports if report.outcome == "passed"]
    lines = [f"=== rank {', '.join(map(str, of))} {text}" for text, of in parts.items()]
    return "\n".join(lines + ([f"=== passed on rank {', '.join(map(str, passed))}"] if passed else []))
