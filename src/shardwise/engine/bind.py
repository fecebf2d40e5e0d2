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
from ..storage.writeback import take_over_edits
from ..torch_private import (
    NO_HOOKS,
    allow_gradient_dtype,
    gradient_dtype,
    gradient_hooks,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    without_torch_function,
)
from .collect import Collector
from .hidden_gradients import drop_zeroed, show_gradients
from .hidden_hooks import run_hidden_hooks, run_hidden_post_hooks
from .reduce import Reduced
from .targets import Binding

__all__ = ["bind"]


def bind(collector: Collector, reduced: Reduced,
         wanted: Callable[[Sequence[int]], bool] | None = None) -> None:
    """Give the parameters whose targets are ``wanted`` (None: all of them) their part of the chunk.

    To be called without grad mode.
    """
    peculiar: list[tuple[Binding, Tensor]] = []  # more is to be done than to give the parameter its gradient
    for storage in collector.live:
        if storage.hidden:  # before a step of the flat parameter, which would be lost
            take_over_edits(storage)
    sources = _sources(reduced.chunk, collector)
    with without_torch_function():
        for cut in collector.cuts:
            pieces = cut.pieces(sources[cut.storage])
            for number, binding, size, stride in cut.rows:
                if wanted is not None and not wanted(binding.numbers):
                    continue
                gradient = pieces[number]
                if size is not None:
                    gradient = (gradient.view(size) if stride is None else
                                gradient.as_strided(size, stride, gradient.storage_offset())).data  # no view
                gradient.__class__ = binding.kind
                parameter = binding.seen.parameter
                if (held_gradient(parameter) is not None or gradient.dtype is not gradient_dtype(parameter)
                        or gradient_hooks(parameter) != NO_HOOKS or binding.storage.hidden):
                    peculiar.append((binding, gradient))
                else:
                    _hold(binding, gradient)
    if peculiar:
        _bind_with_care(peculiar)


def _hold(binding: Binding, gradient: Tensor) -> None:
    try:
        hold_gradient(binding.seen.parameter, gradient)
    except RuntimeError:  # another shape: a whole value was assigned after the forward
        take_over_edits(binding.storage)
        hold_gradient(binding.seen.parameter, gradient)


def _bind_with_care(pairs: Sequence[tuple[Binding, Tensor]]) -> None:
    """For what has hooks of the user's, a gradient already, another dtype, or parameters behind it."""
    hidden = [(binding.storage, gradient) for binding, gradient in pairs if binding.storage.hidden]
    for storage, gradient in hidden:
        drop_zeroed(storage)
        run_hidden_hooks(storage, gradient)
    pairs = [(binding, _hooked(binding, gradient)) for binding, gradient in pairs]
    with without_torch_function():
        for binding, gradient in pairs:
            _give(binding, gradient)
    run_post_accumulate_hooks([binding.seen.parameter for binding, _ in pairs])
    for storage, _ in hidden:
        show_gradients(storage)
        run_hidden_post_hooks(storage)


def _sources(chunk: Tensor, collector: Collector) -> dict[FlatStorage, Tensor]:
    """The chunk in the dtype of the gradients of each storage, where its shard lies; converted once for all."""
    converted: dict[tuple[torch.dtype, torch.device], Tensor] = {(chunk.dtype, chunk.device): chunk}
    sources: dict[FlatStorage, Tensor] = {}
    for storage in collector.live:
        shard = storage.shard
        form = storage.precision.final_dtype(shard.dtype, chunk.dtype), shard.device
        if form not in converted:
            part = chunk.real.contiguous() if chunk.is_complex() and not form[0].is_complex else chunk
            converted[form] = part.to(dtype=form[0], device=form[1])
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
        if gradient.dtype is not gradient_dtype(parameter):
            allow_gradient_dtype(parameter, gradient.dtype)
        hold_gradient(parameter, gradient)
    elif held.shape == gradient.shape:
        held.add_(gradient)
    else:
        raise WritebackError(
            "Cannot writeback: .grad has another shape than the sharded parameter", fqn=seen.fqn,
            unit=storage.unit, rank=storage.rank, expected=tuple(gradient.shape), got=tuple(held.shape),
            remedy="Assign a gradient of this rank's rows, or None.",
        )
