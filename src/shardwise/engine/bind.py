"""Binding: this rank's chunk of reduced gradients becomes the ``.grad`` of the user's parameters.

The bound gradients are views of one chunk to which the engine keeps no reference, so that
``zero_grad(set_to_none=True)`` frees the memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import WritebackError
from ..torch_private import (
    allow_gradient_dtype,
    no_gradients,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    without_torch_function,
)
from .collect import Binding, Collector
from .reduce import Reduced

__all__ = ["bind"]


def bind(collector: Collector, reduced: Reduced,
         wanted: Callable[[Sequence[int]], bool] | None = None) -> None:
    """Give the parameters whose targets are ``wanted`` (None: all of them) their part of the chunk."""
    chunk = reduced.chunk
    converted: dict[tuple[torch.dtype, torch.device], Tensor] = {(chunk.dtype, chunk.device): chunk}
    chosen: list[tuple[Binding, Tensor]] = []
    with no_gradients():
        for binding in collector.bindings:
            if wanted is not None and not wanted(binding.numbers):
                continue
            storage, seen = binding.storage, binding.seen
            shard = storage.shard
            form = (storage.precision.final_dtype(shard.dtype, chunk.dtype), shard.device)
            source = converted.get(form)
            if source is None:
                source = converted[form] = chunk.to(dtype=form[0], device=form[1])
            gradient = storage.kind.mark(source.as_strided(seen.size, seen.stride, binding.offset))
            chosen.append((binding, _hooked(binding, gradient)))
        with without_torch_function():
            for binding, gradient in chosen:
                _give(binding, gradient)
        for binding, _ in chosen:
            run_post_accumulate_hooks(binding.seen.parameter)


def _hooked(binding: Binding, gradient: Tensor) -> Tensor:
    """What the user's hooks make of ``gradient``; it is this rank's part of a whole all the same."""
    changed = run_gradient_hooks(binding.seen.parameter, gradient)
    if changed is gradient:
        return gradient
    if changed.shape != gradient.shape:
        raise WritebackError(
            "a hook on a parameter gave back a gradient of another shape", fqn=binding.seen.fqn,
            unit=binding.storage.unit, rank=binding.storage.rank, expected=tuple(gradient.shape),
            got=tuple(changed.shape),
            remedy="A hook gets and gives the reduced gradient of this rank's rows.",
        )
    return binding.storage.kind.mark(changed.detach())


def _give(binding: Binding, gradient: Tensor) -> None:
    storage, seen = binding.storage, binding.seen
    parameter = seen.parameter
    held = parameter.grad
    if held is None:
        if gradient.dtype is not storage.shard.dtype or storage.precision is not storage.policy:
            allow_gradient_dtype(parameter, gradient.dtype)
        parameter.grad = gradient
    elif held.shape == gradient.shape:
        held.add_(gradient)
    else:
        raise WritebackError(
            "Cannot writeback: .grad has another shape than the sharded parameter", fqn=seen.fqn,
            unit=storage.unit, rank=storage.rank, expected=tuple(gradient.shape), got=tuple(held.shape),
            remedy="Assign a gradient of this rank's rows, or None.",
        )
