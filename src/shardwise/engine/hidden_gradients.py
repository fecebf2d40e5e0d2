"""Gradients of the parameters behind a flat one, for an optimizer that holds these and not the flat one.

It was made before the model was wrapped. Its parameters show their rows of the shard, so what it needs
is their gradients:

    its first step   it is noticed; from now on its parameters' ``.grad`` are views of the flat gradient
    bind             the views are renewed, as the flat gradient is
    its zero_grad    a parameter without a gradient has its rows of the flat gradient cleared before the
                     next bind adds to them; where that is every parameter, the flat gradient is dropped
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..storage.flat_storage import FLAT, FlatStorage, Visible
from ..storage.optimizer_watch import on_adoption
from ..storage.sharded_parameter import home_of
from ..torch_private import allow_gradient_dtype, without_torch_function

__all__ = ["drop_zeroed", "show_gradient", "show_gradients"]

Optimizer = torch.optim.Optimizer

_ADOPTED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _hidden(optimizer: Optimizer) -> list[tuple[FlatStorage, Visible]]:
    """The optimizer's parameters that stand behind flat ones which it does not hold: those it steps once."""
    homes = [home_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    stepped = {storage for storage, index in filter(None, homes) if index == FLAT}
    return [(storage, storage.hidden[index]) for storage, index in filter(None, homes)
            if storage.hidden and index != FLAT and storage not in stepped]


def _adopt(optimizer: Optimizer) -> None:
    found = _hidden(optimizer)
    if found and optimizer not in _ADOPTED:
        _ADOPTED.add(optimizer)
        optimizer.register_step_pre_hook(_follow)
    for storage, seen in found:
        if seen not in storage.stepped:
            storage.stepped.append(seen)
            show_gradient(storage, seen)


on_adoption(_adopt)


def _follow(optimizer: Optimizer, *_: Any) -> None:
    """What the model has no gradient of (``model.zero_grad()``) is not stepped with."""
    for storage, seen in _hidden(optimizer):
        if storage.visible[0].parameter.grad is None:
            seen.parameter.grad = None


def show_gradient(storage: FlatStorage, seen: Visible) -> None:
    """Let ``.grad`` of a parameter behind a flat one show its rows of the flat gradient."""
    gradient = storage.visible[0].parameter.grad
    if gradient is None or not seen.parameter.requires_grad:
        seen.parameter.grad = None
        return
    with without_torch_function():
        rows = storage.kind.mark(storage.local_view(seen, gradient))
    allow_gradient_dtype(seen.parameter, rows.dtype)
    seen.parameter.grad = rows


def show_gradients(storage: FlatStorage) -> None:
    """The same for all that an optimizer holds."""
    for seen in storage.stepped:
        show_gradient(storage, seen)


def drop_zeroed(storage: FlatStorage) -> None:
    """Before a gradient is added to the flat one: forget what ``zero_grad`` of an optimizer took away."""
    flat = storage.visible[0].parameter
    zeroed = [seen for seen in storage.stepped if seen.parameter.grad is None]
    if flat.grad is None or not zeroed:
        return
    if len(zeroed) == len(storage.hidden):
        flat.grad = None
        return
    with without_torch_function():
        for seen in zeroed:
            storage.local_view(seen, flat.grad).zero_()
