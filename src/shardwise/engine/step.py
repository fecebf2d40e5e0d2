"""The present iteration: what it has begun, all in one object that an exception throws away."""

from __future__ import annotations

from dataclasses import dataclass, field

from .unit import Unit

__all__ = ["Call", "Step"]


class Call:
    """One forward of a unit, and whether its backward is running."""

    __slots__ = ("before", "entered", "precision", "recomputed", "unit", "values", "watched")

    def __init__(self, unit: Unit, *, recomputed: bool) -> None:
        self.unit = unit
        self.before = unit.before  #: the unit whose forward ended before this one's: next in backward
        self.precision = unit.precision  #: what the forward computed in
        self.values = unit.values
        self.recomputed = recomputed  #: it ran inside a backward
        self.watched = False  #: an input tells when this call's backward is over
        self.entered = False


@dataclass
class Step:
    """One backward, and the forwards before it. Units are dict keys, to keep their order."""

    entered: list[Call] = field(default_factory=list[Call])  #: calls whose backward is running
    reducing: list[Unit] = field(default_factory=list[Unit])  #: units with a reduction on its way
    reduced: dict[Unit, None] = field(default_factory=dict["Unit", None])  #: reduced in this backward
    touched: dict[Unit, None] = field(default_factory=dict["Unit", None])  #: whose backward was entered
    creating_graph: bool = False  #: this backward makes a graph of its own (create_graph=True)
    keep_gathered: bool = False  #: such a graph exists: nothing may be freed before it is used

    def is_entered(self, unit: Unit) -> bool:
        """Does a backward of ``unit`` run? A forward now is its recompute, whose own graph stays unused."""
        return any(call.unit is unit for call in self.entered)
