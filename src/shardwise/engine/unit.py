"""A unit: a module subtree whose parameters are gathered and freed together.

A unit knows its own memory and its own gradients. It does not know its neighbours, nor time:
that is the session's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

import torch
from torch import nn

from ..comm.lanes import Lanes
from ..errors import CommunicationError, LifecycleError
from ..plan.lifecycle import Residency, legal
from ..plan.options import Precision
from ..storage.faces import OriginalFace
from ..storage.filling import leave_meta
from ..storage.flat_storage import FlatStorage
from ..storage.roster import Roster
from ..storage.writeback import follow_off_meta, take_over_edits, take_over_replacements
from ..torch_private import no_gradients, without_torch_function
from .bind import Arrivals
from .buffers import UnitBuffers
from .collect import Collector
from .gather import Gather
from .numbering import ALL_REDUCE, GATHER, PHASES, REDUCE, number
from .reduce import Groups, Reduced, Reducer
from .replan import forget_replaced, replan
from .settings import Schedule, Settings
from .turns import Turns
from .values import count_changes, require_values

__all__ = ["Unit"]

_SHARDED, _UNSHARDING, _UNSHARDED = Residency  # reading a member of an enumeration takes longer
_BEGUN, _ARRIVED, _FREED = legal(_SHARDED, _UNSHARDING), legal(_UNSHARDING, _UNSHARDED), legal(_UNSHARDED, _SHARDED)


class Unit:
    """The parameters of one or more modules, moved as one."""

    __slots__ = (
        "__weakref__", "_replan", "arrivals", "asked", "before", "buffers", "collector", "face", "flags", "fqn",
        "gather", "groups", "lanes", "modules", "needs", "number", "observer", "on_first_gradient",
        "outstanding", "outstanding_before", "owing", "own_modules", "policy", "precision", "reducer", "residency",
        "roster", "schedule", "sent", "settings", "storages", "take_in", "turns", "unwatched", "uses", "values",
    )
    _owners: ClassVar[weakref.WeakKeyDictionary[FlatStorage, weakref.ref[Unit]]] = (
        weakref.WeakKeyDictionary())

    def __init__(self, modules: Sequence[nn.Module], storages: Sequence[FlatStorage], face: OriginalFace,
                 groups: Groups, lanes: Lanes, precision: Precision) -> None:
        self.modules, self.storages, self.face = list(modules), list(storages), face
        self.groups, self.lanes = groups, lanes
        self.policy, self.settings = precision, Settings()
        self.precision = precision  #: the policy, or no mixing at all (full precision)
        self._owners.update({storage: weakref.ref(self) for storage in storages})
        self.fqn = ""
        self.number = number(self, list(groups.nontrivial) or [groups.shard])
        self.schedule = Schedule()  #: counts where this unit is a root
        self.needs: list[Unit] = []  #: units that own parameters which this one borrows
        self.residency = _SHARDED
        self.values = 0  #: grows where parameters were changed in place before a gather, as by a step
        self.asked: int | None = None  #: the count of changes at the user's unshard(): kept until the next forward
        self.uses = 0  #: forwards and backwards that need the parameters now, borrowers' included
        self.turns = Turns(len(self.modules))
        self.outstanding = self.outstanding_before = 0  #: forwards whose backward has not run yet; as the pass began
        self.before: Unit | None = None  #: the unit whose forward ended before this one's
        self._replan = False  #: other leaves, or other ones trained, than the collector planned for
        self.owing = False  #: a backward of it, with gradients here or not, was not followed by a reduction yet
        self.unwatched = False  #: the end of a backward was guessed: gradients wait for the end of the pass
        self.observer: Callable[[str, int], None] | None = None  #: told of gather, free, reduce; bytes
        self.own_modules: list[tuple[str, nn.Module]] = []
        self.roster = Roster()  #: who was there when the modules were looked at last
        self.take_in: Callable[[Unit], None] = _nothing  #: shards what was added since
        self.buffers = UnitBuffers()
        self.gather = Gather(self.storages, groups.shard, lanes)
        self.reducer = Reducer(groups, lanes)
        self.sent: Reduced | None = None
        self.flags: list[bool] = []  #: which targets had a gradient here in the last reduction
        self.collector = Collector(self.storages, lanes, self._on_first)
        self.arrivals = Arrivals(self.collector, lanes)
        self.on_first_gradient = _nothing  # set by the session

    def __repr__(self) -> str:
        return f"Unit({self.fqn!r}, {sum(len(s.parameters) for s in self.storages)} parameters)"

    @classmethod
    def owning(cls, storage: FlatStorage) -> Unit | None:
        """The unit that ``storage`` belongs to."""
        found = cls._owners.get(storage)
        return found() if found is not None else None

    @property
    def name(self) -> str:
        """For messages."""
        return self.fqn or "(root)"

    # ------------------------------------------------------------------ parameters
    def extend(self, storages: Sequence[FlatStorage]) -> None:
        """More flat parameters, of what was added after sharding."""
        self._owners.update({storage: weakref.ref(self) for storage in storages})
        self.storages.extend(storages)  # the gather and the collector see this very list
        self._replan = True

    def take_over_edits(self, *, adopt: bool = True) -> bool:
        """Honour what the user changed at rest; replan if other parameters are trained now.

        ``adopt`` parameters that were added, too. True if values were copied.
        """
        if self.face.in_use or self.residency is not _SHARDED or self.untouched():
            return False
        edited = False
        self.follow_off_meta()
        if self.face.strangers():
            edited, before = True, [[*storage.parameters] for storage in self.storages]
            for storage in take_over_replacements(self.face):
                owner = self.owning(storage)
                if owner is not None and owner is not self and owner not in self.needs:
                    self.needs.append(owner)
            forget_replaced(self, before)
        if adopt and self.roster.has_newcomers():
            self.take_in(self)
        for storage in self.storages:
            leaves = storage.leaves
            edited |= take_over_edits(storage)
            self._replan |= storage.leaves is not leaves
            self._replan |= storage.last_seen.follow_requires_grad(storage.visible, storage.leaves)
        if self._replan:
            self._replan = not replan(self)
        if edited:
            self.lanes.compute.note("edit", writes=[storage.shard for storage in self.storages])
        return edited

    def untouched(self) -> bool:
        """Is everything as the engine left it? The quick answer to what ``take_over_edits`` looks for."""
        with without_torch_function():
            for storage in self.storages:
                if storage.widened or storage.hidden or not storage.last_seen.unchanged(storage.visible, storage.shard):
                    return False
            return not self._replan and self.face.undisturbed() and not self.roster.has_newcomers()

    def follow_off_meta(self) -> None:
        """Take over memory that was given to parameters on the meta device."""
        for storage in self.storages:
            if storage.on_meta:
                self._replan |= follow_off_meta(self.face, storage)

    def leave_meta(self, device: torch.device | None) -> None:
        """Memory for what is on the meta device, on ``device`` (None: where the unit computes)."""
        for storage in self.storages:
            if storage.on_meta:
                leave_meta(storage, device or storage.compute_device)
        self.collector.rebuild()

    @property
    def in_full_precision(self) -> bool:
        """Is the policy suspended?"""
        return self.buffers.suspended

    def set_full_precision(self, full: bool) -> None:
        """Compute, reduce and keep buffers in the stored dtypes, or again as the policy says. From rest."""
        if self.uses:
            raise LifecycleError(
                "cannot change the precision of a unit in use", unit=self.name,
                remedy="Enter and leave full_precision() outside of forward and backward.",
            )
        self.come_to_rest()
        self.precision = _UNMIXED if full and self.policy != _UNMIXED else self.policy
        self.buffers.suspended = full
        for storage in self.storages:
            storage.set_full_precision(full)
        self.collector.follow_leaves()

    def unshard(self) -> None:
        """Begin to gather, unless gathered or under way."""
        if self.residency is _SHARDED:
            for storage in self.storages:
                if storage.widened or storage.shard.is_meta:
                    require_values(self.name, self.storages, self.face)
            self.residency = _BEGUN
            self.values = count_changes(self.storages)
            self.gather.start(self.number * PHASES + GATHER)
            if self.observer is not None:
                self.observer("gather", self.gather.nbytes)

    def wait(self) -> None:
        """Finish the gather: the leaves may be read."""
        if self.residency is _UNSHARDING:
            self.gather.finish()
            self.residency = _ARRIVED

    def reshard(self, *, after: object = None) -> None:
        """Free the gathered parameters. The caller has made sure that nobody uses them.

        ``after``: a mark of the compute lane behind their last use; None: behind all work until now.
        """
        if self.residency is _UNSHARDING:
            self.wait()
        if self.residency is _UNSHARDED:
            self.residency = _FREED
            if self.observer is not None:
                self.observer("free", self.gather.nbytes)
            self.gather.free(after=after)

    def come_to_rest(self) -> None:
        """Only what the user registered is there: the shard, and the original buffers."""
        self.reshard()
        self.buffers.for_checkpoint()

    # ------------------------------------------------------------------ gradients
    def _on_first(self) -> None:
        if self.sent is not None:
            with no_gradients():
                self.finish_reduce()  # of what came earlier: it may still read the buffer that this gradient goes to
        self.on_first_gradient()
        wire = self.collector.wire_dtype
        self.collector.scale = 1.0 if wire is not torch.float16 else 1.0 / self.reducer.pre_divisor(wire)
        self.collector.keep = not self.settings.sync_gradients

    def reduce(self) -> bool:
        """Send the collected gradients. False if there is nothing to send. Without grad mode."""
        if self.collector.plan is None:
            return False
        if self.sent is not None:
            self.finish_reduce()
        full, self.flags = self.collector.hand_over()
        if self.observer is not None:
            self.observer("reduce", self.collector.nbytes)
        self.sent = self.reducer.start(full, self.flags, self.number * PHASES + REDUCE)
        if not self.lanes.immediate:
            self.reducer.finish(self.sent, self.number * PHASES + ALL_REDUCE, all_reduce=self.settings.all_reduce)
        return True

    def finish_reduce(self) -> None:
        """Wait for what was sent and give its buffer back; bind what this rank used, now or after the backward.

        Without grad mode.
        """
        sent = self.sent
        if sent is None or sent.arrived:
            return
        if not sent.summed:
            self.reducer.finish(sent, self.number * PHASES + ALL_REDUCE, all_reduce=self.settings.all_reduce)
        self.reducer.wait(sent)
        self.collector.close()
        sent.arrived = True
        if not sent.final or False not in sent.used:
            self.sent = None
        self.flags = sent.used  # with what waited for the replicas, if anything did
        if sent.final:
            self.arrivals.add(sent)

    def bind_unused(self, used_anywhere: Sequence[bool]) -> None:
        """Give the parameters that only other ranks used their part of the sum."""
        sent, self.sent = self.sent, None
        if sent is not None and sent.arrived:
            self.arrivals.bind_unused(sent, used_anywhere)

    def forget_unsent(self) -> None:
        """Lose the gradients that were added up unsent, and what waits for the replicas."""
        self.reducer.drop()
        self.collector.drop()
        self.owing = False

    # ------------------------------------------------------------------ recovery
    def recover(self) -> None:
        """Back to rest after an exception, whatever had begun. Unsent gradients are lost."""
        self.face.show_originals()
        self.uses, self.outstanding, self.unwatched, sent, self.sent = 0, 0, False, self.sent, None
        for handle in (self, *([sent.handle] if sent is not None and not sent.summed else [])):
            with suppress(CommunicationError):  # that may be what failed; if not, a transport still uses the buffer
                handle.wait()
        self.reshard()
        self.gather.forget()
        self.forget_unsent()
        self.arrivals.forget()
        self.collector.begin_pass()


_UNMIXED = Precision()


def _nothing(*_: object) -> None:
    return None
