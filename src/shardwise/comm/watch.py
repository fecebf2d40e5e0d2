"""A thread that looks, twice a second, at what this process waits for.

The thread that trains sleeps inside c10d while it waits, and what it waits for there cannot be waited for in slices:
gloo takes a wait that ran out for the end of the whole group. So another thread looks; it pays nothing to training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
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
    things: ClassVar[list[weakref.ref[Watched]]] = []
    process: ClassVar[int] = 0  #: whose thread it is: a fork has none


def watch(thing: Watched) -> None:
    """Look at ``thing`` as long as it lives."""
    Watch.things.append(weakref.ref(thing))
    if Watch.process != os.getpid():
        Watch.process = os.getpid()
        threading.Thread(target=_run, daemon=True, name="shardwise-watch").start()


def _run() -> None:
    told: set[str] = set()
    while True:
        time.sleep(Watch.every_s)
        for kept in list(Watch.things):
            try:
                _look(kept)
            except Exception:  # whatever it is, training and the other looks go on
                text = traceback.format_exc()
                if text not in told:
                    told.add(text)
                    print(text, file=sys.stderr, flush=True)


def _look(kept: weakref.ref[Watched]) -> None:
    thing = kept()
    if thing is None:
        Watch.things.remove(kept)
    else:
        thing.look(Watch.every_s)
