"""Signs of life between hosts, for where a rank may be busy for long and the others only wait.

Of a process on its own host a rank can see whether it lives. For those on other hosts each rank writes a
number into the store of the group, again and again, from a thread of its own. A rank that is busy goes on
doing so; one that is dead, stopped, or behind a network that is cut does not. A rank that the store itself
does not answer sees no number change, so both sides of a cut notice.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .last_words import shortly

__all__ = ["Beats"]


class Beats:
    """This rank's beat, every ``every_s`` seconds as long as this object lives, and what is seen of ``others``."""

    def __init__(self, store: Any, rank: int, others: Iterable[int], every_s: float) -> None:
        self._store, self._rank, self._number = store, rank, 0
        self._seen: dict[int, bytes | None] = dict.fromkeys(others)
        threading.Thread(target=_beat, args=(weakref.ref(self), every_s), daemon=True, name="shardwise-beats").start()

    def silent(self) -> dict[int, str]:
        """Which of the others have not beaten since this was asked last."""
        before, self._seen = self._seen, {rank: self._read(f"shardwise/beat/{rank}") for rank in self._seen}
        return {rank: "gave no sign of life" for rank, beat in self._seen.items() if beat == before[rank]}

    def beat(self) -> None:
        """Once more."""
        self._number += 1
        self._store.set(f"shardwise/beat/{self._rank}", str(self._number))

    def _read(self, key: str) -> bytes | None:
        return shortly(lambda: self._store.get(key) if self._store.check([key]) else None)


def _beat(kept: weakref.ref[Beats], every_s: float) -> None:
    with suppress(RuntimeError, OSError):  # the store is gone
        while (beats := kept()) is not None:
            beats.beat()
            del beats
            time.sleep(every_s)
