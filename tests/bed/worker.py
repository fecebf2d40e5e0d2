"""A worker: one rank of a group. It runs jobs until its connection closes."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.config import parse_warning_filter  # pytest's reading of a filter line has no public name

from shardwise.comm.watch import Watch
from tests.bed import state
from tests.bed.job import Job, Report

__all__ = ["Seat", "serve"]

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_LONGEST_VALUE = 400


@dataclass(frozen=True)
class Seat:
    """A worker's place: its rank, and the folder that it shares with its pool."""

    rank: int
    world: int
    folder: Path

    @property
    def output(self) -> Path:
        """All that the worker printed since its present job began."""
        return self.folder / f"output-{self.rank}"

    @property
    def stacks(self) -> Path:
        """Where the worker writes its Python stacks when it gets SIGUSR1."""
        return self.folder / f"stacks-{self.rank}"


def serve(seat: Seat, connection: Connection) -> None:
    """The worker's whole life; the entry point of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers itself
    _redirect(seat)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    Watch.every_s = 0.1  # ranks that do different things hear of it soon
    dist.init_process_group(
        "gloo", init_method=f"file://{seat.folder}/store", rank=seat.rank, world_size=seat.world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    gc.collect()
    gc.freeze()  # the collection after each test need not walk torch itself
    connection.send("ready")
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            break
        os.truncate(seat.output, 0)
        connection.send(_execute(seat, job))
    dist.destroy_process_group()


def _redirect(seat: Seat) -> None:
    """Send everything this process prints to files, what C++ prints too."""
    output = os.open(seat.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, seat.stacks.open("w"), all_threads=True)


def _execute(seat: Seat, job: Job) -> Report:
    try:
        function = job.function()
        arguments: dict[str, Any] = pickle.loads(job.arguments)
        mine = {"rank": seat.rank, "world": seat.world}
        arguments |= {name: mine[name] for name in arguments.keys() & mine.keys()}
        with _fresh(job.filters), _lanes():
            function(**arguments)
    except pytest.skip.Exception as skipped:
        return Report(seat.rank, "skipped", str(skipped))
    except BaseException as error:
        return Report(seat.rank, "failed", _explain(error, job))
    return Report(seat.rank, "passed")


@contextmanager
def _fresh(filters: tuple[str, ...]) -> Iterator[None]:
    """A seeded start, strict warnings, and an end that leaves nothing behind."""
    state.seed()
    before = state.snapshot()
    with warnings.catch_warnings(), _swallowed_errors() as swallowed:
        warnings.resetwarnings()
        for line in filters:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))
        yield
        gc.collect()
    if swallowed:
        raise AssertionError("errors that nobody could catch:\n" + "\n".join(swallowed))
    if left := state.changes(before, state.snapshot()):
        raise AssertionError("the test left global state changed:\n  " + "\n  ".join(left))


def _lanes() -> AbstractContextManager[object]:
    """With ``SHARDWISE_LANES=recorded`` every test also checks the order that streams would keep."""
    if os.environ.get("SHARDWISE_LANES") != "recorded":
        return nullcontext()
    from tests.bed.recording import recorded

    return recorded()


@contextmanager
def _swallowed_errors() -> Iterator[list[str]]:
    """Collect the errors of destructors and threads, which Python only prints."""
    found: list[str] = []

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        found.append(f"{event.err_msg or 'ignored in'} {event.object!r}: {event.exc_value!r}")

    def in_thread(event: threading.ExceptHookArgs) -> None:
        found.append(f"in thread {event.thread and event.thread.name}: {event.exc_value!r}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    try:
        yield found
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def _explain(error: BaseException, job: Job) -> str:
    """The traceback without our own frames, and the values in the test's innermost frame."""
    trace = traceback.TracebackException.from_exception(error)
    ours = {__file__, str(Path(__file__).with_name("job.py"))}
    while trace.stack and trace.stack[0].filename in ours:
        del trace.stack[0]
    lines = ["".join(trace.format()).rstrip()]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)
              if frame.f_code.co_filename == str(job.path)]
    if frames:
        lines += [f"    {name} = {_brief(value)}" for name, value in frames[-1].f_locals.items()]
    return "\n".join(lines)


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a freed tensor, say
        text = f"<{type(value).__name__} whose repr fails: {error}>"
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + " …"
