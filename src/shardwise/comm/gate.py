"""Where ranks of one host wait for each other: a barrier that compares what they are about to do.

Each rank writes its call and then its arrival count into its own control block, and rings the
bell (an eventfd) of every peer; a rank that still misses others sleeps in ``poll`` on its own
bell and on the processes of its peers (pidfds). Measured at 2 ranks on 2 cores, 14 to 19 µs a
crossing: an eventfd, a byte over a Unix socket and a futex cost the same, for the scheduler's
wake-up is what one pays for. The eventfd is left because one descriptor wakes a rank whoever
rings, because the same ``poll`` sees a peer die at once, and because it needs no system call by
number. A socket's end-of-file would show a death too, but not while a forked child, such as a
loader's worker, holds a copy of it. Spinning before sleeping only took time from the peer that
was waited for.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from ..errors import CommunicationError, LeftPassError
from .agreement import Call, DescribeTag, peer_error
from .errands import HERE
from .last_words import absent, remember, words_of
from .passes import Passes, Standing
from .rendezvous import Peer
from .underway import Waiting
from .vigil import look

__all__ = ["CONTROL_BYTES", "Gate", "Sources"]

# The control block, in 64-bit words: the count of arrivals, whether the rank left, and places for a call. They
# take turns: a rank can be at most one crossing ahead of a peer, and one more for each crossing that it gave up.
_COUNT, _LEFT, _CALLS, _STRIDE, _PLACES = 0, 1, 2, 12, 4
CONTROL_BYTES = 8 * (_CALLS + _PLACES * _STRIDE)
_CALL = len(Call._fields)
_WORDS = _CALL + len(Standing._fields)


class Sources(NamedTuple):
    """Offsets, in a rank's segment, of what its peers may read; -1 for nothing."""

    data: int = -1
    scratch: int = -1


NOTHING = Sources()

