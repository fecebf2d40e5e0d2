"""What this rank ran in a group, collective by collective, for when ranks stop meeting each other.

Nothing is compared in advance. A rank whose collective does not end writes the last page of its book into the
store of the group and reads those of the others: under the same number all must have the same call. Who finds two
that differ writes the *verdict*, once for all ranks, so that every rank raises the same error.
The store may be gone, so nothing here waits for it longer than a moment.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from .. import errors
from ..errors import CommunicationError, DivergenceError
from .agreement import Call, DescribeTag, disagreement
from .errands import HERE
from .last_words import shortly

__all__ = ["Logbook", "own_store"]

#: how often a rank that found a difference looks again whether the other ranks came to that number as well
_PATIENCE = 3
#: so many ranks are looked at in one go, beginning with the next one
_NEIGHBOURS = 8
_Page = dict[int, tuple[Call, int]]
"""Calls and their errands, by number."""


class Logbook:
    """The calls of this rank in one group. ``store``: one that only the ranks of this group write into.

    ``kept``: so many calls are remembered, at least as many as ranks can be apart.

    ``note`` belongs to the thread that trains, the rest to the one that looks.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int], kept: int) -> None:
        self.number = 0  #: of the last call
        self._calls: deque[tuple[int, Call, int]] = deque(maxlen=kept)  #: number, call, errand
        self._store, self._rank, self._members = store, rank, members
        self._published = 0
        self._suspicions = 0

    def note(self, call: Call) -> int:
        """This rank begins ``call``; its number in the group."""
        self.number = number = self.number + 1
        self._calls.append((number, call, HERE.number))
        return number

    def publish(self) -> None:
        """Show the others how far this rank is, unless they know it already."""
        calls = list(self._calls)
        if not calls or calls[-1][0] == self._published:
            return
        page = json.dumps([calls[0][0], [[*call, errand] for _, call, errand in calls]])
        if shortly(lambda: self._store.set(f"page/{self._rank}", page) or True):
            self._published = calls[-1][0]

    def compare(self, describe: DescribeTag | None, words: Callable[[], str] = str) -> bool:
        """Raise the verdict, if there is one, or if the pages of two ranks differ; True: look again soon.

        ``words``: what may explain it. A rank looks at the next one that has shown a page: if any two ranks differ,
        so do two neighbours.
        """
        if (verdict := self.verdict()) is not None:
            raise verdict
        mine = {number: (call, errand) for number, call, errand in list(self._calls)}
        size = len(self._members)
        for step in range(1, min(size, _NEIGHBOURS + 1)):
            page = self._page((self._rank + step) % size)
            if page:
                differing = [number for number in page.keys() & mine.keys() if page[number][0] != mine[number][0]]
                if differing:
                    self._suspect(min(differing), mine, describe, words)
                return bool(differing)
        return False

    def verdict(self) -> CommunicationError | None:
        """The error that all ranks raise, if one of them wrote it."""
        found = shortly(lambda: self._store.get("verdict") if self._store.check(["verdict"]) else None)
        return _error(found) if found else None

    def settle(self, error: CommunicationError) -> CommunicationError:
        """Make ``error`` the verdict, unless there is one; the verdict."""
        text = json.dumps([type(error).__name__, str(error)])
        found = shortly(lambda: self._store.compare_set("verdict", "", text))
        return _error(found) if found else error

    def _suspect(self, number: int, mine: _Page, describe: DescribeTag | None,
                 words: Callable[[], str]) -> None:
        """Others may be on the way to this number: the text shall have the calls of all ranks."""
        pages = [mine if place == self._rank else self._page(place) for place in range(len(self._members))]
        entries = [page.get(number) if page else None for page in pages]
        calls = [entry and entry[0] for entry in entries]
        self._suspicions += 1
        if None in calls and self._suspicions <= _PATIENCE:
            return
        facts = disagreement(calls, self._members, describe, [entry[1] if entry else 0 for entry in entries])
        if facts is not None:
            got = f"{facts.got}, in collective {number} of this group{words()}"
            raise self.settle(DivergenceError(facts.what, got=got, remedy=facts.remedy))

    def _page(self, place: int) -> _Page | None:
        key = f"page/{place}"
        found = shortly(lambda: self._store.get(key) if self._store.check([key]) else None)
        if not found:
            return None
        first, calls = json.loads(found)
        return {number: (Call(*call), errand) for number, (*call, errand) in enumerate(calls, first)}


def own_store(group: Any, name: str, device: torch.device) -> Any:
    """A store of which only this group and this start of the job know. Collective, over ``group`` itself.

    The store of a group may have served another start of the job, or another group of the same name.
    """
    life = torch.tensor([time.time_ns()], device=device)
    dist.all_reduce(life, dist.ReduceOp.MAX, group=group)
    return PrefixStore(f"shardwise/{name}/{int(life)}", group.get_group_store())


def _error(found: bytes) -> CommunicationError:
    name, text = json.loads(found)
    kind = getattr(errors, name)
    return kind.retold(text)
