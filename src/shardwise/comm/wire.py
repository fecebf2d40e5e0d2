"""Messages between the ranks of a group that meet only where both ranks mean the same.

A message carries a mark: a hash of the number of its collective in the group, and of the call that its rank runs.
Ranks that run different things wait for each other; nothing is mixed, and no rank sends a word in advance. The
logbook tells then who ran what.

The connections are gloo's, but our own: other people's messages cannot meet ours, and we may cut them. That is the
only way to wake a rank that waits in gloo, and at the same time every other rank hears of it.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import CommunicationError, DivergenceError, LeftPassError
from ..torch_private import group_timeout
from . import vigil
from .agreement import Call, peer_error
from .collectives import Collectives, Handle
from .exchanges import Messages, Steps
from .failures import explained
from .last_words import introduce
from .logbook import Logbook, own_store
from .passes import Passes, Standing, left_pass
from .underway import Waiting
from .watch import watch

__all__ = ["Exchange", "Post", "Wire"]

_MARKS = 0x7FFF_FFFF  # gloo's tags
_SPREAD = 0x9E37_79B1
#: collectives that nobody waited for; with one more, the oldest of them is waited for
_UNDERWAY = 64
_CPU = torch.device("cpu")
_CUT_S = timedelta(milliseconds=1)


class _Line:
    """The connections of a group and its logbook, from one divergence to the next."""

    def __init__(self, channel: Any, book: Logbook) -> None:  # of gloo
        self.channel, self.book = channel, book
        self.underway: dict[int, Exchange] = {}
        self.waiting: Waiting | None = None
        self.passes = Passes()  #: of the transport that waits
        self.verdict: CommunicationError | None = None  #: why it was cut
        self.passed: Call | None = None  #: the last that was waited for
        self.departures = 0  #: how many passes this rank had left when it came here
        self.seen = 0  #: the last call when it was last looked at

    def cut(self) -> None:
        """Close every connection, so that whoever waits in one, here or elsewhere, hears of it at once.

        gloo does so when a wait runs out.
        """
        for step in range(1, self.channel.size()):
            peer = (self.channel.rank() + step) % self.channel.size()
            with suppress(RuntimeError):
                self.channel.recv([torch.empty(1)], peer, _MARKS).wait(_CUT_S)


class Wire:
    """The connections of one group; ``owner``, in what follows, is the transport that uses them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self.others = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._group = weakref.ref(group)
        self._line: _Line | None = None
        self._store: Any = None
        self._generation = 0
        self._broken: object = None  #: why there are no more collectives

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Wire:
        """The one of ``group``."""
        if group not in _WIRES:
            _WIRES[group] = cls(group)
        return _WIRES[group]

    def start(self, owner: Collectives, call: Call, steps: Callable[[Messages], Steps]) -> Exchange:
        """Begin ``call``, whose messages are made by ``steps``."""
        line = self._line
        if line is not None and line.departures != owner.passes.departures:
            line = self._part(line, owner.passes)
        line = line or self._open(owner, call)
        number = line.book.note(call)
        exchange = Exchange(self, owner, line, number, call)
        line.underway[number] = exchange
        try:
            exchange.begin(steps(Post(self, line.channel, hash((number, call)))))
        except RuntimeError as error:
            raise self.end(line, error, owner, call) from error
        if len(line.underway) > _UNDERWAY:
            next(iter(line.underway.values())).wait()
        return exchange

    def _part(self, line: _Line, passes: Passes) -> None:
        """This rank has left a pass in which others may be: they are told, and meet it over new connections."""
        line.verdict = line.book.settle(left_pass(passes.farewell, "collective of it", self.members))
        line.cut()
        self._line, self._generation = None, self._generation + 1

    def end(self, line: _Line, error: RuntimeError, owner: Collectives, call: Call) -> CommunicationError:
        """Cut ``line`` after ``error``; what to raise, the same on every rank that waited with this one."""
        verdict = line.verdict or line.book.verdict()
        if verdict is None:
            known = isinstance(error, CommunicationError)
            verdict = line.book.settle(error if known else explained(error, call, owner))
        if line.verdict is None:
            line.verdict = verdict
            line.cut()
        if self._line is line:
            self._line, self._generation = None, self._generation + 1
            if not isinstance(verdict, (DivergenceError, LeftPassError)):  # after which all ranks may go on
                self._broken = verdict
        return verdict

    def look(self, after_s: float) -> None:
        """Does a collective not end? Then show what this rank runs, and see what the others do."""
        line = self._line
        if line is None or line.verdict is not None:
            return
        wait, number = line.waiting, line.book.number
        if wait is None or time.monotonic() - wait.since < after_s:
            if line.underway and number == line.seen:
                line.book.publish()
            line.seen = number
            return
        try:
            line.book.publish()
            line.book.compare(wait.describe, line.passes.recently_left)
            if time.monotonic() >= wait.next_look:
                vigil.look(wait)
        except CommunicationError as error:
            line.verdict = line.book.settle(error)
            line.cut()

    def leave(self, why: str) -> None:
        """This rank takes part no more; the others hear of it."""
        line, self._line, self._broken = self._line, None, self._broken or why
        if line is not None:
            line.cut()

    def close(self, why: str) -> None:
        """This rank takes part no more; nothing is under way. Another wire may follow where all close this."""
        self._line, self._store, self._broken = None, None, self._broken or why
        if (group := self._group()) is not None and _WIRES.get(group) is self:
            del _WIRES[group]

    def _open(self, owner: Collectives, call: Call) -> _Line:
        group = self._group()
        subject, ranks = call.subject(owner.describe_tag), ", ".join(map(str, self.members))
        if group is None:
            raise CommunicationError(f"the process group was destroyed before {subject}",
                                     remedy="Call dist.destroy_process_group() after the last use of the model.")
        if self._broken is not None:
            raise CommunicationError(f"the group of ranks {ranks} is closed, so there is no {subject} ({self._broken})",
                                     remedy="After a lost rank, start the job again.")
        introduce()
        try:
            self._line = self._connected(group, owner, call)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise explained(error, call, owner) from error
        self._line.departures = owner.passes.departures
        if not self._generation:
            watch(self)
        return self._line

    def _connected(self, group: Any, owner: Collectives, call: Call) -> _Line:
        passes = owner.passes
        if self._store is None:
            self._store = own_store(group, "wire", _CPU)
        store, limit = PrefixStore(str(self._generation), self._store), timedelta(seconds=group_timeout(group, _CPU))
        store.set(f"passes/{self.rank}", json.dumps([passes.count, passes.left]))
        self._muster(store, limit, owner, call)
        channel = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        passes.align([Standing(*json.loads(store.get(f"passes/{place}"))) for place in range(self.size)])
        return _Line(channel, Logbook(PrefixStore("calls", store), self.rank, self.members, 2 * _UNDERWAY))

    def _muster(self, store: Any, limit: timedelta, owner: Collectives, call: Call) -> None:
        """Wait until all ranks want to connect, for gloo looks at nobody while it waits for them."""
        keys = {member: f"passes/{place}" for place, member in enumerate(self.members)}
        wait = Waiting(call, owner.describe_tag, self.members,
                       lambda: [member for member, key in keys.items() if not store.check([key])])
        wait.passes, pause = owner.passes, 0.001
        with wait:
            while not store.check(list(keys.values())):
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                if time.monotonic() >= wait.next_look:
                    vigil.look(wait)
                if time.monotonic() - wait.since > limit.total_seconds():
                    who = " and ".join(f"rank {rank} did not come within {limit.total_seconds():g} s"
                                       for rank in wait.needed())
                    raise peer_error(who, call, self.members, owner.describe_tag)


