"""Norms and overflow checks of sharded gradients are global, whoever computes them.

A gradient at rest holds this rank's rows only. ``torch.nn.utils.clip_grad_norm_``,
``get_total_norm``, ``p.grad.norm()`` and ``torch.amp.GradScaler`` would give each rank another,
wrong answer. So a bound gradient has a class of its own, whose ``__torch_function__`` answers
the norm family and the scaler's check for all ranks, and passes everything else on.

A norm of one gradient stays *partial* until its value is needed: torch's clipping takes the
norm of each gradient, stacks them, and takes the norm of the stack, so one small all-reduce
is enough for all of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from ..comm.collectives import Handle, Reduction
from ..comm.errands import Errand
from ..errors import ShardwiseError
from ..torch_private import (
    foreach_norm,
    forget_foreach_supported,
    mark_foreach_supported,
    scaler_check,
    without_torch_function,
)
from .saved_rows import tell_of_rows

__all__ = ["AllReduces", "GradientKind", "PartialNorm", "PartialNorms", "ShardedGradient", "combine_norms", "plain"]


class AllReduces(Protocol):
    """One or more groups of ranks that can combine a tensor."""

    size: int

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Handle: ...


class ShardedGradient(Tensor):
    """This rank's rows of a gradient; a subclass for each group of ranks that share it."""

    comm: ClassVar[AllReduces]
    #: optimizers ask this of each gradient; as an attribute of the class it needs no torch function
    is_sparse = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        tell_of_rows(self.comm.size)
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).detach().clone()


class GradientKind:
    """Makes the gradients of one shard group: plain tensors where nothing is split.

    Torch's list of the classes that it knows is searched for every gradient: one class for a group, while it is used.
    """

    _known: ClassVar[weakref.WeakValueDictionary[AllReduces, GradientKind]] = weakref.WeakValueDictionary()

    def __init__(self, comm: AllReduces) -> None:
        self.tensor_class: type[Tensor] = Tensor
        if comm.size > 1:
            self.tensor_class = type("ShardedGradient", (ShardedGradient,), {"comm": comm})
            mark_foreach_supported(self.tensor_class)
            weakref.finalize(self, forget_foreach_supported, self.tensor_class).atexit = False

    @classmethod
    def of(cls, comm: AllReduces) -> GradientKind:
        """The one of ``comm``."""
        kind = cls._known.get(comm)
        if kind is None:
            kind = cls._known[comm] = cls(comm)
        return kind

    def mark(self, gradient: Tensor) -> Tensor:
        """Give ``gradient`` its class; the same object, no copy."""
        gradient.__class__ = self.tensor_class
        return gradient


def plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor."""
    with without_torch_function():
        return tensor.as_subclass(Tensor)


class PartialNorm(Tensor):
    """This rank's part of the norm of a sharded gradient; becomes global when it is read."""

    order: float
    comm: AllReduces

    @staticmethod
    def of(local: Tensor, order: float, comm: AllReduces) -> PartialNorm:
        """From the norm of this rank's rows."""
        made = cast("PartialNorm", local.as_subclass(PartialNorm))  # pyright: ignore[reportUnnecessaryCast]
        made.order, made.comm = order, comm
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack:
            return PartialNorms.of(args[0] if args else kwargs["tensors"])
        if func in _KEEPS_PARTIAL:
            with without_torch_function():
                result = func(*args, **kwargs)
            source = cast("PartialNorm", args[0])
            return PartialNorm.of(result, source.order, source.comm) if isinstance(result, Tensor) else result
        args, kwargs = _resolved(args), {key: _resolved(value) for key, value in kwargs.items()}
        with without_torch_function():
            return func(*args, **kwargs)


class PartialNorms(Tensor):
    """A stack of norms, some of them partial; its own norm needs one all-reduce for each group."""

    parts: list[Tensor]

    @staticmethod
    def of(parts: Sequence[Tensor]) -> PartialNorms:
        """From what was given to ``torch.stack``."""
        values = torch.stack([plain(part) for part in parts])
        made = cast("PartialNorms", values.as_subclass(PartialNorms))  # pyright: ignore[reportUnnecessaryCast]
        made.parts = list(parts)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and isinstance(args[0], PartialNorms):
            order = _order(args, kwargs)
            if all(part.order == order for part in args[0].parts if isinstance(part, PartialNorm)):
                return combine_norms(args[0].parts, order)
        args, kwargs = _resolved(args), {key: _resolved(value) for key, value in kwargs.items()}
        with without_torch_function():
            return func(*args, **kwargs)


