"""Comparing what ranks are about to run, where that is not done anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..engine.build import units_below
from ..errors import LifecycleError

__all__ = ["check_order"]


@contextmanager
def check_order(model: nn.Module) -> Iterator[None]:
    """Inside, ranks compare each collective of ``model`` before it runs, on accelerators too.

    Ranks that run different units then raise ``DivergenceError``, all of them, with units and ranks,
    instead of waiting for each other. On CPU ranks that is always so. On NCCL it costs a small
    gather for each collective, for which the host waits: for a search, not for every day.
    Every rank enters and leaves it at the same place.
    """
    comms = {comm for _, unit in units_below(model) for comm in unit.groups.nontrivial}
    if not units_below(model):
        raise LifecycleError("the model has no sharded units", unit=type(model).__name__,
                             remedy="Apply fully_shard or FullyShardedDataParallel first.")
    for comm in comms:
        comm.compare_calls(True)
    try:
        yield
    finally:
        for comm in comms:
            comm.compare_calls(False)