_WIRES: weakref.WeakKeyDictionary[dist.ProcessGroup, Wire] = weakref.WeakKeyDictionary()


class Post:
    """The messages of one collective."""

    __slots__ = ("_channel", "_mark", "others", "rank", "size")

    def __init__(self, wire: Wire, channel: Any, mark: int) -> None:
        self.rank, self.size, self.others = wire.rank, wire.size, wire.others
        self._channel, self._mark = channel, mark

    def send(self, part: Tensor, place: int, sort: int = 0) -> Any:
        """As ``Messages`` says."""
        return self._channel.send([part], place, self._mark + sort * _SPREAD & _MARKS)

    def receive(self, part: Tensor, place: int, sort: int = 0) -> Any:
        """As ``Messages`` says."""
        return self._channel.recv([part], place, self._mark + sort * _SPREAD & _MARKS)


class Exchange(Handle):
    """A collective under way."""

    def __init__(self, wire: Wire, owner: Collectives, line: _Line, number: int, call: Call) -> None:
        self._wire, self._owner, self._line, self._number, self._call = wire, owner, line, number, call
        self._works: Sequence[Any] = ()
        self._steps: Steps | None = None

    def begin(self, steps: Steps) -> None:
        """Post what can be posted."""
        self._works = [work for work in (next(steps, None),) if work is not None]
        self._steps = steps

    def wait(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        line, owner = self._line, self._owner
        before, line.waiting = line.waiting, Waiting(
            self._call, owner.describe_tag, owner.members, after=line.passed)
        line.passes = line.waiting.passes = owner.passes
        try:
            with line.waiting:
                for work in self._works:
                    work.wait()
                for work in steps:
                    work.wait()
            line.passed = self._call
        except RuntimeError as error:
            raise self._wire.end(line, error, owner, self._call) from error
        except BaseException as error:  # it was interrupted
            self._wire.leave(str(error) or type(error).__name__)
            raise
        finally:
            self._works, line.waiting = (), before
            line.underway.pop(self._number, None)
