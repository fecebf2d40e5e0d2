"""The legal states of a unit and of a session, and the moves between them.

A unit's residency::

    SHARDED ──unshard──> UNSHARDING ──wait──> UNSHARDED
       ^                     │                    │
       └───────reshard───────┴──────reshard───────┘

A session's pass::

    REST ──root forward──> FORWARD ──root left──> REST ──first gradient──> BACKWARD ──end──> REST
                           FORWARD ──first gradient──> BACKWARD ──end──> FORWARD  (inside a forward)

``recover`` leads from any state back to SHARDED and REST.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn, Protocol

from ..errors import LifecycleError

__all__ = ["LEGAL_MOVES", "Named", "Pass", "Residency", "legal", "refuse_move"]


class Residency(IntEnum):
    """What memory a unit holds."""

    SHARDED = 0  #: this rank's shard only; the gathered storage has 0 bytes
    UNSHARDING = 1  #: the gathered storage is allocated and a gather is under way
    UNSHARDED = 2  #: the gathered storage holds the whole parameters


class Pass(IntEnum):
    """What a session is doing."""

    REST = 10
    FORWARD = 11
    BACKWARD = 12


class Named(Protocol):
    """What moves, for the message."""

    @property
    def name(self) -> str: ...


#: ``old * 100 + new`` of each legal move: the owner of a state looks here before it changes
LEGAL_MOVES: frozenset[int] = frozenset(old * 100 + new for old, new in (
    (Residency.SHARDED, Residency.UNSHARDING),
    (Residency.UNSHARDING, Residency.UNSHARDED),
    (Residency.UNSHARDING, Residency.SHARDED),
    (Residency.UNSHARDED, Residency.SHARDED),
    (Pass.REST, Pass.FORWARD),
    (Pass.FORWARD, Pass.REST),
    (Pass.REST, Pass.BACKWARD),
    (Pass.FORWARD, Pass.BACKWARD),
    (Pass.BACKWARD, Pass.REST),
    (Pass.BACKWARD, Pass.FORWARD),
))


def legal(old: Residency, new: Residency) -> Residency:
    """``new``, if the table has this move: looked up once by who knows where it comes from."""
    if old * 100 + new not in LEGAL_MOVES:
        raise LifecycleError(f"{old.name} -> {new.name} is not in the table of legal moves")
    return new


def refuse_move(unit: Named, old: IntEnum, new: IntEnum) -> NoReturn:
    """Raise ``LifecycleError``: ``old`` → ``new`` is not in the table of legal moves."""
    raise LifecycleError(
        "illegal move of a unit", unit=unit.name, expected="a legal move", got=f"{old.name} -> {new.name}",
        remedy="This is a defect of shardwise; please report it with the traceback.",
    )
