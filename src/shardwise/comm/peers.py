"""Words between the ranks of a group, beside the tensors of training: plans, outcomes, errors.

A group has its own channel for this (gloo, whatever the group trains over), so that a thread in
the background may talk while training goes on.
"""

from __future__ import annotations

import pickle
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import PeerError

__all__ = ["Peers"]

#: how long a rank may be busy, with a large checkpoint say, while the others wait for it
_PATIENCE = timedelta(hours=1)

_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = weakref.WeakKeyDictionary()


class Peers:
    """The ranks that do something together; this process alone where nothing is distributed."""

    def __init__(self, channel: dist.ProcessGroupGloo | None = None) -> None:
        self._channel = channel
        self.rank = 0 if channel is None else channel.rank()
        self.size = 1 if channel is None else channel.size()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Peers:
        """The ranks of ``group`` (None: of the default group, if any). The first call is collective.

        ``new_group`` would need the ranks outside of the group too, or, with local synchronisation, that
        all ranks belong to equally many groups; so the channel is made from the group's own store.
        """
        if group is None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) == 1:
            return cls()
        channel = _CHANNELS.get(group)
        if channel is None:
            store = PrefixStore("shardwise/peers", group.get_group_store())
            channel = _CHANNELS[group] = dist.ProcessGroupGloo(
                store, dist.get_rank(group), dist.get_world_size(group), _PATIENCE)
        return cls(channel)

    def gather(self, word: Any) -> list[Any]:
        """What every rank said, in rank order. Raises ``PeerError`` if one of them is gone."""
        if self._channel is None:
            return [word]
        try:
            return self._gather(self._channel, pickle.dumps(word))
        except RuntimeError as error:
            raise PeerError(
                "a rank of the group died or does not answer", rank=self.rank,
                got=str(error).splitlines()[0], remedy="Look at the output of the other ranks first.",
            ) from error

    def _gather(self, channel: Any, said: bytes) -> list[Any]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        channel.allgather([sizes], [torch.tensor([len(said)])]).wait()
        longest = int(max(size.item() for size in sizes))
        words = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        channel.allgather([words], [mine]).wait()
        return [pickle.loads(word.numpy().tobytes()) for word in words]  # padding is ignored
