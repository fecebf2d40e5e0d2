"""A second transport over the ranks of a group, so that two collectives may run at the same time."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from .choose import collectives_for
from .collectives import Collectives

__all__ = ["separate_from"]

_GROUPS: weakref.WeakKeyDictionary[Collectives, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def separate_from(transport: Collectives, device: torch.device) -> Collectives:
    """Another transport over the ranks of ``transport``, made once. The first call is collective there."""
    if transport.size == 1:
        return transport
    if transport not in _GROUPS:
        _GROUPS[transport] = dist.new_group(list(transport.members), use_local_synchronization=True)  # pyright: ignore[reportArgumentType]
    made = collectives_for(_GROUPS[transport], device)
    made.passes = transport.passes
    return made
