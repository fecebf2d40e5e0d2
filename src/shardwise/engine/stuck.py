"""What a rank is doing: printed when it waits too long, or when it gets a signal.

A thread of its own prints, so that it does not matter where the main thread is stuck. The signal
reaches that thread through a pipe: faulthandler writes into it from the signal handler, whatever
the interpreter is busy with. Until a report is due the thread sleeps; the collectives note their
waits in any case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import select
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from ..comm.beats import Beats
from ..comm.underway import Waiting
from ..errors import ConfigurationError
from ..plan.lifecycle import Pass
from .unit import Unit

__all__ = ["follow", "report_stuck", "stuck_report"]

_VARIABLE = "SHARDWISE_STUCK_AFTER"
_UNASKED_S = 60.0  # long waits are often meant: another rank writes a file, or evaluates
_HINT = f" (told unasked, on one rank; {_VARIABLE}=<seconds> tells more, {_VARIABLE}=0 nothing)"
_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}",
              contextlib.__file__, "<")


class _Session(Protocol):
    """What of a session is looked at."""

    root: Unit
    open: list[Unit]
    pass_: Pass


_SESSIONS: weakref.WeakSet[_Session] = weakref.WeakSet()


def follow(session: _Session) -> None:
    """Tell of ``session`` in reports, as long as it lives. The first one looks at the environment."""
    if not _Kept.asked:
        _report_by_environment()
    _SESSIONS.add(session)
    Beats.doing = _present


def stuck_report() -> str:
    """One line: this rank's collective and for how long, unit and phase, and the user's Python line."""
    return f"[shardwise] rank {_rank()} {_present()}"


def _present() -> str:
    now = Waiting.now
    doing = f"waits {time.monotonic() - now.since:.1f} s in {now.text()}" if now else "waits in no collective"
    return f"{doing}; {_phase()}; {_line()}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _phase() -> str:
    for session in list(_SESSIONS):
        if session.pass_ is not Pass.REST:
            inner = session.open[-1] if session.open else session.root
            return f"{session.pass_.name.lower()} of {inner.name!r}"
    return "no model runs" if _SESSIONS else "no model has run"


def _line() -> str:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return "at no line of yours"
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"at {name}:{number} in {frame.f_code.co_name}: {linecache.getline(name, number).strip()}"


class _Reporter(threading.Thread):
    """Prints reports until it is stopped.

    ``unasked``: only the first rank of those that wait speaks, and, after its first report, only about
    waits twice as long as the last that it told of.
    """

    def __init__(self, after_s: float | None, number: int | None, *, unasked: bool = False) -> None:
        super().__init__(name="shardwise-stuck", daemon=True)
        self.after_s, self.number, self.unasked = after_s, number, unasked
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._told: Waiting | None = None
        self._over = False
        if number is not None:
            known = signal.getsignal(number)
            faulthandler.register(number, self._write, all_threads=False, chain=callable(known))

    def run(self) -> None:
        """Sleep until a signal, or until it is time to look."""
        while not self._over:
            ready, _, _ = select.select([self._read], [], [], self._pause())
            if self._over:
                break
            if ready:
                time.sleep(0.05)  # one signal is written in several pieces
                os.read(self._read, 1 << 16)
                _say(stuck_report())
            elif (now := Waiting.now) is not None and now is not self._told \
                    and self.after_s is not None and time.monotonic() - now.since >= self.after_s:
                self._told = now
                self._tell(now)

    def _pause(self) -> float | None:
        """How long to sleep: until the present wait is too long; without one, a quarter of that time."""
        if self.after_s is None:
            return None
        now = Waiting.now
        if now is None or now is self._told:
            return self.after_s / 4
        return max(now.since + self.after_s - time.monotonic(), 0.01)

    def _tell(self, wait: Waiting) -> None:
        if not self.unasked:
            _say(stuck_report())
            return
        self.after_s = 2 * (time.monotonic() - wait.since)
        missing = wait.missing() if wait.missing is not None else ()
        if _rank() == min(rank for rank in wait.members if rank not in missing):
            _say(stuck_report() + _HINT)

    def stop(self) -> None:
        """End the thread and give the signal back."""
        self._over = True
        if self.number is not None:
            faulthandler.unregister(self.number)
        os.write(self._write, b".")
        self.join()
        os.close(self._read)
        os.close(self._write)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Kept:
    reporter: _Reporter | None = None
    asked = False  # the environment was looked at


def report_stuck(after_s: float | None = None, *, on_signal: bool = True) -> None:
    """Print to stderr what this rank is doing when it is stuck; each rank prints its own line.

    ``after_s``: when it has waited this many seconds in one collective, once for each. ``on_signal``:
    also whenever the process gets SIGUSR1 (``kill -USR1 <pid>``); a handler that Python code has
    set is called as well. ``report_stuck(None, on_signal=False)`` ends the reports. The environment
    variable ``SHARDWISE_STUCK_AFTER=<seconds>`` does the same for a program that is not changed; 0 is silence.

    Where neither was given, a wait of more than a minute is told of by one of the ranks that wait, and
    then only one twice as long; signals are left alone.

    Raises ``ConfigurationError`` for a time that is not positive.
    """
    if after_s is not None and not after_s > 0:
        raise ConfigurationError("the time limit of report_stuck is not positive", got=after_s,
                                 expected="seconds, or None", remedy="Pass 30.0, say.")
    _Kept.asked = True
    if _Kept.reporter is not None:
        _Kept.reporter.stop()
        _Kept.reporter = None
    if after_s is not None or on_signal:
        _start(_Reporter(after_s, int(signal.SIGUSR1) if on_signal else None))


def _start(reporter: _Reporter) -> None:
    _Kept.reporter = reporter
    reporter.start()


def _report_by_environment() -> None:
    _Kept.asked = True
    text = os.environ.get(_VARIABLE)
    if not text:
        _start(_Reporter(_UNASKED_S, None, unasked=True))
        return
    try:
        seconds = float(text)
    except ValueError as error:
        raise ConfigurationError(f"{_VARIABLE} is not a number of seconds", got=repr(text),
                                 remedy="Set it to 30, say, or to 0 for silence.") from error
    report_stuck(seconds or None, on_signal=seconds != 0)
