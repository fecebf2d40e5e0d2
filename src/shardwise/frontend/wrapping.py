"""Wrap modules inside a tree: by a policy (``auto_wrap``) or by hand (``enable_wrap`` and ``wrap``).

The wrapper is always handed in, so both front ends use this module and it knows neither.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import OptionTypeError
from shardwise.plan.policies import WrapPolicy, select_modules

__all__ = ["auto_wrap", "enable_wrap", "warn_without_forward", "wrap"]

WrapOne = Callable[[nn.Module, dict[str, Any]], nn.Module]


def auto_wrap(
    root: nn.Module,
    policy: WrapPolicy,
    wrap_one: WrapOne,
    ignored_modules: AbstractSet[nn.Module] = frozenset(),
    ignored_parameters: AbstractSet[nn.Parameter] = frozenset(),
    is_unit: Callable[[nn.Module], bool] | None = None,
    **kwargs: Any,
) -> list[nn.Module]:
    """Wrap what ``policy`` chooses below ``root``, children first, and return the wrapped modules.

    ``wrap_one(module, arguments)`` gets ``kwargs`` with the policy's overrides on top, in a dict of its
    own. Its result takes the module's place under every name and every parent that registers it.
    """
    chosen = select_modules(root, policy, ignored_modules=ignored_modules,
                            ignored_parameters=ignored_parameters, is_unit=is_unit)
    places = _places(root, chosen)
    wrapped: list[nn.Module] = []
    for module, overrides in chosen.items():
        warn_without_forward(module)
        replacement = wrap_one(module, {**kwargs, **overrides})
        for parent, name in places[module]:
            setattr(parent, name, replacement)
        wrapped.append(replacement)
    return wrapped


def _places(root: nn.Module, modules: Collection[nn.Module]) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Find every (parent, name) that registers one of ``modules``, also those that an earlier one hides."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for path, module in root.named_modules(remove_duplicate=False):
        if module in modules:
            parent_path, _, name = path.rpartition(".")
            places[module].append((root.get_submodule(parent_path), name))
    return places


def warn_without_forward(module: nn.Module) -> None:
    """Warn if ``module`` is a mere container: its unit would never see the forward that gathers it."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        warnings.warn(
            f"shardwise: {type(module).__name__} has no forward of its own, so wrapping it gathers nothing "
            "when its children run: wrap the children, or the module that calls them.",
            stacklevel=3,
        )


@dataclass(frozen=True)
class _HandWrap:
    """What ``enable_wrap`` was given."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: dict[str, Any]


_active: ContextVar[_HandWrap | None] = ContextVar("shardwise_enable_wrap", default=None)
_IGNORED = ("ignored_modules", "ignored_states")


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Generator[None]:
    """Within this context, and this thread, ``wrap`` wraps with ``wrapper_cls(module, **wrapper_kwargs)``.

    An inner context stands in for the outer one until it ends; nothing is inherited.
    """
    if not callable(wrapper_cls):
        raise OptionTypeError("enable_wrap cannot call its wrapper_cls",
                              expected="a wrapper class", got=repr(wrapper_cls))
    token = _active.set(_HandWrap(wrapper_cls, {k: _reusable(k, v) for k, v in wrapper_kwargs.items()}))
    try:
        yield
    finally:
        _active.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` as the enclosing ``enable_wrap`` says, with ``wrap_overrides`` on top.

    Outside such a context, and for a module that the arguments ignore, the module comes back as it is.
    """
    active = _active.get()
    if active is None:
        return module
    arguments = active.kwargs | {k: _reusable(k, v) for k, v in wrap_overrides.items()}
    if _ignores(arguments, module):
        return module
    return active.wrapper_cls(module, **arguments)


def _reusable(key: str, value: Any) -> Any:
    """Keep what a generator of ignored things yields: it is read here and again by each wrapper."""
    if key in _IGNORED and isinstance(value, Iterable) and not isinstance(value, Collection):
        return list(value)
    return value


def _ignores(arguments: dict[str, Any], module: nn.Module) -> bool:
    named = (entry for key in _IGNORED for entry in arguments.get(key) or ())
    roots = (entry for entry in named if isinstance(entry, nn.Module))
    return any(module is inner for root in roots for inner in root.modules())
