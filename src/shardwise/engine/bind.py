"""Binding: this rank's chunk of reduced gradients becomes the ``.grad`` of the user's parameters.

The bound gradients are views of one chunk to which the engine keeps no reference, so that
``zero_grad(set_to_none=True)`` frees the memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import WritebackError
from ..storage.flat_storage import FlatStorage, Visible
from ..storage.global_norm import GradientKind
from ..torch_private import allow_gradient_dtype, run_gradient_hooks, run_post_accumulate_hooks
from .collect import Collector
from .reduce import Reduced

__all__ = ["bind"]


def bind(collector: Collector, reduced: Reduced, kind: GradientKind, used: Callable[[int], bool]) -> None:
    """Give the parameters with a target that is ``used`` their part of the chunk."""
    with torch.no_grad():
        for storage, seen, offset in _selected(collector, used):
            final = reduced.chunk.dtype if storage.precision.keep_low_precision_grads else storage.stored_dtype
            gradient = reduced.chunk.as_strided(seen.size, seen.stride, offset)
            if gradient.dtype != final:
                gradient = gradient.to(final)
            if gradient.device != storage.shard.device:
                gradient = gradient.to(storage.shard.device)
            _give(storage, seen, kind.mark(gradient))


def _selected(
    collector: Collector, used: Callable[[int], bool]
) -> Iterator[tuple[FlatStorage, Visible, int]]:
    """(storage, visible parameter, offset in the chunk) of what is to be bound."""
    plan = collector.plan
    assert plan is not None
    numbers = {(id(t.storage), t.index): t.number for t in collector.targets}
    for k, storage in enumerate(collector.live):
        for seen in storage.visible:
            mine = [numbers[id(storage), i] for i in seen.indices if (id(storage), i) in numbers]
            if any(used(number) for number in mine):
                base = plan.base[k]
                flat = len(seen.indices) > 1 or storage.hidden
                yield storage, seen, base if flat and base is not None else plan.own[k][seen.indices[0]]


def _give(storage: FlatStorage, seen: Visible, gradient: Tensor) -> None:
    parameter = seen.parameter
    gradient = run_gradient_hooks(parameter, gradient)
    if gradient.dtype != parameter.dtype:
        allow_gradient_dtype(parameter, gradient.dtype)
    held = parameter.grad
    if held is None:
        parameter.grad = gradient
    elif held.shape == gradient.shape:
        held.add_(gradient)
    else:
        raise WritebackError(
            "Cannot writeback: .grad has another shape than the sharded parameter", fqn=seen.fqn,
            unit=storage.unit, rank=storage.rank, expected=tuple(gradient.shape), got=tuple(held.shape),
            remedy="Assign a gradient of this rank's rows, or None.",
        )
    run_post_accumulate_hooks(parameter)
