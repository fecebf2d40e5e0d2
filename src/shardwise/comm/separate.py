"""A second transport over the ranks of a group, so that two collectives may run at the same time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from .choose import collectives_for
from .collectives import Collectives

__all__ = ["separate_from"]

#: c10d keeps a group until it is destroyed
_GROUPS: weakref.WeakKeyDictionary[Collectives, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def separate_from(transport: Collectives, device: torch.device) -> Collectives:
    """Another transport over the ranks of ``transport``, made once. The first call is collective there."""
    if transport.size == 1:
        return transport
    group: Any = _GROUPS[transport]() if transport in _GROUPS else None
    if group is None:
        group = dist.new_group(list(transport.members), use_local_synchronization=True)
        _GROUPS[transport] = weakref.ref(group)
    made = collectives_for(group, device)
    made.passes = transport.passes
    return made
