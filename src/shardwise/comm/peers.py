"""Words between the ranks of a group, beside the tensors of training: plans, outcomes, errors.

A group has its own channel for this (gloo, whatever the group trains over), so that a thread in
the background may talk while training goes on.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
)

from ..errors import DivergenceError, PeerError
from ..torch_private import group_timeout
from .agreement import LOOK_THERE
from .crossing import Crossing, closed
from .errands import in_errand
from .last_words import introduce, lost
from .rendezvous import host_name
from .vigil import Signs, begin_beats, lost_after

__all__ = ["Peers"]

#: how long a rank may be busy, with a large checkpoint say, while the others wait for it
_PATIENCE = timedelta(hours=1)

_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


class Peers:
    """The ranks that do something together; this process alone where nothing is distributed."""

    def __init__(self, rank: int = 0, members: Sequence[int] = (0,), limit_s: float = 0.0, store: Any = None,
                 name: str = "") -> None:
        self.rank, self.size = rank, len(members)
        self.members = tuple(members)  #: their global ranks, in the order of the group
        self._limit_s, self._store, self._name = limit_s, store, name  # no store: of a rank alone
        self._channel: Any = None
        self._generation = 0  #: of the channel: another one comes after a wait that was given up

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Peers:
        """The ranks of ``group`` (None: of the default group, if any). The first call is collective.

        ``new_group`` would need the ranks outside of the group too, or, with local synchronisation, that
        all ranks belong to equally many groups; so the channel is made from the group's own store.
        """
        if group is None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) == 1:
            return cls() if group is None else cls(members=dist.get_process_group_ranks(group))
        members, limit_s = dist.get_process_group_ranks(group), group_timeout(group, torch.device("cpu"))
        if group not in _CHANNELS:
            introduce()
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may hold addresses of an earlier one
            store = PrefixStore(f"shardwise/peers/{start}", group.get_group_store())
            peers = cls(dist.get_rank(group), members, limit_s, store, f"{group.group_name} {start}")
            with peers._joined():
                _CHANNELS[group] = peers
            names = peers.gather(_here())
            begin_beats(dict(zip(members, names, strict=True)), limit_s)
        return _CHANNELS[group]

    def gather(self, word: Any) -> list[Any]:
        """What every rank said, in rank order. Raises ``PeerError`` if one of them is gone."""
        if self._store is None:
            return [word]
        with self._joined() as channel:
            return self._gather(channel, pickle.dumps(word))

    def tell(self, word: Any, source: int) -> Any:
        """The ``word`` of rank ``source`` of the group, on every rank. Raises ``PeerError`` if one of them is gone."""
        if self._store is None:
            return word
        said = pickle.dumps(word) if self.rank == source else b""
        size = torch.tensor([len(said)])
        with self._joined() as channel:
            self._broadcast(channel, size, source)
            words = torch.empty(int(size.item()), dtype=torch.uint8)
            if said:
                words.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
            self._broadcast(channel, words, source)
        return pickle.loads(words.numpy().tobytes())

    def all_to_all(self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send ``sent[r]`` elements of ``full`` to rank ``r``, in order; ``received[r]`` of ``out`` come from there.

        1-D, in host memory, of one dtype. Raises ``PeerError`` if a rank is gone.
        """
        if self._store is None:
            out.copy_(full)
            return
        options = AllToAllOptions()
        options.timeout = _PATIENCE
        with self._joined() as channel:
            self._wait(channel.alltoall_base(out, full, list(received), list(sent), options))

    def _broadcast(self, channel: Any, tensor: Tensor, source: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, _PATIENCE
        self._wait(channel.broadcast([tensor], options))

    @contextmanager
    def _joined(self) -> Generator[Any]:
        """The channel. In one where a rank waits no longer, what it said would be taken for what it says now."""
        try:
            while closed(self._place):
                self._channel, self._generation = None, self._generation + 1
            if self._channel is None:
                store = PrefixStore(str(self._generation), self._store)
                _muster(store, self.members, self._limit_s, self._place)
                self._channel = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self._limit_s))
            yield self._channel
        except (PeerError, DivergenceError):
            raise
        except RuntimeError as error:
            raise _lost(self.members, error) from error

    @property
    def _place(self) -> str:
        return f"words of {self.members} in {self._name}, {self._generation}"

    def _gather(self, channel: Any, said: bytes) -> list[Any]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(channel.allgather([sizes], [torch.tensor([len(said)])], _patient()))
        longest = int(max(size.item() for size in sizes))
        words = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        self._wait(channel.allgather([words], [mine], _patient()))
        return [pickle.loads(word.numpy().tobytes()) for word in words]  # padding is ignored

    def _wait(self, work: Any) -> None:
        """A rank may be busy for long; but look whether it lives."""
        signs, limit_s = Signs(), min(lost_after() or self._limit_s, self._limit_s)
        crossing = _crossing(self._place)
        while True:
            try:
                work.wait(timedelta(seconds=min(limit_s / 16, 1.0)))
                return
            except RuntimeError as error:
                try:
                    crossing.look(self.members)
                except DivergenceError:
                    _keep(self._channel, work)
                    raise
                if work.is_completed():
                    raise
                if lost := signs.lost(self.members, limit_s):
                    _keep(self._channel, work)
                    raise _lost(self.members, error, lost) from error


def _crossing(place: str) -> Crossing:
    return Crossing(place, f"an exchange of words{in_errand() or ', as a checkpoint needs it'}", once=True)


def _muster(store: Any, members: Sequence[int], limit_s: float, place: str) -> None:
    """Wait until all ranks want a channel, for gloo looks at nobody while it connects."""
    keys = {rank: f"here/{rank}" for rank in members}
    store.set(keys[dist.get_rank()], "")
    signs, crossing, pause = Signs(), _crossing(place), 0.001
    began = look = time.monotonic()
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        time.sleep(pause)
        pause, now = min(2 * pause, 0.05), time.monotonic()
        if now - look >= min((lost_after() or limit_s) / 16, 1.0):
            look = now
            crossing.look(missing)
            lost = signs.lost(missing, min(lost_after() or limit_s, limit_s))
            if not lost and now - began > limit_s:
                lost = dict.fromkeys(missing, f"did not come within {limit_s:g} s")
            if lost:
                raise _lost(members, TimeoutError("while ranks meet for a checkpoint or the like"), lost)


def _keep(*things: object) -> None:
    """Keep ``things`` until the process ends: a frame of a daemon thread is never taken down.

    A channel that is destroyed waits for what is under way, with our patience of an hour, so the
    interpreter would not end; and gloo does nothing when it is told to abort.
    """
    def hold(*_: object) -> None:
        threading.Event().wait()

    threading.Thread(target=hold, args=things, daemon=True, name="shardwise-kept").start()


def _here() -> str:
    with suppress(OSError):
        return host_name()
    return socket.gethostname()


def _patient() -> Any:
    options = AllgatherOptions()
    options.timeout = _PATIENCE
    return options


def _lost(members: Sequence[int], error: Exception, seen: Mapping[int, str] | None = None) -> PeerError:
    who, words = lost(members, error, seen)
    return PeerError(who + words, remedy=LOOK_THERE)
