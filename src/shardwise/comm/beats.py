"""Signs of life between hosts: of a process on its own host a rank can see whether it lives.

Where ranks are on several hosts, each writes a number into the store of the group, again and again, from a thread of
its own, and beside it what it is doing. A rank that is busy goes on doing so; one that is dead, stopped, or behind a
network that is cut does not. A rank that the store itself does not answer sees no number change, so both sides of a
cut notice. The thread has a connection of its own to the store, for another may be waiting in there for long.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch.distributed as dist

from .last_words import introduce, read_all

__all__ = ["Beats"]

#: so many ranks are listened to, beginning with the next one: in a large world all are, by some
_NEIGHBOURS = 16


class Beats:
    """This process's beat, and what it hears. Nothing happens before ``begin``, which is not called on one host."""

    doing: ClassVar[Any] = staticmethod(lambda: "")  #: what to say with each beat; the engine knows more
    _far: ClassVar[frozenset[int]] = frozenset()
    _group: ClassVar[Any] = staticmethod(lambda: None)  #: the default group that all this is for

    @classmethod
    def begin(cls, far: Sequence[int], every_s: float) -> None:
        """Beat every ``every_s`` seconds from now on, as the ranks ``far`` on other hosts do. Cheap when repeated."""
        group = dist.group.WORLD
        assert group is not None
        if cls._group() is group:
            cls._far |= frozenset(far)
        elif far and every_s:
            introduce()
            cls._group, cls._far = weakref.ref(group), frozenset(far)
            store: Any = group.get_group_store()
            store = store.clone()
            threading.Thread(target=_beat, args=(cls._group, store, dist.get_rank(), every_s), daemon=True,
                             name="shardwise-beats").start()

    @classmethod
    def heard(cls, ranks: Sequence[int]) -> dict[int, str]:
        """The last beat of those of ``ranks`` on other hosts, or of the next few; empty if none is to be had."""
        if not cls._far or cls._group() is not dist.group.WORLD:
            return {}
        own = dist.get_rank()
        far = sorted((rank for rank in ranks if rank in cls._far), key=lambda rank: (rank < own, rank))[:_NEIGHBOURS]
        return dict(zip(far, read_all([f"shardwise/beat/{rank}" for rank in far]), strict=True))


def _beat(group: Callable[[], object], store: Any, rank: int, every_s: float) -> None:
    number = 0
    with suppress(RuntimeError, OSError):  # the store is gone
        while (alive := group()) is not None and alive is dist.group.WORLD:
            del alive
            number += 1
            store.set(f"shardwise/beat/{rank}", f"{number} {Beats.doing()}")
            time.sleep(every_s)
