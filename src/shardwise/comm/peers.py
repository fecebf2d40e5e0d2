"""Words between the ranks of a group, beside the tensors of training: plans, outcomes, errors.

A group has its own channel for this (gloo, whatever the group trains over), so that a thread in
the background may talk while training goes on.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from ..errors import PeerError

__all__ = ["Peers"]

_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class Peers:
    """The ranks that do something together; this process alone where nothing is distributed."""

    def __init__(self, channel: dist.ProcessGroup | None) -> None:
        self._channel = channel
        self.rank = 0 if channel is None else dist.get_rank(channel)
        self.size = 1 if channel is None else dist.get_world_size(channel)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Peers:
        """The ranks of ``group`` (None: of the default group, if any). The first call is collective."""
        if group is None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) == 1:
            return cls(None)
        channel = _CHANNELS.get(group)
        if channel is None:
            channel = dist.new_group(
                dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
            assert isinstance(channel, dist.ProcessGroup)
            _CHANNELS[group] = channel
        return cls(channel)

    def gather(self, word: Any) -> list[Any]:
        """What every rank said, in rank order. Raises ``PeerError`` if one of them is gone."""
        if self._channel is None:
            return [word]
        words: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(words, word, group=self._channel)
        except RuntimeError as error:
            raise PeerError(
                "a rank of the group died or does not answer", rank=self.rank,
                got=str(error).splitlines()[0], remedy="Look at the output of the other ranks first.",
            ) from error
        return words
