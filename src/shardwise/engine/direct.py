"""Calls that do not enter a unit by its own forward: a child of it, or another of its methods.

While a unit is at rest its inner modules show an ``EnteredCall`` under the name ``forward``. So
a child that is called directly (by ``encode``, ``generate``, or another unit) has its unit
gathered for the length of the call, trains as usual, and costs nothing in the unit's own
forward, where the class's ``forward`` shows. ``register_fsdp_forward_method`` puts one under
another name for good: it then is an entrance like ``forward``, gathering once for all it calls.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, remove_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import LifecycleError
from ..torch_private import under_way
from .hooks import hooks_of
from .unit import Unit

__all__ = ["EnteredCall", "show_at_rest"]


class EnteredCall:
    """A method of ``module`` that enters the unit, unless it is entered already."""

    def __init__(self, module: nn.Module, name: str, unit: Unit | None) -> None:
        self._module, self.name = weakref.ref(module), name
        self._unit = weakref.ref(unit) if unit is not None else None

    def enters(self, unit: Unit) -> bool:
        """Is ``unit`` the one that it enters?"""
        return self._unit is not None and self._unit() is unit

    @property
    def __wrapped__(self) -> Any:
        """The class's method, bound; what ``inspect.signature`` looks at."""
        module = self._module()
        return getattr(type(module), self.name).__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit() if self._unit is not None else None
        hooks = hooks_of(unit.modules[0]) if unit is not None else None
        if unit is None or hooks is None or unit.face.in_use:
            return self.__wrapped__(*args, **kwargs)
        module: Any = self._module()
        if isinstance(module, ParametrizationList) and under_way(remove_parametrizations):
            _refuse_removal("remove_parametrizations", unit)
        args, kwargs = hooks.before_forward(module, args, kwargs)
        try:
            output = self.__wrapped__(*args, **kwargs)
        except BaseException:
            hooks.after_forward(module, args, kwargs, None)
            raise
        changed = hooks.after_forward(module, args, kwargs, output)
        return output if changed is None else changed

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Without a unit: it calls the class's method, until a copied unit puts its own here."""
        module = self._module()
        copied = memo.get(id(module))
        return EnteredCall(copied if copied is not None else module, self.name, None)  # pyright: ignore[reportArgumentType]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LifecycleError(
            "a sharded module cannot be pickled", unit=type(self._module()).__name__,
            remedy="Save model.state_dict(), or inside summon_full_params pickle copy.deepcopy(model).",
        )


class RefusedRemoval:
    """``remove`` of a ``torch.nn.utils.weight_norm`` or ``spectral_norm``, which would compute with rows.

    Their kernels do not notice that they are given too little memory.
    """

    def __init__(self, norm: Any, unit: Unit | None) -> None:
        self._norm, self._unit = weakref.ref(norm), weakref.ref(unit) if unit is not None else None

    def __call__(self, module: nn.Module) -> None:
        unit, norm = self._unit() if self._unit is not None else None, self._norm()
        if unit is not None:
            _refuse_removal("remove_weight_norm" if isinstance(norm, WeightNorm) else "remove_spectral_norm", unit)
        type(norm).remove(norm, module)  # pyright: ignore[reportAttributeAccessIssue]

    def __deepcopy__(self, memo: dict[int, Any]) -> RefusedRemoval:
        """Without a unit, as of ``EnteredCall``."""
        return RefusedRemoval(memo.get(id(self._norm()), self._norm()), None)


def _refuse_removal(what: str, unit: Unit) -> NoReturn:
    raise LifecycleError(
        f"torch.nn.utils {what} on a sharded module: it would give new parameters that no unit holds, computed from "
        "this rank's rows", unit=unit.name,
        remedy="Remove it before sharding, or from the unsharded copy.deepcopy(model) made inside summon_full_params.",
    )


def show_at_rest(unit: Unit) -> None:
    """Let the inner modules of ``unit`` that show its parameters be called directly; norms that hook them stay."""
    inner = dict.fromkeys(s.slot.module for s in unit.face.showings if s.slot.module not in unit.modules)
    for module in inner:
        table = module.__dict__
        shown = table.get("forward")
        if shown is not None and (not isinstance(shown, EnteredCall) or shown.enters(unit)):
            continue  # somebody's own forward for this object, or there already
        call = EnteredCall(module, "forward", unit)
        table["forward"] = call
        unit.face.at_rest.append((table, "forward", call))
    for _, module in unit.own_modules:
        for hook in vars(module)["_forward_pre_hooks"].values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                vars(hook)["remove"] = RefusedRemoval(hook, unit)
