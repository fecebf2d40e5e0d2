"""A parameter at rest must not be computed with by mistake.

Between the root's training forward and the end of its backward a sharded parameter shows rows,
and a loss that reads it would be silently local, or fail with a shape that explains nothing. In
that window its class is ``GuardedParameter``, which refuses every function that gives a tensor
to compute with. Outside of the window the class is the cheap one: an optimizer pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import LifecycleError
from ..torch_private import mark_foreach_supported, without_torch_function
from .flat_storage import FlatStorage
from .sharded_parameter import FlatParameter, ShardedMethods, ShardedParameter, home_of
from .tensor_parallel import TensorParallelParameter

__all__ = ["GuardedParameter", "guard", "unguard"]


class _Refuses:
    """Refuses to be computed with."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_grad_enabled() or func in _READS:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        culprit = next(_guarded([*args, *(kwargs or {}).values()]), None)
        try:
            with without_torch_function():
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError) as error:  # mostly a shape: rows where the whole was expected
            raise _refusal(culprit, func) from error
        if any(True for _ in _tensors(result, culprit)):
            raise _refusal(culprit, func)
        return result


class GuardedParameter(_Refuses, ShardedParameter):
    """The user's parameter at rest while a step is under way."""


class GuardedFlatParameter(GuardedParameter, FlatParameter):
    """The same for a flat parameter."""


class GuardedTensorParallelParameter(_Refuses, ShardedMethods, Tensor):
    """The same for a part of a tensor-parallel parameter."""

    __slots__ = ("_local_tensor", "_spec")


_GUARDED: dict[type, type] = {ShardedParameter: GuardedParameter, FlatParameter: GuardedFlatParameter,
                              TensorParallelParameter: GuardedTensorParallelParameter}
_CHEAP: dict[type, type] = {guarded: cheap for cheap, guarded in _GUARDED.items()}


def _guarded(values: Iterable[Any]) -> Any:
    for value in values:
        if isinstance(value, _Refuses):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(cast("list[Any]", value))


def _tensors(result: Any, culprit: Any) -> Any:
    """Tensors in what a function gave; not the parameter itself, changed in place."""
    if isinstance(result, Tensor):
        if result is not culprit:
            yield result
    elif isinstance(result, (list, tuple)):
        for item in cast("list[Any]", result):
            yield from _tensors(item, culprit)


def _refusal(parameter: Any, func: Any) -> LifecycleError:
    home = home_of(parameter) if parameter is not None else None
    name = storage = None
    if home is not None:
        storage, index = home
        seen = storage.visible[0] if index < 0 else (storage.hidden or storage.visible)[index]
        name = seen.fqn
    what = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", str(func))
    return LifecycleError(
        f"a sharded parameter was used outside of its unit's forward (in {what!r}): at rest it shows this "
        "rank's rows only", fqn=name, unit=storage.unit if storage is not None else None,
        rank=storage.rank if storage is not None else None, expected="a gathered parameter",
        got="at rest (SHARDED)",
        remedy="Use it inside the unit's forward, enter by register_fsdp_forward_method(module, name), or take "
               "full_tensor(), whose gradient goes to the rows. To read it: summon_full_params; its rows: p.detach().",
    )


def guard(storages: Iterable[FlatStorage]) -> None:
    """Refuse use at rest."""
    for storage in storages:
        if not storage.whole:
            _change_class(storage, _GUARDED)


def unguard(storages: Iterable[FlatStorage]) -> bool:
    """Back to the cheap class; was use refused until now?"""
    guarded = False
    for storage in storages:
        guarded |= isinstance(storage.parameters[0], _Refuses)
        _change_class(storage, _CHEAP)
    return guarded


def _change_class(storage: FlatStorage, table: dict[type, type]) -> None:
    shown: list[Any] = storage.parameters
    last = new = None
    for parameter in [storage.visible[0].parameter, *shown] if storage.hidden else shown:
        kind = parameter.__class__
        if kind is not last:
            last, new = kind, table.get(kind, kind)
        parameter.__class__ = new  # pyright: ignore[reportAttributeAccessIssue]


_READS: frozenset[Any] = frozenset({
    Tensor.detach, Tensor.requires_grad_,
    *(cast("Any", getattr(Tensor, name)).__get__ for name in ("data", "grad", "shape", "dtype", "device",  # pyright: ignore[reportUnnecessaryCast]
                                                            "requires_grad", "is_leaf")),
})

mark_foreach_supported(GuardedParameter)
mark_foreach_supported(GuardedFlatParameter)
mark_foreach_supported(GuardedTensorParallelParameter)
