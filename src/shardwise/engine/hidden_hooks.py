"""Hooks that the user put on parameters which a flat one stands for now.

They get what they would get without it: this rank's rows of the reduced gradient, and after it is
bound a parameter whose ``.grad`` shows them. All are views, so what a hook changes is changed in
the flat parameter and its gradient.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import WritebackError
from ..storage.flat_storage import FlatStorage, Visible
from ..torch_private import (
    NO_HOOKS,
    gradient_hooks,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    without_torch_function,
)
from .hidden_gradients import show_gradient

__all__ = ["run_hidden_hooks", "run_hidden_post_hooks"]


def run_hidden_hooks(storage: FlatStorage, gradient: Tensor) -> None:
    """``register_hook`` functions; what they give back is copied into the flat ``gradient``."""
    for seen in [seen for seen in storage.hidden if gradient_hooks(seen.parameter) != NO_HOOKS]:
        rows = _rows(storage, gradient, seen)
        changed = run_gradient_hooks(seen.parameter, rows)
        if changed.shape != rows.shape:
            raise WritebackError(
                "a hook on a parameter gave back a gradient of another shape", fqn=seen.fqn,
                unit=storage.unit, rank=storage.rank, expected=tuple(rows.shape), got=tuple(changed.shape),
                remedy="A hook gets and gives the reduced gradient of this rank's rows.",
            )
        if changed is not rows:
            rows.copy_(changed)


def run_hidden_post_hooks(storage: FlatStorage) -> None:
    """``register_post_accumulate_grad_hook`` functions; inside, the parameter has a ``.grad``."""
    gradient = storage.visible[0].parameter.grad
    for seen in storage.hidden:
        if gradient is not None and gradient_hooks(seen.parameter)[1]:
            show_gradient(storage, seen)
            run_post_accumulate_hooks([seen.parameter])
            if seen not in storage.stepped:
                seen.parameter.grad = None


def _rows(storage: FlatStorage, gradient: Tensor, seen: Visible) -> Tensor:
    with without_torch_function():
        return storage.kind.mark(storage.local_view(seen, gradient))
