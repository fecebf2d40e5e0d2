"""The numbers of units: alike on all ranks of a group, they tell in every collective which unit it is for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from ..comm.collectives import Collectives

__all__ = ["ALL_REDUCE", "GATHER", "OTHER", "PHASES", "REDUCE", "Numbered", "count_of", "number", "renumber"]

#: a collective's tag is ``number * PHASES`` of its unit plus what it is for
PHASES = 4
GATHER, REDUCE, ALL_REDUCE, OTHER = range(PHASES)


class Numbered(Protocol):
    """A unit."""

    number: int

    @property
    def name(self) -> str: ...


class _Numbers:
    """Those that were given in one group, and to whom."""

    def __init__(self) -> None:
        self.given = 0
        self._units: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()

    def give(self, unit: Numbered) -> int:
        """The next one."""
        number, self.given = self.given, self.given + 1
        self._units[number] = unit
        return number

    def describe(self, tag: int) -> str:
        """The unit that a collective with ``tag`` is for."""
        unit = self._units.get(tag // PHASES)
        return unit.name if unit is not None else f"unit number {tag // PHASES}"


_NUMBERS: weakref.WeakKeyDictionary[Collectives, _Numbers] = weakref.WeakKeyDictionary()


def number(unit: Numbered, groups: Sequence[Collectives]) -> int:
    """The next number in the first of ``groups``; all of them name the unit by it in messages."""
    numbers = _NUMBERS.setdefault(groups[0], _Numbers())
    for one in groups:
        one.describe_tag = numbers.describe
    return numbers.give(unit)


def count_of(group: Collectives) -> int:
    """How many numbers were given in ``group`` on this rank."""
    return _NUMBERS[group].given if group in _NUMBERS else 0


def renumber(units: Sequence[Numbered], group: Collectives, first: int) -> None:
    """Number ``units`` from ``first`` on: where ranks made different numbers of units before, these agree again."""
    numbers = _NUMBERS.setdefault(group, _Numbers())
    numbers.given = max(numbers.given, first)
    for unit in units:
        unit.number = numbers.give(unit)
