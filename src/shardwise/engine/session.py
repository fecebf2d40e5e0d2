"""One session per root: who runs next, what the present step has begun, and how to recover."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch

from ..comm.lanes import Lanes
from ..plan.lifecycle import LEGAL_MOVES, Pass, Residency, refuse_move
from ..plan.options import BackwardPrefetch
from ..storage.guard import guard, unguard
from ..torch_private import (
    in_backward,
    never_traced,
    no_gradients,
    outside_transforms,
    queue_after_backward,
    transform_under_way,
)
from .bind import Arrivals
from .buffers import buffers_for_compute, cast_buffers
from .departures import Departures, declare_void
from .likeness import require_likeness
from .replan import waits_for_replicas
from .residents import Residents
from .settings import Schedule
from .step import Call, Step
from .unit import Unit
from .unused import end_reductions
from .values import refuse_other_values, refuse_precision, refuse_tracing

__all__ = ["Session"]

_REST, _FORWARD, _BACKWARD = Pass  # reading a member of an enumeration takes longer
_SHARDED = Residency.SHARDED


class Session:
    """The units below one root, in time."""

    def __init__(self, root: Unit, units: Sequence[Unit], lanes: Lanes, schedule: Schedule) -> None:
        self.root, self.units, self.lanes, self.schedule = root, list(units), lanes, schedule
        self.pass_, self.step, self.residents = _REST, Step(), Residents(lanes, schedule)
        self.open: list[Unit] = []  #: forwards under way, the innermost last
        self.departures = Departures(self)
        self.guarded = self._compared = False  # the second: what the ranks start from
        self._ended: Unit | None = None  #: the unit whose forward ended last
        self._offloaded = any(storage.place.offload for unit in self.units for storage in unit.storages)
        for unit in self.units:
            unit.on_first_gradient = self.begin_backward  # pyright: ignore[reportAttributeAccessIssue]
            unit.collector.patient = unit is root and len(self.units) > 1

    def _move(self, to: Pass) -> None:
        if self.pass_ is not to:
            if self.pass_ * 100 + to not in LEGAL_MOVES:
                refuse_move(self.root, self.pass_, to)
            self.pass_ = to
            for passes in self.departures.passes:
                passes.inside = to is not _REST

    def gather(self, unit: Unit) -> None:
        """Begin to gather ``unit`` and the units that it borrows from."""
        if self.pass_ is _REST:
            self.residents.follow_user()
        self.residents.gather(unit)

    def use(self, unit: Unit) -> None:
        """Gather ``unit``, wait, and show its leaves, until ``unuse``."""
        self.residents.gather(unit)
        for owner in (unit, *unit.needs) if unit.needs else (unit,):
            owner.wait()
            owner.uses += 1
            if not self.lanes.immediate:
                owner.gather.note_use()
        unit.face.show_leaves()
        if self.residents.ahead is not None:
            self.residents.arrived(unit)

    def unuse(self, unit: Unit, *, free: bool) -> None:
        """The counterpart of ``use``; ``free``: give the memory back where nobody else uses it."""
        for owner in (unit, *unit.needs) if unit.needs else (unit,):
            owner.uses -= 1
            if owner.uses == 0:
                if not self.lanes.immediate:
                    owner.gather.note_use()
                owner.face.show_originals()
                if free and not self.step.keep_gathered:
                    self.residents.release(owner)

    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward begins."""
        if transform_under_way() is not None:
            return outside_transforms(self.enter_forward, unit)
        if self.pass_ is _BACKWARD:
            self.settle()
        if not self.open and self.pass_ is not _BACKWARD:
            self._begin_forward()
        edited = unit.residency is _SHARDED and not unit.untouched() and unit.take_over_edits()
        for owner in unit.needs:
            edited |= owner.take_over_edits()
        if edited:
            self.residents.follow_user()
        self.use(unit)
        unit.face.clear_the_way()
        unit.asked = None
        self.open.append(unit)
        if self.pass_ is _FORWARD and (self.schedule.forward or unit.settings.forward_prefetch):
            self.residents.prefetch_forward(unit)

    def _begin_forward(self) -> None:
        """From rest. What is still gathered may be older than the user's last edit: it goes."""
        refuse_tracing(self.root.name)
        self._compared = self._compared or require_likeness(self.root, self.units)
        self._move(_FORWARD)
        for passes in self.departures.passes:
            passes.count += 1
        self.residents.drain(keep=0)
        cast_buffers(buffers_for_compute(unit.buffers for unit in self.units))
        kept = [unit for unit in self.units if unit.gather.holds_memory] if self.step.keep_gathered else []
        for unit in self.units:
            unit.before, unit.outstanding_before = None, unit.outstanding
            if not unit.turns.alone:
                unit.turns.begin()
            unit.gather.forget()
            idle = unit.residency is not _SHARDED and not self.residents.still_asked(unit)
            if idle and unit.settings.reshard_after_backward:
                unit.reshard()
        self.residents.follow_user()
        for unit in kept:  # a graph of gradients still reads it
            unit.take_over_edits()
            self.residents.gather(unit)
            unit.wait()
        self._guard(self.guarded or torch.is_grad_enabled())
        self.residents.begin_forward()
        self._ended = None

    def _guard(self, on: bool) -> None:
        """From a training forward to its backward, parameters at rest are not to be computed with."""
        if on is not self.guarded:
            self.guarded = on
            for unit in self.units:
                (guard if on else unguard)(unit.storages)

    def leave_forward(self, unit: Unit) -> Call:
        """A unit's forward ended, or was left by an exception."""
        if transform_under_way() is not None:
            return outside_transforms(self.leave_forward, unit)
        self.open.pop()
        recomputing = self.pass_ is _BACKWARD
        if not recomputing:
            if self._ended is not unit:
                unit.before = self._ended
            self._ended = unit
        graded = torch.is_grad_enabled()
        kept_root = unit is self.root and unit.settings.keep_as_root and graded
        free = (unit.settings.reshard_after_forward and not kept_root) or not graded
        free = free and not recomputing and (unit.turns.alone or unit.turns.forward_over() or not self.open)
        unit.gather.keeping = graded and not recomputing
        self.unuse(unit, free=free)
        torch.clear_autocast_cache()  # it may hold casts of leaves: memory, and stale after the next step
        if not self.open and self.pass_ is _FORWARD:
            self._end_forward()
        return Call(unit, recomputed=recomputing)

    def _end_forward(self) -> None:
        self._move(_REST)
        self.residents.give_up()
        for unit in self.units:
            idle = unit.residency is not _SHARDED and unit.uses == 0 and unit.asked is None  # never used
            if idle and unit.settings.reshard_after_forward and unit is not self.root:
                self.residents.release(unit)
        if not torch.is_grad_enabled():
            self.residents.drain(keep=0)
            if self._offloaded:
                self.lanes.gather.finish()  # the host may change at once what copies were made from

    def begin_backward(self) -> None:
        """The first sign of a backward pass; its end will call ``end_backward``."""
        if self.pass_ is _BACKWARD:
            return
        self._move(_BACKWARD)
        self.step.creating_graph = torch.is_grad_enabled()
        self.step.keep_gathered |= self.step.creating_graph
        self._guard(False)
        for unit in self.units:
            unit.collector.begin_pass()
            unit.unwatched |= self.step.keep_gathered  # second derivatives may still be on their way
        Arrivals.choose([unit.arrivals for unit in self.units])
        self._ending = ref(end := self.end_backward, self.departures.backward_dropped)
        queue_after_backward(end)

    def enter_backward(self, call: Call) -> None:
        """Gradients reached the outputs of a unit's forward."""
        if transform_under_way() is not None:
            return outside_transforms(self.enter_backward, call)
        if call.entered:
            return
        unit = call.unit
        if call.precision is not unit.precision:
            refuse_precision(unit.name, full=unit.in_full_precision)
        if self.pass_ is not _BACKWARD:
            self.begin_backward()
        if unit.settings.unshard_in_backward:
            self.use(unit)
            if call.values != unit.values:
                self.unuse(unit, free=True)
                refuse_other_values(unit.name)
        call.entered = True
        self.step.entered.append(call)
        self.step.touched[unit] = None
        if self.schedule.backward is BackwardPrefetch.BACKWARD_PRE:
            self.residents.prefetch_backward(call, self.step)

    def leave_backward(self, call: Call) -> None:
        """Gradients reached the inputs of a unit's forward."""
        if transform_under_way() is not None:
            return outside_transforms(self.leave_backward, call)
        if not call.entered:
            return
        call.entered, unit = False, call.unit
        self.step.entered.remove(call)
        unit.outstanding -= 1
        unit.unwatched |= not call.watched
        unit.collector.sweep()
        if unit.settings.unshard_in_backward:
            over = unit.turns.alone or unit.outstanding <= 0
            self.unuse(unit, free=unit.settings.reshard_after_backward and over)
        if unit.outstanding <= 0 and not unit.unwatched:
            self.send(unit)
        if self.schedule.backward is BackwardPrefetch.BACKWARD_POST:
            self.residents.prefetch_backward(call, self.step)

    def send(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit``; at most one reduction is on its way. Without grad mode, as in a hook."""
        step = self.step
        if not unit.settings.sync_gradients or step.creating_graph:
            return
        for earlier in step.reducing:
            earlier.finish_reduce()
        step.reducing.clear()
        unit.owing = False
        if unit.reduce():
            if unit.groups.shard.overlaps or not self.lanes.immediate:
                step.reducing.append(unit)
            else:
                unit.finish_reduce()
            step.reduced[unit] = None

    @never_traced
    def end_backward(self) -> None:
        """The backward pass is over: send what is left, bind, free."""
        if transform_under_way() is not None:
            return outside_transforms(self.end_backward)
        if self.pass_ is not _BACKWARD:
            return
        with no_gradients():
            for call in list(self.step.entered):
                self.leave_backward(call)
            keep, self.step.creating_graph = self.step.creating_graph, False
            for unit in self.units:
                unit.collector.end_pass()
                unit.owing |= (unit not in self.step.reduced and not keep
                               and (unit in self.step.touched or waits_for_replicas(unit)))
                if unit.collector.holding or unit.owing:
                    self.send(unit)
                unit.outstanding, unit.unwatched = 0, False
        self._end_reductions()
        self.residents.give_up()
        for unit in self.units:
            if not keep and unit.residency is not _SHARDED and not unit.uses and unit.settings.reshard_after_backward:
                self.residents.release(unit)
        self.residents.drain(keep=0)
        for unit in self.step.touched:
            unit.gather.forget()
        self._move(_FORWARD if self.open else _REST)
        self.step = Step(keep_gathered=keep)
        self._guard(keep)

    def _end_reductions(self) -> None:
        end_reductions(self.step)

    def settle(self) -> None:
        """If a backward was left by an exception, throw the iteration away. Cheap otherwise."""
        if self.pass_ is _BACKWARD and not in_backward():
            self.recover()

    def recover(self) -> None:
        """Throw away an iteration that an exception left unfinished; everything is at rest then."""
        backward = self.pass_ is _BACKWARD
        self.lanes.compute.wait(self.lanes.reduce.mark())  # it may be reading what is freed now
        self.residents.forget(self.units)
        self._guard(False)
        for unit in self.units:
            unit.recover()
        self.step, self.open = Step(), []
        self._move(_REST)
        if backward:
            declare_void()
