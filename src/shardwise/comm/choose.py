"""Which transport a process group gets, and who keeps it.

Transports are made once for each group and kept as long as the group lives: c10d keeps its
groups until ``destroy_process_group``. Making one is collective, so its life must not hang on
when a rank's garbage collector runs.
"""

from __future__ import annotations

import sys
import warnings
import weakref

import torch
import torch.distributed as dist

from ..errors import ConfigurationError
from ..torch_private import group_timeout
from .arena import Arena
from .collectives import Collectives
from .hierarchical import HierarchicalCollectives, hosts_in_order
from .last_words import introduce
from .matched import MatchedCollectives
from .process_group import ProcessGroupCollectives, backends_by_device
from .rendezvous import SharedMemoryUnavailable, hosts_of
from .shared_memory import SharedMemoryCollectives
from .simulated import SimulatedCollectives
from .vigil import begin_beats, lost_after

__all__ = ["close_all", "collectives_for"]

_REMEDY = "Pass shared_memory=None to let shardwise choose."


class _Kept:
    """The transports of this process, and the shared memory that its groups have in common."""

    def __init__(self) -> None:
        self.by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[bool | None, str], Collectives]] = (
            weakref.WeakKeyDictionary())
        self.arena: Arena | None = None


_kept = _Kept()


def collectives_for(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    shared_memory: bool | None = None,
    timeout_s: float | None = None,
) -> Collectives:
    """The transport for tensors on ``device`` in ``group``. The first call for a group is collective.

    ``shared_memory``: None takes it where it can work (CPU tensors, gloo, all ranks on one host, or
    equally many neighbours on each of several) and falls back to the process group, with one
    warning if it cannot be set up on one host; True demands it, on one host; False never takes it.
    All ranks give the same value. ``timeout_s``: how long shared memory waits for a rank (None: as
    long as the group does).
    """
    obstacle = "it was refused" if shared_memory is False else _obstacle(group, device)
    if shared_memory and obstacle:
        raise ConfigurationError(f"shared memory cannot carry this group ({obstacle})", remedy=_REMEDY)
    choice = None if obstacle else bool(shared_memory)
    if group not in _kept.by_group:
        _kept.by_group[group] = {}
        weakref.finalize(group, _close, _kept.by_group[group], "its process group was destroyed").atexit = False
    transports, key = _kept.by_group[group], (choice, device.type)
    if key not in transports:
        introduce()
        lost_after()  # a wrong setting shall be an error now
        transports[key] = (_process_group(group, device) if obstacle
                           else _shared(group, timeout_s, required=bool(shared_memory)))
    return transports[key]


def _process_group(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """The collectives of ``group``; on torch's ``fake`` backend, which sends nothing, our own that sends nothing."""
    if dist.get_backend(group) == "fake":
        ranks = dist.get_process_group_ranks(group)
        return SimulatedCollectives(dist.get_rank(group), len(ranks), ranks)
    if device.type == "cpu" and backends_by_device(group).get("cpu") == "gloo":
        return MatchedCollectives(group)
    return ProcessGroupCollectives(group)


def close_all() -> None:
    """Close every transport of this process. Safe at any time, and twice."""
    while _kept.by_group:
        _, transports = _kept.by_group.popitem()
        _close(transports, "it was closed")
    _kept.arena = None


def _close(transports: dict[tuple[bool | None, str], Collectives], why: str) -> None:
    """A model may keep transports after their group, until the garbage collector finds it."""
    while transports:
        transports.popitem()[1].close(why)


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why shared memory is out of the question; the same answer on every rank, without asking them."""
    if device.type != "cpu":
        return f"its tensors are on {device.type}"
    if dist.get_world_size(group) == 1:
        return "it has one rank"
    if (backend := backends_by_device(group).get("cpu")) != "gloo":
        return f"its CPU backend is {backend}"
    return None if sys.platform == "linux" else f"the system is {sys.platform}"


def _shared(group: dist.ProcessGroup, timeout_s: float | None, *, required: bool) -> Collectives:
    if timeout_s is None:
        timeout_s = group_timeout(group, torch.device("cpu"))
    try:
        made = SharedMemoryCollectives(group, _kept.arena, timeout_s=timeout_s)
    except SharedMemoryUnavailable as error:
        if required:
            raise ConfigurationError(error.what, remedy=_REMEDY) from error
        if not error.one_host:
            return _across_hosts(group, timeout_s)
        if dist.get_rank(group) == 0:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        return MatchedCollectives(group)
    _kept.arena = made.arena
    return made


def _across_hosts(group: dist.ProcessGroup, timeout_s: float) -> Collectives:
    """Shared memory inside the hosts, where that leaves less for the network; else the process group."""
    names = hosts_of(group)
    begin_beats(dict(zip(dist.get_process_group_ranks(group), names, strict=True)), timeout_s)
    hosts = hosts_in_order(names)
    if hosts is None or hosts == len(names):
        return MatchedCollectives(group)
    try:
        made = HierarchicalCollectives(group, hosts, _kept.arena, timeout_s=timeout_s)
    except SharedMemoryUnavailable:
        return MatchedCollectives(group)
    _kept.arena = made.arena
    return made
