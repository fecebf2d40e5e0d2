"""Which unit owns which parameter, and under which names it is registered.

A parameter has one owner, the first unit that takes it. A unit that finds a parameter that
another unit owns already (tied weights, a module shared by two units) *borrows* it: it has
the owner gathered whenever it runs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["OwnedParameter", "Ownership", "Slot", "collect", "walk"]


@dataclass(frozen=True, eq=False)
class Slot:
    """One place where a parameter is registered: ``module._parameters[name]``."""

    module: nn.Module
    name: str
    fqn: str  #: full name below the unit's root module


@dataclass(eq=False)
class OwnedParameter:
    """A parameter of a unit with all its slots there; ``fqn`` is the first one's."""

    parameter: nn.Parameter
    slots: list[Slot] = field(default_factory=list["Slot"])
    parallel: Any = None  #: how tensor parallelism has split it over another mesh, if it has

    @property
    def fqn(self) -> str:
        return self.slots[0].fqn


@dataclass(frozen=True, eq=False)
class Ownership:
    """The outcome for one unit."""

    owned: list[OwnedParameter]
    borrowed: list[OwnedParameter]  #: owned by another unit
    modules: list[tuple[str, nn.Module]]  #: the unit's own modules, with names below it


def walk(
    root: nn.Module, prefix: str, stop: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules below ``root`` in registration order, not entering those for which ``stop``.

    Two module objects that share one ``_parameters`` dict (a wrapper and what it wraps) count
    as one.
    """
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module._parameters) in seen:
            return
        seen.add(id(module._parameters))
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None and not stop(child):
                yield from visit(f"{name}.{child_name}" if name else child_name, child)

    yield from visit(prefix, root)


def collect(
    roots: Iterable[tuple[str, nn.Module]],
    *,
    stop: Callable[[nn.Module], bool],
    ignored: set[nn.Parameter],
    owner: Callable[[nn.Parameter], Any | None],
) -> Ownership:
    """Find the parameters of the unit made of ``roots``.

    ``stop``: modules that belong to other units or are ignored. ``owner``: the unit that has a
    parameter already, or None.
    """
    owned: dict[nn.Parameter, OwnedParameter] = {}
    borrowed: dict[nn.Parameter, OwnedParameter] = {}
    modules: list[tuple[str, nn.Module]] = []
    for prefix, root in roots:
        for name, module in walk(root, prefix, stop):
            modules.append((name, module))
            for key, parameter in module._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                table = owned if owner(parameter) is None else borrowed
                entry = table.setdefault(parameter, OwnedParameter(parameter))
                entry.slots.append(Slot(module, key, f"{name}.{key}" if name else key))
    return Ownership(list(owned.values()), list(borrowed.values()), modules)
