"""Who was there when a unit was sharded: a parameter that comes later must not train unnoticed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import WritebackError
from .sharded_parameter import home_of

__all__ = ["Roster"]


class Roster:
    """The modules of a unit with their children and numbers of parameters; cheap to compare with."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        self._rows: list[tuple[str, nn.Module, dict[str, Any], int, dict[str, Any], list[Any]]] = []
        for name, module in modules:
            registered, children = vars(module)["_parameters"], vars(module)["_modules"]
            self._rows.append((name, module, registered, len(registered), children, list(children.values())))

    def check(self, unit: str, rank: int) -> None:
        """Raise ``WritebackError`` if a parameter that no unit holds was added since."""
        for name, module, registered, count, children, known in self._rows:
            if len(registered) > count:
                self._refuse(name, module.named_parameters(recurse=False), unit, rank)
            if len(children) != len(known) or any(
                    new is not old for new, old in zip(children.values(), known, strict=True)):
                fresh = {key: child for key, child in children.items()
                         if child is not None and all(child is not old for old in known)}
                for key, child in fresh.items():
                    self._refuse(f"{name}.{key}" if name else key, child.named_parameters(), unit, rank)

    @staticmethod
    def _refuse(prefix: str, parameters: Iterable[tuple[str, nn.Parameter]], unit: str, rank: int) -> None:
        for name, parameter in parameters:
            if home_of(parameter) is None and parameter.requires_grad:
                raise WritebackError(
                    "Cannot writeback: a parameter was added after sharding, so no rank would reduce its gradient",
                    fqn=f"{prefix}.{name}" if prefix else name, unit=unit, rank=rank,
                    expected="a parameter that a unit holds", got="a parameter of this rank alone",
                    remedy="Add parameters before sharding, or shard the new module as a unit of its own.",
                )
