"""A whole value, or an index of the whole, in an operation in place on a parameter that shows rows.

Torch fails then, in words about sizes. Nothing is looked at before it does. What optimizers call on parameters
(``add_``, ``mul_``, ``addcdiv_``, ``addcmul_``) stays torch's own, for a function of Python would cost each of these
calls a microsecond; so does ``p.data``, which is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import WritebackError
from ..plan.layout import row_granule

if TYPE_CHECKING:
    from .flat_storage import FlatStorage

__all__ = ["EDITS", "explains"]

#: operations in place that torch's optimizers do not call on parameters
EDITS = ("copy_", "sub_", "div_", "lerp_", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def explains(name: str, home_of: Callable[[Any], tuple[FlatStorage, int] | None]) -> Any:
    """``Tensor.name`` for sharded parameters, whose failure with a whole value is a ``WritebackError``."""
    plain = getattr(Tensor, name)

    @wraps(plain)
    def edit(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except (RuntimeError, IndexError) as error:
            home = home_of(self)
            told = None if home is None else _refusal(error, name, *home, [*args, *kwargs.values()])
            if told is None:
                raise
            raise told from error
    return edit


def _refusal(error: Exception, name: str, storage: FlatStorage, index: int, given: Sequence[Any]
             ) -> WritebackError | None:
    """What to say if ``given`` would have been right for the whole parameter; None if not."""
    if index < 0 or storage.whole:
        return None
    shape, (_, mine, _) = storage.layout.parameters[index].shape, storage.local_geometry(index)
    if torch.is_grad_enabled() and storage.parameters[index].requires_grad:
        return None
    if isinstance(error, IndexError):
        got = "an index of the whole" if _is_index(given[0], shape) else None
    else:
        sizes = [tuple(value.shape) for value in _tensors(given)]
        got = next((size for size in sizes if _fits(size, shape) and not _fits(size, mine)), None)
    if got is None:
        return None
    span, row = storage.layout.span(index, storage.rank), row_granule(shape)
    return WritebackError(
        f"Cannot writeback: a whole value was written in place (by {name!r}) into a sharded parameter, which shows "
        "this rank's rows only",
        fqn=(storage.hidden or storage.visible)[index].fqn, unit=storage.unit, rank=storage.rank,
        expected=f"{tuple(mine)} (rows {span.start // row} to {span.stop // row} of {tuple(shape)})", got=got,
        remedy="On all ranks assign it, p.data = whole, of which each takes its rows; or use summon_full_params, or "
               "load_state_dict. In place write this rank's rows.")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value


def _fits(size: Sequence[int], shape: Sequence[int]) -> bool:
    """Can a tensor of ``size`` be spread over ``shape``?"""
    with suppress(RuntimeError):
        return tuple(torch.broadcast_shapes(size, shape)) == tuple(shape)
    return False


def _is_index(index: Any, shape: Sequence[int]) -> bool:
    with suppress(IndexError, RuntimeError, TypeError):
        torch.empty(1).expand(shape)[index]
        return True
    return False
