"""Back to rest, asked for from outside: what a failed backward or an interrupted forward left is thrown away."""

from __future__ import annotations

from ..plan.lifecycle import Pass
from .build import session_of
from .frames import running_anywhere
from .hooks import abandon
from .unit import Unit

__all__ = ["settle_unit"]


def settle_unit(unit: Unit) -> None:
    """Nothing is in use any longer, unless a forward or backward of the unit's model really runs.

    An interrupt (Ctrl-C, an exit) runs no hooks on its way out of a forward, and whoever catches it wants to save.
    """
    session = session_of(unit)
    if session is None:
        return
    session.settle()
    if session.pass_ is Pass.FORWARD:
        modules = [module for one in session.units for module in one.modules]
        if not running_anywhere(modules):
            abandon(session)
