"""What ranks know of each other beside the collectives: for the message when one of them is lost.

Each rank writes into the store of the default group who it is, and, when an exception ends it, its
last words. A survivor reads them, and looks whether a process of its own host is gone or stopped.
The store may be gone or stopped too (it often lives in rank 0), so nothing here is waited for
longer than a moment, and whatever cannot be learnt is left out.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist

from ..errors import PeerError

__all__ = ["absent", "introduce", "lost", "read", "read_all", "remember", "shortly", "show", "tell", "words_of"]

_MOMENT_S = 2.0
_LONGEST = 500
_STATES = {"T": "is stopped", "t": "is stopped", "Z": "died", "X": "died"}
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _Kept:
    group: ClassVar[Any] = staticmethod(lambda: None)  #: the default group; weak, for its store is free with it
    rank = 0
    cards: ClassVar[dict[int, tuple[str, int]]] = {}  #: host and process of those that were looked up
    before: _Hook | None = None  #: the hook that was there
    waiting: threading.Thread | None = None  #: for a store that did not answer in a moment


def introduce() -> None:
    """Tell the other ranks who this one is, and keep its last words for them. Cheap when repeated."""
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    assert group is not None
    if _Kept.group() is group:
        return
    _Kept.group, _Kept.rank = weakref.ref(group), dist.get_rank()
    _Kept.cards.clear()
    show(f"shardwise/rank/{_Kept.rank}", json.dumps([_host(), os.getpid()]))
    if _Kept.before is None:
        _Kept.before, sys.excepthook = sys.excepthook, _last_words


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, PeerError):  # a survivor has nothing new to say
        show(f"shardwise/words/{_Kept.rank}", f"{kind.__name__}: {error}"[:_LONGEST])
    assert _Kept.before is not None
    _Kept.before(kind, error, trace)


def tell(key: str, line: str) -> None:
    """Put ``line`` after what any rank has told under ``key``."""
    if (store := _store()) is not None:
        shortly(lambda: store.append(key, line))


def show(key: str, text: str) -> None:
    """Let ``text`` be what is told under ``key``."""
    if (store := _store()) is not None:
        shortly(lambda: store.set(key, text))


def words_of(ranks: Iterable[int]) -> str:
    """``; rank 1 raised ValueError: …`` for those of ``ranks`` that said something, or nothing."""
    said = {rank: text for rank in ranks if (text := read(f"shardwise/words/{rank}"))}
    return "".join(f"; rank {rank} raised {text}" for rank, text in said.items())


def absent(ranks: Iterable[int]) -> dict[int, str]:
    """Which of ``ranks`` are on this host and died or are stopped, and which of the two."""
    found: dict[int, str] = {}
    for rank in ranks:
        if rank != _Kept.rank and (card := _card(rank)) is not None:
            host, pid = card
            if host == _host() and (state := _state(pid)):
                found[rank] = state
    return found


def remember(pids: Mapping[int, int]) -> None:
    """These ranks are processes of this host: for when the store cannot tell."""
    _Kept.cards.update({rank: (_host(), pid) for rank, pid in pids.items()})


def _card(rank: int) -> tuple[str, int] | None:
    if rank not in _Kept.cards and (text := read(f"shardwise/rank/{rank}")):
        host, pid = json.loads(text)
        _Kept.cards[rank] = host, pid
    return _Kept.cards.get(rank)


def lost(members: Iterable[int], error: Exception, seen: Mapping[int, str] | None = None) -> tuple[str, str]:
    """What happened to the ranks that are lost among ``members``, as far as it can be told, and what they said.

    A connection may close a little before its process is gone. ``seen``: what is known of some already.
    """
    members = [rank for rank in members if rank != _Kept.rank]
    end = time.monotonic() + _MOMENT_S / 4
    gone = dict(seen or {})
    while not gone and not (gone := absent(members)) and time.monotonic() < end:
        time.sleep(0.02)
    if not gone:
        gone = {rank: "never came here" for rank in members if not read(f"shardwise/rank/{rank}") and _answers()}
    if not gone and len(members) == 1:
        gone = {members[0]: "died or does not answer"}
    who = " and ".join(f"rank {rank} {state}" for rank, state in gone.items())
    who = who or "a rank of the group died or does not answer"
    return f"{who} ({_first_line(error)})", words_of(gone or members)


def _first_line(error: Exception) -> str:
    """Without what c10d adds for the reader of its own logs."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(". This ")[0]


def _state(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "died"
    return _STATES.get(text.rpartition(")")[2].split()[0])


def _host() -> str:
    """The same text where processes see each other."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def read(key: str) -> str | None:
    """What was told under ``key``."""
    return read_all([key])[0] or None


def read_all(keys: Sequence[str]) -> list[str]:
    """What was told under each of ``keys``; empty where nothing was, or the store does not answer."""
    if (store := _store()) is None or not keys:
        return [""] * len(keys)
    found = shortly(lambda: [store.get(key).decode() if store.check([key]) else "" for key in keys])
    return found or [""] * len(keys)


def _store() -> Any:
    group = _Kept.group()
    return None if group is None else group.get_group_store()


def shortly(action: Callable[[], Any]) -> Any:
    """The result of ``action``, or None if the store fails or does not answer in a moment.

    A store that did not answer, for its host is away, is not asked again before it has.
    """
    if not _answers():
        return None
    result: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            result.append(action())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_MOMENT_S)
    if thread.is_alive():
        _Kept.waiting = thread
    return result[0] if result else None


def _answers() -> bool:
    return _Kept.waiting is None or not _Kept.waiting.is_alive()
