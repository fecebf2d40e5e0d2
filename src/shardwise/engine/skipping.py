"""Ranks that run different units (``allow_skipped_units``).

Before a unit is gathered or reduced, every rank says what it wants next, and the first in a fixed
order has its way: the units as they are registered in forward, in reverse in backward, and a
unit's gather before its reduction. A rank that wanted something else takes part all the same: it
gathers and frees, or it sends what it has collected, zeros where it has nothing. A rank that has
come to the end of its pass takes part until all ranks are there.

The results do not hang on the order; only how often a unit is gathered does. Nothing is gathered
ahead of need, since a rank cannot know what it will take part in next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..comm.collectives import Reduction
from ..comm.lanes import Lanes
from ..errors import ConfigurationError, DivergenceError
from ..plan.lifecycle import Pass, Residency
from ..torch_private import no_gradients
from .numbering import GATHER, OTHER, PHASES
from .residents import Residents
from .session import Session
from .settings import Schedule
from .unit import Unit
from .unused import agree_on_unused

__all__ = ["SkippingSession"]


class _AgreedResidents(Residents):
    """Gathers a unit when all ranks do."""

    def __init__(self, lanes: Lanes, schedule: Schedule, agree: Callable[[Unit], None]) -> None:
        super().__init__(lanes, schedule)
        self._agree = agree

    def gather(self, unit: Unit) -> None:
        for owner in (unit, *unit.needs):
            if owner.residency is Residency.SHARDED:
                self._agree(owner)
                owner.unshard()
        super().gather(unit)


class SkippingSession(Session):
    """A session that agrees with its peers on which unit is gathered or reduced next."""

    def __init__(self, root: Unit, units: Sequence[Unit], lanes: Lanes, schedule: Schedule) -> None:
        super().__init__(root, units, lanes, schedule)
        self.residents = _AgreedResidents(lanes, schedule, self._before_gather)
        self._place = {unit: place for place, unit in enumerate(self.units)}
        self._taking_part = False
        self._failed = False  # the ranks could not talk: the pass has no end to agree on
        groups = tuple(root.groups.nontrivial)
        for unit in self.units:
            if tuple(unit.groups.nontrivial) != groups:
                raise ConfigurationError(
                    "allow_skipped_units needs one mesh for all units",
                    expected="the root's groups of ranks", got=f"other groups for {type(unit.modules[0]).__name__}",
                    remedy="Pass the same mesh or process group to every unit.",
                )
            unit.gather.small = None  # a part kept after forward is there on some ranks only

    def send(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit`` when all ranks do."""
        if unit.settings.sync_gradients and not self.step.creating_graph and unit.collector.plan is not None:
            self._until(2 * self._turn(unit) + 1)
            self._reduce(unit)

    def _before_gather(self, unit: Unit) -> None:
        if unit.groups.shard.size > 1 and unit.gather.buffers and self.pass_ is not Pass.REST:
            self._until(2 * self._turn(unit))

    def _end_forward(self) -> None:
        self._end()
        super()._end_forward()

    def _end_reductions(self) -> None:
        self._end()
        super()._end_reductions()

    def _end(self) -> None:
        """Return when all ranks have come to the end of their pass."""
        if not self._failed:
            self._until(2 * len(self.units))
        self._failed = False

    # ------------------------------------------------------------------ agreeing
    def _turn(self, unit: Unit) -> int:
        place = self._place[unit]
        return len(self.units) - 1 - place if self.pass_ is Pass.BACKWARD else place

    def _until(self, mine: int) -> None:
        """Take part in what other ranks want until all want ``mine``."""
        if self._taking_part:
            return
        self._failed = True
        while (agreed := self._agree(mine)) != mine:
            with self._as_helper():
                self._take_part(*divmod(agreed, 2))
        self._failed = False

    @contextmanager
    def _as_helper(self) -> Iterator[None]:
        self._taking_part = True
        try:
            yield
        finally:
            self._taking_part = False

    def _agree(self, mine: int) -> int:
        """The first of what all ranks want."""
        root, backward = self.root, int(self.pass_ is Pass.BACKWARD)
        device = root.storages[0].compute_device if root.storages else torch.device("cpu")
        with no_gradients():
            table = torch.tensor([mine, backward, -backward], dtype=torch.int64, device=device)
            for comm in root.groups.nontrivial:
                comm.all_reduce(table, Reduction.MIN, tag=root.number * PHASES + OTHER).wait()
            first, least, most = table.tolist()
        if least != -most:
            raise DivergenceError(
                "some ranks run a forward while others run a backward", unit=root.name,
                expected="as many forwards and backwards on every rank, whatever units they use",
                remedy="With allow_skipped_units ranks may skip units, but not a forward or backward of the root.",
            )
        return first

    # ------------------------------------------------------------------ taking part
    def _take_part(self, turn: int, reduces: int) -> None:
        unit = self.units[len(self.units) - 1 - turn if self.pass_ is Pass.BACKWARD else turn]
        if reduces:
            self._reduce(unit)
        elif unit.residency is Residency.SHARDED:
            if self.pass_ is Pass.FORWARD and unit.take_over_edits():
                self.residents.follow_user()
            unit.unshard()
            unit.reshard()
        else:
            _gather_again(unit)

    def _reduce(self, unit: Unit) -> None:
        """At once and to the end: what the replicas do must not come between two agreements."""
        with no_gradients():
            if unit in self.step.reduced:  # for the second time in this backward
                unit.arrivals.bind()
                agree_on_unused([unit])
            unit.reduce()
            unit.finish_reduce()
        self.step.reduced[unit] = None


def _gather_again(unit: Unit) -> None:
    """Send what others need of a unit that is gathered here and in use; what arrives is known."""
    unit.wait()
    slots = [storage.own_slot for storage in unit.storages if storage.buffer is not None]
    with unit.lanes.gather, no_gradients():
        mine = slots[0].clone() if len(slots) == 1 else torch.cat([slot.view(torch.uint8) for slot in slots])
        arrived = mine.new_empty(mine.numel() * unit.gather.comm.size)
        unit.gather.comm.all_gather(arrived, mine, tag=unit.number * PHASES + GATHER).wait()
