"""Which units stay gathered: those in use, one ahead of need, and one behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..comm.lanes import Lanes
from ..plan.lifecycle import Residency
from .settings import Schedule
from .step import Call, Step
from .unit import Unit
from .values import count_all_changes

__all__ = ["Residents"]

_SHARDED = Residency.SHARDED  # reading a member of an enumeration takes longer


class Residents:
    """Gathers units, and frees those that nobody uses any longer.

    On streams the memory of a freed unit goes to the next gather, which could write it while
    compute still reads it. So a unit that is let go stays *behind*, with a mark of the compute
    lane, until one more has joined it; then the gather lane waits for the mark. Nothing ever
    blocks the host. This is the rate limiter: beyond the units in use, at most one is gathered
    ahead and one waits behind, in forward and in backward.
    """

    def __init__(self, lanes: Lanes, schedule: Schedule) -> None:
        self._lanes, self._schedule = lanes, schedule
        self._behind: dict[Unit, Any] = {}  # in the order they were let go -> mark of compute
        self.ahead: Unit | None = None  #: gathered because it is expected next
        self._started: list[Unit] = []  # in the order of this forward …
        self._last_started: list[Unit] = []  # … and of the last one

    def gather(self, unit: Unit) -> None:
        """Begin to gather ``unit`` and the units that it borrows from."""
        owners = (unit, *unit.needs) if unit.needs else (unit,)
        if self._behind:
            for owner in owners:
                self._behind.pop(owner, None)  # wanted again before it was freed
        for owner in owners:
            if owner.residency is _SHARDED:
                owner.unshard()

    def expect(self, unit: Unit) -> None:
        """Gather ``unit`` ahead of need, in place of the one that was expected before."""
        if self.ahead is not unit:
            if self.ahead is not None:
                self.give_up()
            self.ahead = unit
        self.gather(unit)

    @staticmethod
    def still_asked(unit: Unit) -> bool:
        """Did the user gather ``unit``, and change nothing since?"""
        return unit.asked is not None and unit.untouched() and unit.asked == count_all_changes(unit.storages)

    def arrived(self, unit: Unit) -> None:
        """``unit`` is in use now. If another one was expected, that one goes."""
        if self.ahead is not unit:
            self.give_up()
        self.ahead = None

    def give_up(self) -> None:
        """Nothing is expected any longer."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead.uses == 0:
            self.release(ahead)

    def release(self, unit: Unit) -> None:
        """Free gathered parameters, now or, on streams, once compute is known to be past them."""
        if self._lanes.immediate:
            unit.reshard()
        elif unit.residency is not _SHARDED:
            self._behind.pop(unit, None)  # an earlier mark would be too early
            self._behind[unit] = self._lanes.compute.mark()
            self.drain(keep=1 if self._schedule.limit else 3)

    def drain(self, *, keep: int) -> None:
        """Free the units that were let go, all but the last ``keep``, behind their last use."""
        while len(self._behind) > keep:
            unit, mark = next(iter(self._behind.items()))
            del self._behind[unit]
            if unit.uses == 0:  # else another root, which borrows from it, has taken it up meanwhile
                unit.reshard(after=mark)

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._started, self._last_started = [], self._started

    def prefetch_forward(self, unit: Unit) -> None:
        """Gather what comes after ``unit``, whose forward begins."""
        place = len(self._started)
        self._started.append(unit)
        if unit.settings.forward_prefetch:
            for other in unit.settings.forward_prefetch:
                other.take_over_edits()
                self.gather(other)
        elif self._schedule.forward and unit.groups.shard.overlaps:
            following = self._last_started[place : place + 2]
            if len(following) == 2 and following[0] is unit:
                following[1].take_over_edits()
                self.expect(following[1])

    def prefetch_backward(self, call: Call, step: Step) -> None:
        """Gather what comes after the backward of ``call``."""
        if call.unit.settings.backward_prefetch is not None:
            for other in call.unit.settings.backward_prefetch:
                self.gather(other)
        elif (before := call.before) is not None and call.unit.groups.shard.overlaps:
            comes = before not in step.touched if call.recomputed else before.outstanding > 0
            if comes and before.uses == 0 and before.settings.unshard_in_backward:
                self.expect(before)

    def follow_user(self) -> None:
        """Gathers from now on see what the user did to the parameters until now."""
        if not self._lanes.immediate:
            self._lanes.gather.wait(self._lanes.compute.mark())

    def forget(self, units: Sequence[Unit]) -> None:
        """After an exception: ``units`` were freed by other means."""
        self.ahead, self._started = None, []
        for unit in units:
            self._behind.pop(unit, None)
