"""Binding: this rank's chunk of reduced gradients becomes the ``.grad`` of the user's parameters.

The bound gradients are views of one chunk to which the engine keeps no reference, so that
``zero_grad(set_to_none=True)`` frees the memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import WritebackError
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import held_gradient, hold_gradient
from ..torch_private import (
    allow_gradient_dtype,
    gradient_dtype,
    no_gradients,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    with_gradient_hooks,
    without_torch_function,
)
from .collect import Binding, Collector
from .hidden_gradients import drop_zeroed, show_gradients
from .hidden_hooks import run_hidden_hooks, run_hidden_post_hooks
from .reduce import Reduced

__all__ = ["bind"]


def bind(collector: Collector, reduced: Reduced,
         wanted: Callable[[Sequence[int]], bool] | None = None) -> None:
    """Give the parameters whose targets are ``wanted`` (None: all of them) their part of the chunk."""
    bindings = collector.bindings
    if wanted is not None:
        bindings = [binding for binding in bindings if wanted(binding.numbers)]
    parameters = [binding.seen.parameter for binding in bindings]
    with no_gradients():
        sources = _sources(reduced.chunk, collector)
        gradients = [sources[b.storage].as_strided(b.size, b.stride, b.offset) for b in bindings]
        for binding, gradient in zip(bindings, gradients, strict=True):
            gradient.__class__ = binding.kind
            if binding.storage.hidden:
                drop_zeroed(binding.storage)
                run_hidden_hooks(binding.storage, gradient)
        for place in with_gradient_hooks(parameters):
            gradients[place] = _hooked(bindings[place], gradients[place])
        with without_torch_function():
            for binding, parameter, gradient in zip(bindings, parameters, gradients, strict=True):
                if held_gradient(parameter) is not None or gradient.dtype is not gradient_dtype(parameter):
                    _give(binding, gradient)
                else:
                    hold_gradient(parameter, gradient)
        run_post_accumulate_hooks(parameters)
        for binding in bindings:
            if binding.storage.hidden:
                show_gradients(binding.storage)
                run_hidden_post_hooks(binding.storage)


def _sources(chunk: Tensor, collector: Collector) -> dict[FlatStorage, Tensor]:
    """The chunk in the dtype of the gradients of each storage, where its shard lies; converted once for all."""
    converted: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    sources: dict[FlatStorage, Tensor] = {}
    for storage in collector.live:
        shard = storage.shard
        form = (storage.precision.final_dtype(shard.dtype, chunk.dtype), shard.device)
        if form not in converted:
            same = form == (chunk.dtype, chunk.device)
            part = chunk.real.contiguous() if chunk.is_complex() and not form[0].is_complex else chunk
            converted[form] = chunk if same else part.to(dtype=form[0], device=form[1])
        sources[storage] = converted[form]
    return sources


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