def _resolved(value: Any) -> Any:
    """``value`` with every partial norm made global."""
    if isinstance(value, PartialNorm):
        return combine_norms([value], value.order)
    if isinstance(value, PartialNorms):
        return torch.stack([_resolved(part) for part in value.parts])
    if isinstance(value, (list, tuple)):
        return type(cast("list[Any]", value))(_resolved(item) for item in cast("list[Any]", value))
    return value


def combine_norms(parts: Sequence[Tensor], order: float) -> Tensor:
    """The norm of the whole from norms of its parts: sharded ones are combined over their ranks.

    One all-reduce for each group. Plain parts count once. Returns a 0-d tensor.
    """
    by_group: dict[AllReduces, list[Tensor]] = {}
    whole: list[Tensor] = []
    for part in parts:
        if isinstance(part, PartialNorm):
            by_group.setdefault(part.comm, []).append(plain(part))
        else:
            whole.append(plain(part))
    for comm, norms in by_group.items():
        whole.append(_over_ranks(torch.stack(norms), order, comm))
    if len(whole) == 1:
        return whole[0]
    device = whole[0].device
    return torch.linalg.vector_norm(torch.stack([part.to(device) for part in whole]), order)


@Errand("reading a norm of gradients (float, print)")
def _over_ranks(norms: Tensor, order: float, comm: AllReduces) -> Tensor:
    """All-reduce a vector of partial norms into one norm."""
    if math.isinf(order):
        local = norms.max() if order > 0 else norms.min()
        comm.all_reduce(local.view(1), Reduction.MAX if order > 0 else Reduction.MIN).wait()
        return local
    wide = norms.to(torch.promote_types(norms.dtype, torch.float32))
    total = wide.sum() if order == 0 else wide.pow(order).sum()
    comm.all_reduce(total.view(1)).wait()
    return (total if order == 0 else total.pow(1.0 / order)).to(norms.dtype)


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
    return 2.0 if order is None or order == "fro" else float(order)


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient, dim = cast("ShardedGradient", args[0]), kwargs.get("dim", args[2] if len(args) > 2 else None)
    if dim is not None:
        dims = [d % max(gradient.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]
        if 0 in dims:
            raise ShardwiseError(
                "a norm along dim 0 of a sharded gradient is not the norm of the whole",
                expected="a norm without dim, or along other dims", got=f"dim={dim}",
                remedy="Use clip_grad_norm_, or gather the gradient first.",
            )
        with without_torch_function():
            return func(*args, **kwargs)
    order, dtype = _order(args, kwargs), kwargs.get("dtype")
    return PartialNorm.of(_local_norm(plain(gradient), order, dtype), order, type(gradient).comm)


def _local_norm(rows: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if rows.numel() == 0:
        start = math.inf if math.isinf(order) and order < 0 else 0.0
        return torch.full((), start, dtype=dtype or rows.dtype.to_real(), device=rows.device)
    return torch.linalg.vector_norm(rows, order, dtype=dtype)


def _norms_of_list(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    order, dtype = _order(args, kwargs), kwargs.get("dtype")
    return [
        PartialNorm.of(_local_norm(plain(g), order, dtype), order, type(g).comm)
        if isinstance(g, ShardedGradient) else torch.linalg.vector_norm(g, order, dtype=dtype)
        for g in args[0]
    ]


@Errand("unscale_ of the gradient scaler")
def _check_and_unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An infinity on one rank is an infinity on all of them."""
    with without_torch_function():
        result = func(*args, **kwargs)
    found: Tensor = args[1]
    for comm in dict.fromkeys(type(g).comm for g in args[0] if isinstance(g, ShardedGradient)):
        comm.all_reduce(found.view(1), Reduction.MAX).wait()
    return result


_NORMS: frozenset[Any] = frozenset({torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm})
_KEEPS_PARTIAL: frozenset[Any] = frozenset({
    Tensor.to, Tensor.detach, Tensor.dim, Tensor.size,
    *(cast("Any", getattr(Tensor, name)).__get__  # pyright: ignore[reportUnnecessaryCast]
      for name in ("device", "dtype", "shape", "is_cuda", "layout")),
})
_HANDLERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(_NORMS, _norm),
    foreach_norm: _norms_of_list,
    scaler_check: _check_and_unscale,
}
