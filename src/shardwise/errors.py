"""Every error that shardwise raises on purpose.

    ShardwiseError                 something that shardwise refuses or found to be wrong
    ├── ConfigurationError         bad input at construction (also a ValueError)
    │   └── OptionTypeError        an argument of the wrong type (also a TypeError)
    ├── LifecycleError             a call that is not legal in the present state
    ├── WritebackError             a user's edit of a parameter or gradient that cannot be honoured
    ├── CheckpointError            state that cannot be saved, read or matched
    ├── NumbersError               a value that is not finite, or replicas that differ
    └── CommunicationError         a collective that did not happen as planned
        ├── DivergenceError        ranks that run different things
        └── PeerError              a rank that died or does not answer
            └── LeftPassError      a rank that lives, and left a pass by an exception of its own

A message always says what happened, and, where they are known: the parameter (FQN), the
unit, the rank, what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "DivergenceError",
    "LeftPassError",
    "LifecycleError",
    "NumbersError",
    "OptionTypeError",
    "PeerError",
    "ShardwiseError",
    "WritebackError",
    "describe",
    "name_list",
]


def describe(
    what: str,
    *,
    fqn: str | None = None,
    unit: str | None = None,
    rank: int | None = None,
    expected: object = None,
    got: object = None,
    remedy: str | None = None,
) -> str:
    """Compose one error text: ``what (parameter …, unit …, rank …): expected …, got …. remedy``."""
    named = [("parameter", fqn), ("unit", unit), ("rank", rank)]
    where = ", ".join(f"{label} {value!r}" if label != "rank" else f"rank {value}"
                      for label, value in named if value is not None)
    facts = ", ".join(f"{label} {value}" for label, value in (("expected", expected), ("got", got))
                      if value is not None)
    text = "shardwise: " + what + (f" ({where})" if where else "")
    text += f": {facts}." if facts else "."
    return text + (f" {remedy}" if remedy else "")


def name_list(names: Sequence[str]) -> str:
    """Names for a text, the first four and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class ShardwiseError(RuntimeError):
    """Base of all errors that shardwise raises on purpose."""

    def __init__(
        self,
        what: str,
        *,
        fqn: str | None = None,
        unit: str | None = None,
        rank: int | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(describe(what, fqn=fqn, unit=unit, rank=rank, expected=expected, got=got,
                                  remedy=remedy))
        self.fqn, self.unit, self.rank = fqn, unit, rank

    @classmethod
    def retold(cls, text: str) -> Self:
        """The error that another rank raised, whose whole text is ``text``."""
        error = cls("")
        error.args = (text,)
        return error


class ConfigurationError(ShardwiseError, ValueError):
    """Bad input, found at construction; nothing was changed."""


class OptionTypeError(ConfigurationError, TypeError):
    """An argument of the wrong type, found at construction; nothing was changed."""


class LifecycleError(ShardwiseError):
    """A call that is not legal in the present state of a unit or session."""


class WritebackError(ShardwiseError):
    """A user's edit of a parameter or gradient that cannot be honoured."""


class CheckpointError(ShardwiseError):
    """State that cannot be saved, read or matched with the model."""


class NumbersError(ShardwiseError):
    """A value that is not finite, or replicas that differ; found by a check that was asked for."""


class CommunicationError(ShardwiseError):
    """A collective that did not happen as planned."""


class DivergenceError(CommunicationError):
    """Ranks of one group that run different units, orders or options."""


class PeerError(CommunicationError):
    """A rank that died or does not answer."""


class LeftPassError(PeerError):
    """A rank left a forward or backward by an exception of its own. All ranks may go on with the next pass."""
