"""One session per root: who runs next, what the present step has begun, and how to recover.

All that lives for one iteration sits in one ``Step``. After an exception anywhere the step is
thrown away with everything it holds, and the next forward starts from rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Reduction
from ..comm.lanes import Lanes
from ..plan.lifecycle import Pass, require_move
from ..plan.options import BackwardPrefetch
from ..torch_private import in_backward, queue_after_backward
from .unit import Schedule, Unit

__all__ = ["Call", "Session", "Step"]


class Call:
    """One forward of a unit: its place in the order, and whether its backward is running."""

    __slots__ = ("entered", "position", "unit", "watched")

    def __init__(self, unit: Unit, position: int) -> None:
        self.unit, self.position = unit, position
        self.watched = False  #: an input tells when this call's backward is over
        self.entered = False


@dataclass
class Step:
    """The present iteration."""

    order: list[Unit] = field(default_factory=list[Unit])  #: units in the order their forwards ended
    entered: list[Call] = field(default_factory=list[Call])  #: calls whose backward is running
    reducing: list[Unit] = field(default_factory=list[Unit])  #: units with a reduction on its way
    reduced: list[Unit] = field(default_factory=list[Unit])  #: units reduced in this backward
    retired: list[tuple[Any, Unit]] = field(default_factory=list[tuple[Any, Unit]])
    touched: list[Unit] = field(default_factory=list[Unit])  #: units whose backward was entered
    creating_graph: bool = False  #: this backward makes a graph of its own (create_graph=True)
    keep_gathered: bool = False  #: such a graph exists: nothing may be freed before it is used


class Session:
    """The units below one root, in time."""

    def __init__(self, root: Unit, units: Sequence[Unit], lanes: Lanes, schedule: Schedule) -> None:
        self.root, self.units, self.lanes, self.schedule = root, list(units), lanes, schedule
        self.pass_ = Pass.REST
        self.step = Step()
        self.depth = 0  #: nesting of unit forwards
        self.last_order: list[Unit] = []
        self.last_backward = True  #: False: reductions may stay on their way (set_is_last_backward)
        for unit in self.units:
            unit.on_first_gradient = self.begin_backward
            unit.on_all_gradients = self._completion(unit)

    def _completion(self, unit: Unit) -> Callable[[], None]:
        """Where no input tells that a unit's backward is over, its last gradient does."""
        def on_all_gradients() -> None:
            calls = [call for call in self.step.entered if call.unit is unit]
            if all(not call.watched for call in calls):
                for call in calls:
                    self.leave_backward(call)
        return on_all_gradients

    def _move(self, to: Pass) -> None:
        if self.pass_ is not to:
            require_move(self.root.name, self.pass_, to)
            self.pass_ = to

    # ------------------------------------------------------------------ memory
    def gather(self, unit: Unit) -> None:
        """Begin to gather ``unit`` and the units that it borrows from."""
        self._drain(keep=1)
        for owner in (unit, *unit.needs):
            owner.unshard()

    def use(self, unit: Unit) -> None:
        """Gather ``unit``, wait, and show its leaves, until ``unuse``."""
        self.gather(unit)
        for owner in (unit, *unit.needs):
            owner.wait()
            owner.uses += 1
        unit.face.show_leaves()

    def unuse(self, unit: Unit, *, free: bool) -> None:
        """The counterpart of ``use``; ``free``: give the memory back where nobody else uses it."""
        for owner in (unit, *unit.needs):
            owner.uses -= 1
            if owner.uses == 0:
                owner.face.show_originals()
                if free and not self.step.keep_gathered:
                    self.release(owner)

    def release(self, unit: Unit) -> None:
        """Free gathered parameters, now or, on streams, once compute is known to be past them."""
        if self.lanes.immediate:
            unit.reshard()
        elif all(waiting is not unit for _, waiting in self.step.retired):
            self.step.retired.append((self.lanes.compute.mark(), unit))

    def _drain(self, *, keep: int) -> None:
        """Free units that were released, all but the last ``keep``, behind their last use."""
        while len(self.step.retired) > keep:
            mark, unit = self.step.retired.pop(0)
            if unit.uses == 0:
                self.lanes.gather.wait(mark)
                unit.reshard()

    # ------------------------------------------------------------------ forward
    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward begins."""
        if self.pass_ is Pass.BACKWARD and not in_backward():
            self.recover()
        if self.depth == 0 and self.pass_ is Pass.REST:
            self._begin_forward()
        for owner in (unit, *unit.needs):
            owner.take_over_edits()
        self.use(unit)
        self.depth += 1
        self._prefetch_forward(unit)

    def _begin_forward(self) -> None:
        """From rest. What is still gathered may be older than the user's last edit: it goes."""
        self._move(Pass.FORWARD)
        self._drain(keep=0)
        for unit in self.units:
            if unit.settings.reshard_after_backward and not self.step.keep_gathered:
                unit.reshard()
        self.lanes.gather.wait(self.lanes.compute.mark())

    def leave_forward(self, unit: Unit) -> Call:
        """A unit's forward ended, or was left by an exception."""
        self.depth -= 1
        call = Call(unit, len(self.step.order))
        recomputing = self.pass_ is Pass.BACKWARD
        kept_root = unit is self.root and unit.settings.keep_as_root and torch.is_grad_enabled()
        if not recomputing:
            self.step.order.append(unit)
        free = (unit.settings.reshard_after_forward and not kept_root) or not torch.is_grad_enabled()
        self.unuse(unit, free=free and not recomputing)
        if self.depth == 0 and self.pass_ is Pass.FORWARD:
            self._end_forward()
        return call

    def _end_forward(self) -> None:
        self._move(Pass.REST)
        self.last_order = list(self.step.order)
        if not torch.is_grad_enabled():
            self.step.order.clear()
        for unit in self.units:
            # gathered ahead and never used
            if unit.uses == 0 and unit.settings.reshard_after_forward and unit is not self.root:
                self.release(unit)

    def _prefetch_forward(self, unit: Unit) -> None:
        ahead: Sequence[Unit] = unit.settings.forward_prefetch
        if not ahead and self.schedule.forward and unit.groups.shard.overlaps:
            place = len(self.step.order) + self.depth - 1
            ahead = self.last_order[place + 1 : place + 2] if self._as_last_time(unit, place) else []
        for other in ahead:
            other.take_over_edits()
            self.gather(other)

    def _as_last_time(self, unit: Unit, place: int) -> bool:
        return place < len(self.last_order) and self.last_order[place] is unit

    # ------------------------------------------------------------------ backward
    def begin_backward(self) -> None:
        """The first sign of a backward pass; its end will call ``end_backward``."""
        if self.pass_ is Pass.BACKWARD:
            return
        self._move(Pass.BACKWARD)
        self.step.creating_graph = torch.is_grad_enabled()
        self.step.keep_gathered |= self.step.creating_graph
        for unit in self.units:
            unit.collector.expect_all()
        queue_after_backward(self.end_backward)

    def enter_backward(self, call: Call) -> None:
        """Gradients reached the outputs of a unit's forward."""
        if call.entered:
            return
        self.begin_backward()
        call.entered = True
        self.step.entered.append(call)
        if call.unit not in self.step.touched:
            self.step.touched.append(call.unit)
        self.use(call.unit)
        if self.schedule.backward is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_backward(call)

    def leave_backward(self, call: Call) -> None:
        """Gradients reached the inputs of a unit's forward."""
        if not call.entered:
            return
        call.entered = False
        self.step.entered.remove(call)
        unit = call.unit
        unit.outstanding -= 1
        unit.unwatched |= not call.watched
        self.unuse(unit, free=unit.settings.reshard_after_backward)
        if unit.outstanding <= 0 and not unit.unwatched:
            self.send(unit)
        if self.schedule.backward is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(call)

    def _prefetch_backward(self, call: Call) -> None:
        if call.unit.settings.backward_prefetch is not None:
            for other in call.unit.settings.backward_prefetch:
                self.gather(other)
        elif call.unit.groups.shard.overlaps and 0 < call.position <= len(self.step.order):
            other = self.step.order[call.position - 1]
            if other is not call.unit:
                self.gather(other)

    def send(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit``; at most one reduction is on its way."""
        if not unit.settings.sync_gradients or self.step.creating_graph:
            return
        for earlier in self.step.reducing:
            earlier.finish_reduce()
        self.step.reducing.clear()
        if unit.reduce():
            if unit.groups.shard.overlaps or not self.lanes.immediate:
                self.step.reducing.append(unit)
            else:
                unit.finish_reduce()
            self.step.reduced.append(unit)

    def end_backward(self) -> None:
        """The backward pass is over: send what is left, bind, free."""
        if self.pass_ is not Pass.BACKWARD:
            return
        for call in list(self.step.entered):
            self.leave_backward(call)
        for unit in self.units:
            unit.collector.end_pass()
            if unit.collector.holding or (unit in self.step.touched and unit not in self.step.reduced):
                self.send(unit)
            unit.outstanding, unit.unwatched = 0, False
        for unit in self.step.reducing:
            unit.finish_reduce()
        self._agree_on_unused(self.step.reduced)
        keep = self.step.creating_graph
        for unit in self.units:
            if not keep and unit.settings.reshard_after_backward and unit.uses == 0:
                self.release(unit)
        self._drain(keep=0)
        self._move(Pass.REST)
        self.step = Step(keep_gathered=keep)

    def _agree_on_unused(self, units: Sequence[Unit]) -> None:
        """A parameter that any rank used has a gradient on every rank, others have none."""
        by_groups: dict[Any, list[Unit]] = {}
        for unit in units:
            by_groups.setdefault(tuple(unit.groups.nontrivial), []).append(unit)
        for groups, members in by_groups.items():
            if not groups or not groups[0].real:
                continue
            flags = [unit.flags for unit in members]
            device = members[0].collector.live[0].compute_device
            table = torch.tensor([used for row in flags for used in row], dtype=torch.int32).to(device)
            for comm in groups:
                comm.all_reduce(table, Reduction.MAX, tag=3).wait()
            if all(all(row) for row in flags):
                continue
            anywhere, start = [bool(value) for value in table.tolist()], 0
            for unit, row in zip(members, flags, strict=True):
                unit.bind_unused(anywhere[start : start + len(row)])
                start += len(row)

    # ------------------------------------------------------------------ recovery
    def recover(self) -> None:
        """Throw away an iteration that an exception left unfinished."""
        warnings.warn(
            "shardwise: the last backward did not finish, so gradients may hold part of a step; "
            "call zero_grad() before the next one", RuntimeWarning, stacklevel=4,
        )
        for unit in self.units:
            unit.recover()
        self.step, self.depth, self.pass_ = Step(), 0, Pass.REST

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the root unit."""
        return self.root.modules
