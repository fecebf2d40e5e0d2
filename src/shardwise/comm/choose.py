"""Which transport a process group gets."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from .collectives import Collectives
from .process_group import ProcessGroupCollectives

__all__ = ["close_all", "collectives_for"]

_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives] = weakref.WeakKeyDictionary()


def collectives_for(
    group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool | None = None
) -> Collectives:
    """The transport for ``group``, made once for each group."""
    found = _cache.get(group)
    if found is None:
        found = _cache[group] = ProcessGroupCollectives(group)
    return found


def close_all() -> None:
    """Close every transport of this process. Safe at any time, and twice."""
    while _cache:
        _, collectives = _cache.popitem()
        collectives.close()
