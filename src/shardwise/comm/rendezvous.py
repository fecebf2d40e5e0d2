"""How ranks of one host come to share memory: who is there, and their file descriptors.

The process group is used for two small exchanges of objects only. Descriptors travel over
abstract Unix sockets, which leave no file behind. Every verdict is made from what all ranks
said, so all ranks succeed or all raise ``SharedMemoryUnavailable``.
"""

from __future__ import annotations

import os
import socket
import struct
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import CommunicationError, PeerError
from .agreement import LOOK_THERE
from .arena import Arena, Segment
from .last_words import lost

__all__ = ["Offer", "Peer", "SharedMemoryUnavailable", "host_name", "hosts_of", "meet"]

_PATIENCE_S = 30.0
_T = TypeVar("_T")


class SharedMemoryUnavailable(CommunicationError):
    """These ranks cannot share memory: ``what`` is why. ``one_host``: it is not by their place."""

    def __init__(self, what: str, *, one_host: bool) -> None:
        super().__init__(what, remedy="The process group carries the data instead; it is slower.")
        self.what, self.one_host = what, one_host


class Peer(NamedTuple):
    """Another rank of the group, or this one."""

    rank: int
    pid: int
    segment: Segment
    #: where in the segment the rank's control block is
    control: int
    #: written to wake the rank; an eventfd
    bell: int
    #: becomes readable when the process ends; -1 for this rank
    life: int


class Offer(NamedTuple):
    """What this rank brings: its memory and the place of its control block, or why it has none."""

    arena: Arena | None
    control: int
    problem: str | None = None


class _Card(NamedTuple):
    host: str
    pid: int
    address: str
    capacity: int
    control: int
    problem: str | None


def meet(group: dist.ProcessGroup, offer: Offer) -> list[Peer]:
    """Exchange memory with all ranks of ``group``. Collective."""
    rank = dist.get_rank(group)
    members = dist.get_process_group_ranks(group)
    address, bell, problem, host = f"shardwise-{uuid.uuid4().hex}", -1, offer.problem, ""
    arena, peers = offer.arena, list[Peer]()
    with ExitStack() as kept, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            host = host_name()
            listener.bind(b"\0" + address.encode())
            listener.listen(len(members))
            listener.settimeout(_PATIENCE_S)
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            kept.callback(os.close, bell)
        except OSError as error:
            problem = problem or str(error)
        capacity = arena.segment.capacity if arena else 0
        cards = _exchange(group, _Card(host, os.getpid(), address, capacity, offer.control, problem))
        _require_success([card.problem for card in cards], members)
        _require_one_host(cards, members)
        assert arena is not None
        own = Peer(members[rank], os.getpid(), arena.segment, offer.control, bell, -1)
        try:
            connections = kept.enter_context(ExitStack())
            towards = _connect(cards, rank, connections)
            _serve(listener, {card.pid for card in cards}, len(towards), (arena.descriptor, bell))
            peers = [_receive(card, members[place], towards[place], kept) if place in towards else own
                     for place, card in enumerate(cards)]
            connections.close()
        except (OSError, ValueError, CommunicationError) as error:
            problem = str(error) or type(error).__name__
        _require_success(_exchange(group, problem), members)
        kept.pop_all()
    return peers


def _connect(cards: Sequence[_Card], rank: int, connections: ExitStack) -> dict[int, socket.socket]:
    """A connection to every peer. It waits in the peer's queue, so no order can block."""
    towards: dict[int, socket.socket] = {}
    for place, card in enumerate(cards):
        if place != rank:
            towards[place] = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            towards[place].settimeout(_PATIENCE_S)
            towards[place].connect(b"\0" + card.address.encode())
    return towards


def _serve(listener: socket.socket, known: set[int], visitors: int, descriptors: tuple[int, int]) -> None:
    """Give this rank's descriptors to every peer, and to nobody else: the address is open to all."""
    served = 0
    while served < visitors:
        visitor, _ = listener.accept()
        with visitor:
            if _pid_of(visitor) in known:
                socket.send_fds(visitor, [b"."], list(descriptors))
                served += 1


def _receive(card: _Card, rank: int, connection: socket.socket, kept: ExitStack) -> Peer:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    if len(descriptors) != 2:
        raise CommunicationError("a peer sent no memory", rank=rank, expected="2 descriptors",
                                 got=len(descriptors))
    memory, bell = descriptors
    kept.callback(os.close, bell)
    try:
        segment = Segment(memory, card.capacity)
    finally:
        os.close(memory)
    life = os.pidfd_open(card.pid)
    kept.callback(os.close, life)
    return Peer(rank, card.pid, segment, card.control, bell, life)


def _pid_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def host_name() -> str:
    """The same text exactly where processes can see each other, their sockets and their memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([boot, *spaces, str(os.getuid())])


def hosts_of(group: dist.ProcessGroup) -> list[str]:
    """The host of every rank of ``group``, in rank order. Collective."""
    return _exchange(group, host_name())


def _exchange(group: dist.ProcessGroup, value: _T) -> list[_T]:
    values: list[_T | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        members = dist.get_process_group_ranks(group)
        who, words = lost(members, error)
        raise PeerError(f"{who} while ranks {', '.join(map(str, members))} came together{words}",
                        remedy=LOOK_THERE) from error
    return values  # type: ignore[return-value]


def _require_one_host(cards: Sequence[_Card], members: Sequence[int]) -> None:
    for card, rank in zip(cards, members, strict=True):
        if card.host != cards[0].host:
            raise SharedMemoryUnavailable(
                f"ranks {members[0]} and {rank} are on different hosts or in different containers",
                one_host=False)


def _require_success(problems: Sequence[str | None], members: Sequence[int]) -> None:
    met = [f"rank {rank}: {problem}" for rank, problem in zip(members, problems, strict=True) if problem]
    if met:
        raise SharedMemoryUnavailable(f"shared memory could not be set up ({'; '.join(met)})", one_host=True)
