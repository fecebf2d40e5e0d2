"""Every optimizer of the process is looked at once, before its first step with sharded parameters.

Nobody tells the library of an optimizer. What has to be done with one that holds sharded parameters is
registered here by the floors above; afterwards a step costs one look into a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .sharded_parameter import home_of

__all__ = ["adopt", "look_again", "on_adoption"]

Optimizer = torch.optim.Optimizer

#: the number of groups of each optimizer when it was last looked at
_SEEN: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_TO_DO: list[Callable[[Optimizer], None]] = []
_WATCH: list[Any] = []


def on_adoption(action: Callable[[Optimizer], None]) -> None:
    """Call ``action`` with every optimizer that holds sharded parameters, whenever it is looked at."""
    _TO_DO.append(action)


def look_again() -> None:
    """Parameters became sharded: look at every optimizer before its next step."""
    _SEEN.clear()
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if _SEEN.get(optimizer) != len(optimizer.param_groups):
        adopt(optimizer)
        _SEEN[optimizer] = len(optimizer.param_groups)


def adopt(optimizer: Optimizer) -> None:
    """Do with ``optimizer`` what has to be done, if it holds sharded parameters; it may be known already."""
    if any(home_of(parameter) is not None for group in optimizer.param_groups for parameter in group["params"]):
        for action in _TO_DO:
            action(optimizer)
