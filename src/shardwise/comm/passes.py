"""Which pass the ranks of a group are in, and which they left by an exception.

A rank whose forward or backward raises may catch the exception and go on, while the others still wait for it in
collectives of that pass. Its process is well, so only words help: who leaves a pass leaves a *note* in the store.
The others read it when they have waited for a second. Or they meet that rank before, in a collective of a later
pass, for each rank tells how many passes it has begun: then who is still in the pass that was left raises, and the
others ask again, until all are in the same one.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from ..errors import LeftPassError, PeerError
from .agreement import Call, DescribeTag, require_agreement
from .errands import HERE
from .last_words import read, tell
from .underway import Waiting

__all__ = ["Note", "Passes", "Standing", "left_pass", "notice_leavers"]


class Note(NamedTuple):
    """Why a rank left a pass."""

    rank: int
    what: str  #: ``forward of 'layers.3'``
    error: str  #: ``ValueError: …``; empty where it is not known

    def text(self, count: int) -> str:
        """``rank 1 left pass 17 in forward of 'layers.3' by ValueError: …``"""
        where = f" in {self.what}" if self.what else ""
        return f"rank {self.rank} left pass {count}{where} by {self.error or 'an exception in autograd'}"


class Standing(NamedTuple):
    """What each rank tells in a collective."""

    count: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]  #: passes begun; negative outside of one
    left: int = 0  #: the last one that an exception ended
    errand: int = 0  #: the call of the library that it is in


class Passes:
    """The passes, a forward and its backward each, of the ranks ``members``, as this rank counts them.

    Without members: a group that no model runs on.
    """

    every: ClassVar[weakref.WeakSet[Passes]] = weakref.WeakSet()
    _made: ClassVar[dict[tuple[int, ...], int]] = {}

    def __init__(self, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        self.count = self.left = 0  #: as in ``Standing``
        self.inside = False  #: does one run?
        self.departures, self.farewell = 0, ""  #: how often this rank left one, and what it said of it last
        self._number = self._made.get(self.members, 0)
        if self.members:
            self._made[self.members] = self._number + 1
            self.every.add(self)

    @property
    def standing(self) -> Standing:
        """What this rank tells in a collective."""
        return Standing(self.count if self.inside else -self.count, self.left, HERE.number)

    def leave(self, note: Note, *, news: bool) -> None:
        """An exception ended the pass. ``news``: it is this rank's own; what others told first is not told twice."""
        self.departures, self.farewell = self.departures + 1, note.text(self.count)
        if self.left < self.count:
            self.left = self.count
            if news or not self.notes(self.count):
                tell(self._key(self.count), json.dumps(note) + "\n")

    def notes(self, count: int) -> list[Note]:
        """Who left that pass, and why."""
        return [Note(*json.loads(line)) for line in (read(self._key(count)) or "").splitlines()]

    def align(self, standings: Sequence[Standing]) -> None:
        """All ranks are in one pass: count it as they do, for some may have run a pass alone."""
        self.count = max(abs(standing.count) for standing in standings)
        self.left = max(standing.left for standing in standings)

    def recently_left(self) -> str:
        """``; rank 1 left pass 17 in …``, of this pass and the one before, for a message."""
        return "".join(f"; {note.text(count)}" for count in (self.count - 1, self.count) if count > 0
                       for note in self.notes(count))

    def agreed(self, calls: Sequence[Call], standings: Sequence[Standing], place: int, members: Sequence[int],
               describe: DescribeTag | None) -> bool:
        """Do all ranks run the same call? False: ask again, for others are being told to leave their pass.

        ``place``: this rank's. Raises ``LeftPassError`` if another rank has left this one's pass, and
        ``DivergenceError`` on all ranks alike.
        """
        behind = [_is_behind(place, standings) for place in range(len(standings))]
        alike = all(call == calls[0] for call in calls)
        if alike and not any(late and standing.count > 0 for late, standing in zip(behind, standings, strict=True)):
            self.align(standings)
            return True
        last = max(standing.left for standing in standings)
        if behind[place]:
            count = abs(standings[place].count)
            ahead = [rank for rank, standing in zip(members, standings, strict=True) if standing.left >= count]
            said = [note for note in self.notes(count) if note.rank in ahead]
            raise _left(said or [Note(rank, "", "") for rank in ahead], count, calls[place], members, describe)
        if not any(behind):
            recent = self.notes(last) if last >= max(abs(standing.count) for standing in standings) - 1 else []
            count = max(abs(standing.count) for standing in standings)
            when = f", in pass {count} of the model" if count else ""
            require_agreement(calls, members, describe, when + "".join(f"; {note.text(last)}" for note in recent),
                              [standing.errand for standing in standings])
        return not any(behind)

    def _key(self, count: int) -> str:
        return f"shardwise/left/{self._number} of {','.join(map(str, self.members))}/{count}"


def _is_behind(place: int, standings: Sequence[Standing]) -> bool:
    """Has another rank left the pass that this one is in?"""
    count, left, _ = standings[place]
    return left < abs(count) <= max(other.left for other in standings)


def notice_leavers(wait: Waiting) -> None:
    """Raise ``PeerError`` if a rank that ``wait`` needs has left the pass; ``LeftPassError`` where all may go on."""
    for passes in list(Passes.every):
        if passes.inside and passes.left < passes.count and set(wait.members) <= set(passes.members):
            needed = wait.needed()
            if gone := [note for note in passes.notes(passes.count) if note.rank in needed]:
                raise _left(gone, passes.count, wait.call, wait.members, wait.describe,
                            alive=wait.passes is passes)


def left_pass(who: str, what: str, members: Sequence[int], *, alive: bool = True) -> PeerError:
    """``who`` left a pass, so there is no ``what``, which others run. ``alive``: they may go on over this transport."""
    text = f"{who}, so there is no {what} in the group of ranks {', '.join(map(str, members))}"
    if not alive:
        return PeerError(text, remedy="Over this transport ranks cannot go on after that: start the job again.")
    return LeftPassError(text, remedy="All ranks live. The gradients of this pass are void; whoever catches this error "
                                      "and calls zero_grad() may go on with the next batch, with all others.")


def _left(notes: Sequence[Note], count: int, call: Call, members: Sequence[int],
          describe: DescribeTag | None, *, alive: bool = True) -> PeerError:
    who = " and ".join(note.text(count) for note in notes)
    return left_pass(who, call.subject(describe), members, alive=alive)