class Gate:
    """One group's gate. One crossing at a time."""

    def __init__(self, rank: int, peers: Sequence[Peer], timeout_s: float) -> None:
        self.describe_tag: DescribeTag | None = None
        self.passes = Passes()
        self._place = rank
        self._members = tuple(peer.rank for peer in peers)
        self._timeout_s = timeout_s
        self._peers = [peer for place, peer in enumerate(peers) if place != rank]
        self._bell = peers[rank].bell
        self._blocks = [peer.segment.words(peer.control, CONTROL_BYTES // 8) for peer in peers]
        self._own = self._blocks[rank]
        self._others = {peer.rank: block for peer, block in zip(peers, self._blocks, strict=True)
                        if peer.rank != peers[rank].rank}
        self._rank_by_life = {peer.life: peer.rank for peer in self._peers}
        self._poll = select.poll()
        for descriptor in (self._bell, *self._rank_by_life):
            self._poll.register(descriptor, select.POLLIN)
        self._dead: set[int] = set()
        self._count = 0
        self._lock = Lock()
        self._owner = os.getpid()
        self._shut: str | None = None
        self._passed: Call | None = None  #: what all came for last
        remember({peer.rank: peer.pid for peer in self._peers})

    def meet(self, call: Call, sources: Sources = NOTHING) -> list[Sources]:
        """Wait until all ranks came with the same call; gives what each of them lays open."""
        while True:
            self._require_open(call)
            passes, place = self.passes, _CALLS + _STRIDE * ((self._count + 1) % _PLACES)
            mine = [*call, passes.count if passes.inside else -passes.count, passes.left, HERE.number]
            for word, value in enumerate((*mine, *sources), place):
                self._own[word] = value
            self.cross(call, passes)
            rows = [block[place : place + _WORDS + 2].tolist() for block in self._blocks]
            if not any(row[:_WORDS] != mine for row in rows) or self._agreed(rows):
                return [Sources(*row[_WORDS:]) for row in rows]

    def _agreed(self, rows: list[list[int]]) -> bool:
        return self.passes.agreed([Call(*row[:_CALL]) for row in rows], [Standing(*row[_CALL:_WORDS]) for row in rows],
                                  self._place, self._members, self.describe_tag)

    def cross(self, call: Call, passes: Passes | None = None) -> None:
        """Wait until all ranks have arrived here. ``passes``: the wait may be given up when a rank has left one.

        A crossing that was given up is over for this rank: others arrive there yet, and see that they must ask again.
        """
        self._require_open(call)
        self._count += 1
        self._fence()
        self._own[_COUNT] = self._count
        self._ring()
        try:
            self._wait(call, passes)
        except BaseException as error:
            if not (isinstance(error, LeftPassError) and self._keeps_pace()):
                self.shut(str(error) or type(error).__name__)
            raise
        self._passed = call
        self._fence()

    def _keeps_pace(self) -> bool:
        """Is no peer so far behind that it may still read the place which this rank writes next?"""
        return all(block[_COUNT] > self._count + 1 - _PLACES for block in self._blocks)

    def shut(self, reason: str) -> None:
        """Tell the peers that this rank comes no more, and free descriptors and their memory. Safe to call twice."""
        if self._shut is not None or os.getpid() != self._owner:
            return
        self._shut = reason
        self._own[_LEFT] = 1
        self._ring()
        for descriptor in (self._bell, *(fd for peer in self._peers for fd in (peer.bell, peer.life))):
            os.close(descriptor)
        self._peers, self._blocks, self._others = [], [], {}

    def _wait(self, call: Call, passes: Passes | None) -> None:
        if self._missing():
            wait = Waiting(call, self.describe_tag, self._members, self._missing, self._passed)
            wait.passes = passes
            with wait:
                self._wait_for_missing(call, wait)

    def _wait_for_missing(self, call: Call, wait: Waiting) -> None:
        deadline = wait.since + self._timeout_s
        while missing := self._missing():
            self._require_presence(call, missing)
            now = time.monotonic()
            if now >= wait.next_look:
                look(wait)
            if now >= deadline:
                names = _ranks(missing)
                why = "".join(f"; rank {rank} {state}" for rank, state in absent(missing).items())
                raise peer_error(f"{names} did not arrive within {self._timeout_s:g} s{why}", call, self._members,
                                 self.describe_tag)
            self._listen(max(min(deadline, wait.next_look) - now, 0.001))

    def _listen(self, timeout_s: float) -> None:
        """Sleep until a bell rings or a peer ends, and note which."""
        for descriptor, _ in self._poll.poll(1000 * timeout_s + 1 if timeout_s else 0):
            if descriptor == self._bell:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            else:
                self._poll.unregister(descriptor)
                self._dead.add(self._rank_by_life[descriptor])

    def _missing(self) -> list[int]:
        return [rank for rank, block in self._others.items() if block[_COUNT] < self._count]

    def _require_presence(self, call: Call, missing: list[int]) -> None:
        if not self._dead and not any(self._others[rank][_LEFT] for rank in missing):
            return
        self._listen(0)  # a peer leaves at once when it sees a death, so look for the death itself
        missing = self._missing()  # who arrived, and only then died or left, is no loss here
        if died := [rank for rank in missing if rank in self._dead]:
            raise peer_error(f"{_ranks(died)} died", call, self._members, self.describe_tag, words_of(died))
        if left := [rank for rank in missing if self._others[rank][_LEFT]]:
            raise peer_error(f"{_ranks(left)} left the group", call, self._members, self.describe_tag,
                             words_of(left))

    def _require_open(self, call: Call) -> None:
        if self._shut is not None:
            raise CommunicationError(
                f"the shared-memory group of {_ranks(self._members)} is closed, so there is no "
                f"{call.subject(self.describe_tag)} ({self._shut})",
                remedy="After a lost rank, start the job again; destroy a process group after its models' last use.")

    def _ring(self) -> None:
        for peer in self._peers:
            os.eventfd_write(peer.bell, 1)

    def _fence(self) -> None:
        """Order this thread's memory accesses on machines that reorder them.

        Two turns of a lock: what was done before the release of the first turn is seen by all
        before anything after the acquisition of the second.
        """
        with self._lock:
            pass
        with self._lock:
            pass


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
