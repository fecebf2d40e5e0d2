"""The arguments of save and load: which are easily mixed up, and what ranks must give alike."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..comm.peers import Peers
from ..errors import CheckpointError, OptionTypeError
from .adoption import adopt
from .together import together

__all__ = ["adopt_alike", "require_path_and_model"]


def adopt_alike(peers: Peers, optimizer: torch.optim.Optimizer | None, doing: str) -> None:
    """Let shardwise know ``optimizer``. Raises ``CheckpointError`` on all ranks unless all have one, or none has."""
    with together(peers, doing) as words:
        if optimizer is not None:
            if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise CheckpointError("this is no optimizer", got=type(optimizer).__name__)
            adopt(optimizer)
        words.mine = optimizer is not None
    if len(set(words.all)) > 1:
        raise CheckpointError(f"{doing} failed", expected="an optimizer on every rank, or on none",
                              got=f"one on ranks {[rank for rank, has in enumerate(words.all) if has]}")


def require_path_and_model(call: str, path: Any, model: Any) -> None:
    """Raise ``OptionTypeError`` unless ``path`` is one and ``model`` is a module."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(model, nn.Module):
        raise OptionTypeError(
            f"{call} takes a path and a model", expected=f"{call}(path, model, optimizer)",
            got=f"{type(path).__name__}, {type(model).__name__}",
            remedy="Give the model itself, not its state dict; what else belongs to the run goes into extra.")
