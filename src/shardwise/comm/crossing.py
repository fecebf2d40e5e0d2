"""Ranks that wait for each other in different places: none of them will ever come.

One has no batch left and saves a checkpoint, while the other waits for it in a gather. Each wait is in order, so
nothing in either of them tells. A rank that has waited for a second says in the store which ranks it needs, and says so
again at each look. If a rank that it needs goes on saying that it needs this one, somewhere else, both have the error.
Some places are closed by that, for whoever comes there again would meet what the other left behind.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from typing import ClassVar

import torch.distributed as dist

from ..errors import DivergenceError
from .beats import Beats
from .last_words import read_all, show

__all__ = ["Crossing", "closed"]

#: so many looks in a row must find the other rank where it was
_SURE = 3
#: at so many ranks one looks
_NEIGHBOURS = 16


def closed(place: str) -> str:
    """Why nobody comes to ``place`` any more; empty where it is open."""
    return read_all([_key(place)])[0]


def _key(place: str) -> str:
    return f"shardwise/crossed/{place}"


class Crossing:
    """One wait of the thread that trains. ``place``: where it waits, the same text on all ranks that wait there.

    ``once``: the place is closed when one of its waits crosses another; all that wait there have the error.
    """

    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, place: str, what: str, *, once: bool = False) -> None:
        self._once = once
        self._place, self._what, self._number, self._looks = place, what, next(self._numbers), 0
        self._seen: dict[int, tuple[int, int, int]] = {}  #: rank -> number of its wait, its looks, how often they grew

    def look(self, needed: Sequence[int]) -> None:
        """Raise ``DivergenceError`` if a rank of ``needed`` waits for this one elsewhere."""
        if self._once and (text := closed(self._place)):
            error = DivergenceError.retold(text)
            raise error
        if threading.current_thread() is not threading.main_thread() or not dist.is_initialized():
            return  # a thread in the background may wait while training goes on
        own, others = dist.get_rank(), [rank for rank in needed if rank != dist.get_rank()][:_NEIGHBOURS]
        self._looks += 1
        doing = Beats.doing()
        what = f"{self._what} ({doing})" if doing else self._what
        show(f"shardwise/wait/{own}", json.dumps([self._number, self._looks, self._place, list(needed), what]))
        for rank, found in zip(others, read_all([f"shardwise/wait/{rank}" for rank in others]), strict=True):
            if found and self._crosses(rank, own, *json.loads(found)):
                _, _, there, _, theirs = json.loads(found)
                error = self._error({own: what, rank: theirs})
                for place in (self._place, there):
                    show(_key(place), str(error))
                raise error

    def _crosses(self, rank: int, own: int, number: int, looks: int, place: str, needed: list[int], _: str) -> bool:
        if place == self._place or own not in needed:
            self._seen.pop(rank, None)
            return False
        before = self._seen.get(rank)
        same = before is not None and before[0] == number
        grown = (before[2] + (looks > before[1])) if before is not None and same else 0
        self._seen[rank] = number, looks, grown
        return grown >= _SURE

    @staticmethod
    def _error(waits: dict[int, str]) -> DivergenceError:
        return DivergenceError(
            "ranks wait for each other in different places, so neither will come",
            got=", ".join(f"rank {rank} is in {waits[rank]}" for rank in sorted(waits)),
            remedy="Every rank must call the same: as many batches, and each save, load or summon on all ranks.")
