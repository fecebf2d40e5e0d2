"""A unit: a module subtree whose parameters are gathered and freed together.

A unit knows its own memory and its own gradients. It does not know its neighbours, nor time:
that is the session's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..comm.collectives import Collectives
from ..comm.lanes import Lanes
from ..plan.lifecycle import Residency, require_move
from ..plan.options import BackwardPrefetch, Precision
from ..storage.faces import OriginalFace
from ..storage.flat_storage import FlatStorage
from ..storage.global_norm import GradientKind
from ..storage.writeback import take_over_edits, take_over_replacements
from .bind import bind
from .buffers import UnitBuffers
from .collect import Collector
from .gather import Gather
from .reduce import Groups, Reduced, Reducer

__all__ = ["Schedule", "Settings", "Unit"]


@dataclass
class Schedule:
    """When gathers start ahead of need."""

    backward: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward: bool = False  #: in the order of the last iteration
    limit: bool = True  #: at most one unit ahead of the one in use


@dataclass
class Settings:
    """What may be changed between steps; each field is one public setter."""

    reshard_after_forward: bool = True
    keep_as_root: bool = True  #: a root stays gathered between forward and backward all the same
    reshard_after_backward: bool = True
    sync_gradients: bool = True  #: False: gradients stay on this rank (no_sync)
    all_reduce: bool = True  #: False: reduce in the shard group only
    forward_prefetch: list[Unit] = field(default_factory=list["Unit"])
    backward_prefetch: list[Unit] | None = None  #: None: the order of the forward, reversed

    unshard_in_backward: bool = True  #: False: backward reads none of the parameters

class Unit:
    """The parameters of one or more modules, moved as one."""

    _registered: weakref.WeakKeyDictionary[Collectives, list[weakref.ref[Unit]]] = (
        weakref.WeakKeyDictionary())

    def __init__(self, modules: Sequence[nn.Module], storages: Sequence[FlatStorage], face: OriginalFace,
                 groups: Groups, lanes: Lanes, precision: Precision, settings: Settings) -> None:
        self.modules, self.storages, self.face = list(modules), list(storages), face
        self.groups, self.lanes = groups, lanes
        self.precision, self.settings = precision, settings
        self.fqn = ""
        self.number = self._register()
        self.schedule = Schedule()  #: counts where this unit is a root
        self.needs: list[Unit] = []  #: units that own parameters which this one borrows
        self.residency = Residency.SHARDED
        self.uses = 0  #: forwards and backwards that need the parameters now, borrowers' included
        self.outstanding = 0  #: forwards whose backward has not run yet
        self.unwatched = False  #: the end of a backward was guessed: gradients wait for the end of the pass
        self.observer: Callable[[str, int], None] | None = None  #: told of gather, free, reduce; bytes
        self.own_modules: list[tuple[str, nn.Module]] = []
        self.buffers = UnitBuffers()
        self.gather = Gather(storages, groups.shard, lanes)
        self.reducer = Reducer(groups, lanes)
        self.kind = GradientKind(groups.shard)
        self.sent: Reduced | None = None
        self.flags: list[bool] = []  #: which targets had a gradient here in the last reduction
        self.collector = Collector(storages, lanes, self._on_first, self._on_complete)
        self.on_first_gradient = _nothing  # set by the session
        self.on_all_gradients = _nothing

    def __repr__(self) -> str:
        return f"Unit({self.fqn!r}, {sum(len(s.parameters) for s in self.storages)} parameters)"

    @property
    def name(self) -> str:
        """For messages."""
        return self.fqn or "(root)"

    def _register(self) -> int:
        """Number the units of a group, alike on all its ranks, and let it name them in messages."""
        comm = next(self.groups.nontrivial, self.groups.shard)
        units = self._registered.setdefault(comm, [])
        units.append(weakref.ref(self))

        def describe(tag: int) -> str:
            unit = units[tag // 4]() if 0 <= tag // 4 < len(units) else None
            return f"unit {unit.name!r}" if unit is not None else f"unit number {tag // 4}"

        for one in self.groups.nontrivial:
            one.describe_tag = describe
        return len(units) - 1

    def tag(self, phase: int) -> int:
        """A number that all ranks of the group agree on: 0 gather, 1 reduce-scatter, 2 all-reduce."""
        return self.number * 4 + phase

    def _move(self, residency: Residency) -> None:
        if self.residency is not residency:
            require_move(self.name, self.residency, residency)
            self.residency = residency

    # ------------------------------------------------------------------ parameters
    def take_over_edits(self) -> None:
        """Honour what the user changed at rest; replan if other parameters are trained now."""
        if self.face.in_use or self.residency is not Residency.SHARDED:
            return
        if self.face.strangers():
            take_over_replacements(self.face)
        for storage in self.storages:
            before = storage.leaves
            take_over_edits(storage)
            if (storage.follow_requires_grad() or storage.leaves is not before) and not self.collector.holding:
                self.collector.rebuild()

    def unshard(self) -> None:
        """Begin to gather, unless gathered or under way."""
        if self.residency is Residency.SHARDED:
            self._move(Residency.UNSHARDING)
            self.gather.start(self.tag(0))
            if self.observer is not None:
                self.observer("gather", self.gather.nbytes)

    def wait(self) -> None:
        """Finish the gather: the leaves may be read."""
        if self.residency is Residency.UNSHARDING:
            self.gather.finish()
            self._move(Residency.UNSHARDED)

    def reshard(self) -> None:
        """Free the gathered parameters. The caller has made sure that nobody uses them."""
        if self.residency is Residency.UNSHARDING:
            self.wait()
        if self.residency is Residency.UNSHARDED:
            self._move(Residency.SHARDED)
            if self.observer is not None:
                self.observer("free", self.gather.nbytes)
            self.gather.free()

    # ------------------------------------------------------------------ gradients
    def _on_first(self) -> None:
        self.on_first_gradient()
        self.collector.scale = 1.0 / self.reducer.pre_divisor(self.collector.wire_dtype)
        self.collector.open(keep=not self.settings.sync_gradients)

    def _on_complete(self) -> None:
        self.on_all_gradients()

    def reduce(self) -> bool:
        """Send the collected gradients. False if there is nothing to send."""
        if self.collector.plan is None:
            return False
        self.collector.open(keep=False)
        if self.sent is not None:
            self.finish_reduce()
        if self.observer is not None:
            self.observer("reduce", self.collector.nbytes)
        full, used = self.collector.hand_over()
        self.flags = used
        self.sent = self.reducer.start(full, used, self.tag(1))
        if not self.lanes.immediate:
            self.reducer.finish(self.sent, self.tag(2), all_reduce=self.settings.all_reduce)
        return True

    def finish_reduce(self) -> None:
        """Wait for what was sent, give its buffer back, and bind what this rank used."""
        sent = self.sent
        if sent is None or sent.bound:
            return
        self.reducer.finish(sent, self.tag(2), all_reduce=self.settings.all_reduce)
        self.reducer.wait(sent)
        self.collector.close()
        sent.bound = True
        if not sent.final or all(sent.used):
            self.sent = None
        if sent.final:
            bind(self.collector, sent, self.kind,
                 None if all(sent.used) else lambda number: sent.used[number])

    def bind_unused(self, used_anywhere: Sequence[bool]) -> None:
        """Give the parameters that only other ranks used their part of the sum."""
        sent, self.sent = self.sent, None
        if sent is not None and sent.bound:
            bind(self.collector, sent, self.kind,
                 lambda number: used_anywhere[number] and not sent.used[number])

    # ------------------------------------------------------------------ recovery
    def recover(self) -> None:
        """Back to rest after an exception, whatever had begun."""
        self.face.show_originals()
        self.uses = 0
        self.reshard()
        self.sent = None
        self.collector.drop()
        self.collector.expect_all()


def _nothing() -> None:
    return None
