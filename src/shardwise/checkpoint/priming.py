"""State of an optimizer that never stepped, so that a checkpoint has somewhere to be read into."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["primed"]


@contextmanager
def primed(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Within this context an optimizer without state has the state of one that is about to begin.

    It is made by a step on zero gradients, with learning rates of zero and ``step`` set back to
    0. Parameters, gradients and options stay as they are, and the state is gone afterwards.
    """
    if optimizer.state:
        yield
        return
    _step_on_zeros(optimizer)
    for values in optimizer.state.values():
        step = values.get("step")
        if step is not None:
            values["step"] = torch.zeros_like(step) if isinstance(step, Tensor) else type(step)(0)
    try:
        yield
    finally:
        optimizer.state.clear()


def _step_on_zeros(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    held = [(p, p.grad, p.detach().clone()) for p in parameters]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter.detach())
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        type(optimizer).step(optimizer)  # not through what a scheduler put in front of it
    finally:
        for group, rate in rates:
            group["lr"] = rate
        with torch.no_grad():
            for parameter, gradient, value in held:
                parameter.copy_(value)
                parameter.grad = gradient
