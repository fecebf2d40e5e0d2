"""What a front end sets on a unit, and what of it may change between steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..plan.options import BackwardPrefetch

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Schedule", "Settings", "schedule_for"]


@dataclass(slots=True)
class Schedule:
    """When gathers start ahead of need."""

    backward: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward: bool = False  #: in the order of the last iteration
    limit: bool = True  #: on streams one freed unit's memory may wait for compute; else three
    skips: bool = False  #: ranks may run different units, and agree before each gather; nothing starts ahead


def schedule_for(schedule: Schedule, *, skips: bool) -> Schedule:
    """``schedule``, or one for ranks that may skip units: they gather nothing that they may not need."""
    return replace(schedule, backward=None, forward=False, skips=True) if skips else schedule


@dataclass(slots=True)
class Settings:
    """What may be changed between steps; each field is one public setter."""

    reshard_after_forward: bool = True
    keep_as_root: bool = True  #: a root stays gathered between forward and backward all the same
    reshard_after_backward: bool = True
    sync_gradients: bool = True  #: False: gradients stay on this rank (no_sync)
    all_reduce: bool = True  #: False: reduce in the shard group only
    unshard_in_backward: bool = True  #: False: backward reads none of the parameters
    forward_prefetch: list[Unit] = field(default_factory=list["Unit"])
    backward_prefetch: list[Unit] | None = None  #: None: the order of the forward, reversed
