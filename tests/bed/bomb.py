"""A piece of a graph whose backward fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bomb"]


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ctx.error


def bomb(x: Tensor, error: Exception) -> Tensor:
    """``x``, whose gradient raises ``error``."""
    return _Bomb.apply(x, error)
