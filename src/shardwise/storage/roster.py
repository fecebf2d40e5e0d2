"""Who was there when a unit was sharded: a parameter that comes later is noticed, and taken in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import gt
from typing import Any

from torch import nn

__all__ = ["Roster"]


class Roster:
    """The modules of a unit with their children and numbers of parameters; cheap to compare with."""

    __slots__ = ("_count", "_known", "_parents", "_sizes", "_tables")

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        present = [module for _, module in modules]
        registered: list[dict[str, Any]] = [vars(module)["_parameters"] for module in present]
        children: list[dict[str, Any]] = [vars(module)["_modules"] for module in present]
        self._count = len(registered)  # the first tables are those of parameters
        self._tables = registered + children
        self._sizes = [*map(len, self._tables)]
        self._parents = [table for table in children if table]
        self._known = [*chain.from_iterable(map(dict.values, self._parents))]

    def has_newcomers(self) -> bool:
        """Were parameters or modules added, or modules replaced or taken away, since?"""
        sizes, count = [*map(len, self._tables)], self._count
        return (
            (sizes != self._sizes
             and (sizes[count:] != self._sizes[count:] or any(map(gt, sizes[:count], self._sizes[:count]))))
            or [*chain.from_iterable(map(dict.values, self._parents))] != self._known
        )
