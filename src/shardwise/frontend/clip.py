"""One gradient clipping for everything: sharded, replicated, offloaded, of mixed dtypes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..comm.errands import Errand
from ..errors import ConfigurationError, ShardwiseError
from ..storage.global_norm import combine_norms

__all__ = ["clip_grad_norm", "clip_grad_value", "total_norm"]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]


@torch.no_grad()
@Errand("clip_grad_norm_")
def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The ``norm_type``-norm of all gradients as one vector, over all ranks; 0-d, a collective.

    Norms are taken in fp32 at least.
    """
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    return combine_norms(norms, norm_type)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm over all ranks is at most ``max_norm``.

    Returns the norm before scaling, in the gradients' widest dtype. ``norm_type``: any p > 0, or
    inf. Raises ``ShardwiseError`` for a non-finite norm if ``error_if_nonfinite``; gradients are
    untouched then.
    """
    if not norm_type > 0:
        raise ConfigurationError("the norm type must be positive", expected="p > 0 or inf", got=norm_type)
    gradients = _gradients(parameters)
    if not gradients:
        warnings.warn("shardwise: clip_grad_norm_ found no gradients and returns a zero norm", stacklevel=3)
        return torch.tensor(0.0)
    norm = total_norm(gradients, norm_type)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise ShardwiseError(
            f"the total norm of order {norm_type} of the gradients is not finite", expected="a finite norm",
            got=float(norm), remedy="Look for the first non-finite loss, or skip the step.",
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    widest = gradients[0].dtype
    for gradient in gradients[1:]:
        widest = torch.promote_types(widest, gradient.dtype)
    return norm.to(widest)


@torch.no_grad()
def clip_grad_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]``; no collective."""
    for gradient in _gradients(parameters):
        gradient.clamp_(-clip_value, clip_value)
