"""What a session's passes were left by: told to the other ranks, which wait in collectives of that pass."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol

import torch.distributed as dist

from ..comm.passes import Note, Passes
from ..errors import CommunicationError, LeftPassError
from ..plan.lifecycle import Pass, Residency
from .frames import is_call
from .step import Step
from .unit import Unit

__all__ = ["Departures", "declare_void", "present_failure"]

_LONGEST = 300


class _Session(Protocol):
    """What of a session is looked at."""

    root: Unit
    units: list[Unit]
    open: list[Unit]
    pass_: Pass
    step: Step

    def leave_forward(self, unit: Unit) -> object: ...


class Departures:
    """Follows the passes of one session for the groups that its units are on."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self.passes: list[Passes] = []
        for group in dict.fromkeys(group for unit in session.units for group in unit.groups.nontrivial if group.real):
            if not group.passes.members:
                group.passes = Passes(group.members)
            if group.passes not in self.passes:
                self.passes.append(group.passes)
        self._seen: tuple[int, int] | None = None  #: the last exception, and the depth of the forward that it left
        self._where, self._text, self._news = "", "", True

    def failed_to_enter(self, unit: Unit, error: BaseException, depth: int) -> None:
        """``error`` came while a forward of ``unit``, inside of ``depth`` others, began: leave it if it had.

        The others are told nothing of what comes before the first collective: here the same call may come again.
        """
        entered = len(self._session.open) > depth
        gathers = depth > 0 or any(one.residency is not Residency.SHARDED for one in (unit, *unit.needs))
        begun = entered or (self._session.pass_ is not Pass.REST
                            and (gathers or isinstance(error, CommunicationError)))
        if entered:
            self._session.leave_forward(unit)
        if begun:
            self.failed(unit, error)

    def failed(self, unit: Unit, error: BaseException) -> None:
        """``error`` has left a forward of ``unit``; with the outermost one it ends the pass."""
        depth = len(self._session.open)
        if self._seen != (id(error), depth + 1):  # it was raised here, and not further in
            self._where, self._news = unit.name, not isinstance(error, LeftPassError)
            self._text = f"{type(error).__name__}: {error}"[:_LONGEST]
        self._seen = id(error), depth
        if depth == 0 and self._session.pass_ is not Pass.BACKWARD:  # that would be a recompute
            for one in self._session.units:
                one.outstanding = one.outstanding_before  # what this pass left behind has no backward
            self._tell("forward", unit)

    def backward_dropped(self, _: object) -> None:
        """Autograd dropped what it was to call after the backward: it has called it, or an exception ended the pass."""
        if self._session.pass_ is Pass.BACKWARD:
            entered = self._session.step.entered
            self._tell("backward", entered[-1].unit if entered else self._session.root)
            for unit in self._session.units:  # what the user edits now must be the parameters, not what was in use
                unit.face.show_originals()
                unit.arrivals.forget()

    def _tell(self, phase: str, unit: Unit) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        note = Note(rank, f"{phase} of {(self._where or unit.name)!r}", self._text)
        for passes in self.passes:
            passes.leave(note, news=self._news)
        self._seen, self._where, self._text, self._news = None, "", "", True


def present_failure() -> BaseException | None:
    """The exception that ends the forward whose hook is being called, if one does."""
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and is_call(trace.tb_frame) else None


def declare_void() -> None:
    """Warn the caller, five calls up, that an exception ended the last backward."""
    warnings.warn("shardwise: the last backward did not finish, so gradients may hold part of a step; "
                  "call zero_grad() before the next one", RuntimeWarning, stacklevel=6)
