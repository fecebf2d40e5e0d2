"""Tensors that a unit's forward leaves behind without returning them.

An auxiliary loss kept as an attribute, or appended to a list that was passed in, leads backward
into the unit just as an output does. It has to be watched like one: a backward that came
in unnoticed would read parameters that were freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

__all__ = ["SideOutputs"]

_OWN = tuple(nn.Module().__dict__)
_MOST = 64  # entries of a container that are looked at


class SideOutputs:
    """The attributes of a unit's own modules in which tensors with a history may lie."""

    __slots__ = ("_places",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # torch's own layers keep no results
        custom = [m for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._places = [(m.__dict__, len(_OWN) if tuple(m.__dict__)[: len(_OWN)] == _OWN else 0)
                        for m in custom]

    def found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Tensors with a history in plain attributes, one level down in containers, and in arguments that are such."""
        left: list[Tensor] = []
        for attributes, skip in self._places:
            for value in islice(attributes.values(), skip, None) if len(attributes) > skip else ():
                if isinstance(value, Tensor):
                    if value.grad_fn is not None:
                        left.append(value)
                elif isinstance(value, (list, tuple, dict)) and value:
                    left.extend(_inside(value))  # pyright: ignore[reportUnknownArgumentType]
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, (list, dict)) and value:
                left.extend(_inside(value))  # pyright: ignore[reportUnknownArgumentType]
        return left


def _inside(container: Any) -> Iterator[Tensor]:
    values = container.values() if isinstance(container, Mapping) else container
    for value in islice(values, _MOST):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield value
