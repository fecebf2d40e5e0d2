"""Optimizers that compute with whole parameters make something else of rows, without a word: they are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError
from ..storage.sharded_parameter import is_sharded

__all__ = ["watch_optimizers"]

_WHOLE: frozenset[type[Any]] = frozenset({torch.optim.LBFGS, torch.optim.Muon})  # Adafactor fails by itself, in a norm


def _refuse_rows(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ``ConfigurationError`` if ``optimizer`` needs whole parameters and has rows. Not for classes made of it."""
    if type(optimizer) not in _WHOLE:
        return
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_sharded(p) for p in parameters):
        raise ConfigurationError(
            f"torch.optim.{type(optimizer).__name__} computes with whole parameters, and each rank holds rows",
            expected="an optimizer that treats every element by itself, or every row",
            remedy="Give whole matrices to their owners with shardwise.OwnerExchange, or take another optimizer.",
        )


def watch_optimizers() -> None:
    """Look at each optimizer before its step, whenever and of whatever it was made."""
    register_optimizer_step_pre_hook(_refuse_rows)
