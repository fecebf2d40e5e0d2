"""An optimizer's ``zero_grad`` forgets what was added up unsent as well, as it does where gradients are not sharded.

Torch tells nobody of ``zero_grad``, so an optimizer that was noticed, at its first step, gets one that looks for
unsent gradients of its own parameters after torch's.
"""

from __future__ import annotations

import weakref

import torch

from ..plan.lifecycle import Pass
from ..storage.flat_storage import FLAT
from ..storage.sharded_parameter import home_of
from .build import session_of
from .replan import forget, holds_gradients
from .settling import settle_unit
from .unit import Unit

__all__ = ["ZeroGrad", "watch_zero_grad"]


class ZeroGrad:
    """The ``zero_grad`` of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.units: weakref.WeakSet[Unit] = weakref.WeakSet()

    def __call__(self, set_to_none: bool = True) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        type(optimizer).zero_grad(optimizer, set_to_none)
        holding = [unit for unit in self.units if holds_gradients(unit)]
        if holding:
            held = {home for group in optimizer.param_groups for home in map(home_of, group["params"])}
            for unit in holding:
                settle_unit(unit)
                session = session_of(unit)
                if session is not None and session.pass_ is Pass.REST:
                    targets = unit.collector.targets
                    mine = [t for t in targets if not held.isdisjoint({(t.storage, t.index), (t.storage, FLAT)})]
                    if len(mine) == len(targets):
                        unit.forget_unsent()
                    else:
                        forget(unit, mine)


def watch_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` a ``zero_grad`` that looks for unsent gradients, or tell the one it has of new units."""
    zero = vars(optimizer).setdefault("zero_grad", ZeroGrad(optimizer))
    if isinstance(zero, ZeroGrad):
        homes = [home_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        owners = [Unit.owning(storage) for storage, _ in filter(None, homes)]
        zero.units.update(unit for unit in owners if unit is not None)

