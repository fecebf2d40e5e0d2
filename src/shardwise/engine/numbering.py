"""The numbers of units: alike on all ranks of a group, they tell in every collective which unit it is for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from ..comm.collectives import Collectives

__all__ = ["Numbered", "count_of", "number", "renumber"]

_UNITS: weakref.WeakKeyDictionary[Collectives, list[weakref.ref[Any] | None]] = weakref.WeakKeyDictionary()


class Numbered(Protocol):
    """A unit."""

    number: int

    @property
    def name(self) -> str: ...


def number(unit: Numbered, groups: Sequence[Collectives]) -> int:
    """The next number in the first of ``groups``; all of them name the unit by it in messages."""
    units = _UNITS.setdefault(groups[0], [])
    units.append(weakref.ref(unit))

    def describe(tag: int) -> str:
        known = units[tag // 4] if 0 <= tag // 4 < len(units) else None
        unit: Numbered | None = known() if known is not None else None
        return unit.name if unit is not None else f"unit number {tag // 4}"

    for one in groups:
        one.describe_tag = describe
    return len(units) - 1


def count_of(group: Collectives) -> int:
    """How many numbers were given in ``group`` on this rank."""
    return len(_UNITS.get(group, ()))


def renumber(units: Sequence[Numbered], group: Collectives, first: int) -> None:
    """Number ``units`` from ``first`` on: where ranks made different numbers of units before, these agree again."""
    known = _UNITS.setdefault(group, [])
    known.extend([None] * (first - len(known)))
    for unit in units:
        unit.number = len(known)
        known.append(weakref.ref(unit))
