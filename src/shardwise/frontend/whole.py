"""What a sharded module of either front end can do as a whole: ``apply``, and being copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..comm.errands import Errand
from ..engine.direct import EnteredCall
from ..engine.hooks import unit_of
from ..errors import LifecycleError, OptionTypeError
from .summon import is_summoned, summon_full_params

__all__ = ["apply_to_whole", "register_fsdp_forward_method"]


@Errand("apply")
def apply_to_whole(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """``nn.Module.apply`` where ``fn`` sees whole parameters, one unit's at a time; its changes stay.

    Every rank must call it, and change the parameters alike. Raises ``LifecycleError`` inside
    ``summon_full_params``, where plain loops over ``modules()`` do the same.
    """
    unit = unit_of(module)
    if unit is not None and is_summoned(unit):
        raise LifecycleError("apply inside summon_full_params", unit=unit.name,
                             remedy="Leave the summon, or loop over model.modules() inside it.")
    for below in _units_just_below(module):
        below.apply(fn)
    with summon_full_params(module, recurse=False):
        _apply_inside(module, fn)


def _units_just_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if unit_of(child) is not None:
            yield child
        else:
            yield from _units_just_below(child)


def _apply_inside(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    for child in module.children():
        if unit_of(child) is None:
            _apply_inside(child, fn)
    fn(module)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather the unit of ``module`` as its ``forward`` does.

    For entrances such as ``encode`` or ``generate``. Does nothing for a module that is not sharded.
    Raises ``OptionTypeError`` if there is no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    inner: Any = next((m for m in unit.modules if m._parameters is module._parameters), module)
    if not callable(getattr(type(inner), method_name, None)):
        raise OptionTypeError("register_fsdp_forward_method found no such method", unit=unit.name,
                              expected=f"a method of {type(inner).__name__}", got=repr(method_name))
    inner.__dict__[method_name] = EnteredCall(inner, method_name, unit)
