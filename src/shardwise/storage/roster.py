"""Who was there when a unit was sharded: a parameter that comes later is noticed, and taken in."""

from __future__ import annotations

from collections.abc import Iterable
from operator import gt
from typing import Any

from torch import nn

__all__ = ["Roster"]


class Roster:
    """The modules of a unit with their children and numbers of parameters; cheap to compare with."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        present = [module for _, module in modules]
        self._registered: list[dict[str, Any]] = [vars(module)["_parameters"] for module in present]
        self._children: list[dict[str, Any]] = [vars(module)["_modules"] for module in present]
        self._counts = [*map(len, self._registered)]
        self._numbers = [*map(len, self._children)]
        self._parents = [children for children in self._children if children]
        self._known = [[*children.values()] for children in self._parents]

    @property
    def has_newcomers(self) -> bool:
        """Were parameters or modules added, or modules replaced or taken away, since?"""
        counts = [*map(len, self._registered)]
        return (
            [*map(len, self._children)] != self._numbers
            or [[*children.values()] for children in self._parents] != self._known
            or (counts != self._counts and any(map(gt, counts, self._counts)))
        )
