"""Recording lanes: the order of an accelerator's streams is checked on the CPU, without one.

The engine runs as it does on streams: frees are deferred, gathers are waited for on another
lane, marks are recorded and waited for. Nothing really runs at the same time; instead each lane
has a vector clock. What a piece of work reads and writes is noted by the engine, and a race is two
accesses to the same memory from two lanes, one of them a write, of which neither is known to come
before the other.

Memory is what an allocator hands out: a piece that one buffer gave back goes to the next buffer
of its size on the same lane, as a caching allocator does it, last in, first out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.comm import lanes as lanes_module
from shardwise.comm.lanes import Lane, Lanes
from shardwise.engine import build
from shardwise.engine.build import units_below
from shardwise.storage.flat_buffer import BufferPool, FlatBuffer

__all__ = ["Access", "Race", "Recorder", "recorded"]

_CPU = torch.device("cpu")
_NAMES = ("compute", "gather", "reduce")
Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses to the same memory without an order."""


@dataclass(frozen=True)
class Access:
    """One piece of work on one piece of memory. ``time``: its lane's own clock."""

    lane: str
    what: str
    memory: int
    write: bool
    time: int

    def __str__(self) -> str:
        return f"{self.what!r} {'writes' if self.write else 'reads'} on {self.lane}"


class RecordingLane(Lane):
    """A lane with a vector clock. ``deaf``: it ignores waits (to prove that they are needed)."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder
        self.clock: Clock = dict.fromkeys(_NAMES, 0)
        self.deaf = False

    def __enter__(self) -> None:
        self._recorder.entered.append(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.entered.pop()

    def mark(self) -> Clock:
        return dict(self.clock)

    def wait(self, mark: Clock | None) -> None:
        if mark is not None and not self.deaf:
            self._recorder.waits += 1
            for name, time in mark.items():
                self.clock[name] = max(self.clock[name], time)

    def note(self, what: str, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        for group, write in ((reads, False), (writes, True)):
            for thing in group:
                self._recorder.access(self, what, thing, write=write)


@dataclass
class Recorder:
    """All that happened, and the rule that nothing may break."""

    log: list[Access] = field(default_factory=list[Access])
    waits: int = 0
    entered: list[str] = field(default_factory=lambda: ["compute"])

    def __post_init__(self) -> None:
        self.lane = {name: RecordingLane(name, self) for name in _NAMES}
        self.lanes = Lanes(self.lane["compute"], self.lane["gather"], self.lane["reduce"], immediate=False)
        self.pool = RecordingPool(self)
        self._history: dict[int, list[Access]] = defaultdict(list)
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}  # keeps ids from being used again

    def access(self, lane: RecordingLane, what: str, thing: object, *, write: bool) -> None:
        """Log one access. Raises ``Race`` if an earlier one conflicts with it."""
        if isinstance(thing, Tensor) and thing.numel() == 0:
            return  # touches nothing
        memory = self._memory(thing, what)
        lane.clock[lane.name] += 1
        now = Access(lane.name, what, memory, write, lane.clock[lane.name])
        for earlier in self._history[memory]:
            known = earlier.lane == lane.name or lane.clock[earlier.lane] >= earlier.time
            if not known and (earlier.write or write):
                raise Race(f"{now}, without waiting for: {earlier} (memory {memory})")
        self._history[memory].append(now)
        self.log.append(now)

    def _memory(self, thing: object, what: str) -> int:
        storage = thing.tensor.untyped_storage() if isinstance(thing, FlatBuffer) else _storage(thing)
        piece = self.pool.piece_of(storage)
        if piece is not None:
            return piece
        if storage.nbytes() == 0:
            raise Race(f"{what!r} touches memory that was freed")
        known = self._seen.setdefault(storage._cdata, (self.pool.new_piece(), storage))
        return known[0]

    def optimizer(self, model: Any) -> None:
        """State that an optimizer has read the gradients and changed the parameters of ``model``."""
        for _, unit in units_below(model):
            for storage in unit.storages:
                given = [v.parameter.grad for v in storage.visible if v.parameter.grad is not None]
                self.lanes.compute.note("optimizer", reads=given, writes=[storage.shard])

    def lanes_of(self, what: str) -> set[str]:
        """The lanes on which work of this name ran."""
        return {access.lane for access in self.log if access.what == what}


class RecordingPool(BufferPool):
    """Memory for buffers as a caching allocator gives it: reused at once, on the lane that it is of."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(keep=0)
        self._recorder = recorder
        self._pieces = 0
        self._held: dict[int, tuple[int, str]] = {}
        self._given_back: dict[tuple[str, int], list[int]] = defaultdict(list)

    def new_piece(self) -> int:
        self._pieces += 1
        return self._pieces

    def piece_of(self, storage: torch.UntypedStorage) -> int | None:
        """Which memory ``storage`` has; None if it is no buffer's, or freed."""
        held = self._held.get(storage._cdata)
        return held[0] if held is not None else None

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        lane = self._recorder.entered[-1]
        pieces = self._given_back[lane, nbytes]
        self._held[storage._cdata] = (pieces.pop() if pieces else self.new_piece(), lane)
        storage.resize_(nbytes)

    def give(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        piece, lane = self._held.pop(storage._cdata)
        self._given_back[lane, nbytes].append(piece)
        storage.resize_(0)


def _storage(thing: object) -> torch.UntypedStorage:
    assert isinstance(thing, Tensor), f"only tensors and buffers are memory, not {type(thing).__name__}"
    return thing.as_subclass(Tensor).untyped_storage()


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Models sharded on the CPU inside run on recording lanes."""
    recorder = Recorder()
    with (patch.dict(lanes_module._LANES, {_CPU: recorder.lanes}),
          patch.dict(build._POOLS, {_CPU: recorder.pool}),
          patch.dict(build._DRY_POOLS, {_CPU: recorder.pool})):
        yield recorder
