"""Who was there when a unit was sharded: a parameter that comes later is noticed, and taken in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["Roster"]


class Roster:
    """The modules of a unit with their children and numbers of parameters; cheap to compare with."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        self._rows: list[tuple[dict[str, Any], int, dict[str, Any], list[Any]]] = []
        for _, module in modules:
            registered, children = vars(module)["_parameters"], vars(module)["_modules"]
            self._rows.append((registered, len(registered), children, list(children.values())))

    @property
    def has_newcomers(self) -> bool:
        """Were parameters or modules added, or modules replaced, since?"""
        for registered, count, children, known in self._rows:
            if len(registered) > count or ((known or children) and [*children.values()] != known):
                return True
        return False
