"""A thread that looks, twice a second, at what this process waits for.

The thread that trains sleeps inside c10d while it waits, and what it waits for there cannot be waited for in slices:
gloo takes a wait that ran out for the end of the whole group. So another thread looks; it pays nothing to training.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import ClassVar, Protocol

__all__ = ["Watched", "watch"]


class Watched(Protocol):
    """Something that may be stuck."""

    def look(self, after_s: float) -> None:
        """Called again and again; a wait that is younger than ``after_s`` needs no look."""


class Watch:
    """The thread of this process; started with the first thing that is watched."""

    every_s: ClassVar[float] = 0.5  #: between two looks
    things: ClassVar[weakref.WeakSet[Watched]] = weakref.WeakSet()
    process: ClassVar[int] = 0  #: whose thread it is: a fork has none


def watch(thing: Watched) -> None:
    """Look at ``thing`` as long as it lives."""
    Watch.things.add(thing)
    if Watch.process != os.getpid():
        Watch.process = os.getpid()
        threading.Thread(target=_run, daemon=True, name="shardwise-watch").start()


def _run() -> None:
    while True:
        time.sleep(Watch.every_s)
        for thing in list(Watch.things):
            thing.look(Watch.every_s)
        thing = None  # a frame that sleeps must not keep it alive
