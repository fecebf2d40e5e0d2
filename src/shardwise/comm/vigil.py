"""What a rank does about a wait that lasts: it looks, about once a second, whether those it waits for can come.

A process that is stopped keeps its connections, and so does one behind a network that is cut, so that no transport
notices. Of the processes of its own host a rank can read the state; of those of others it hears the beat. One look
proves little (Ctrl-Z stops all ranks, and ``fg`` wakes them one after the other), so a rank counts as lost only when
every look for most of the limit found the same, and a process that was away itself, and so did not look, starts
anew. In a wait of less than a second nothing is looked at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from ..errors import ConfigurationError
from .agreement import peer_error
from .beats import Beats
from .crossing import Crossing
from .last_words import absent, words_of
from .passes import notice_leavers
from .underway import Waiting

__all__ = ["Signs", "begin_beats", "look", "lost_after"]

_VARIABLE = "SHARDWISE_LOST_AFTER"
_DEFAULT_S = 15.0
_SILENT = "gave no sign of life"
#: parts of the limit: between two looks, for as long as a sign must last, and without a look that void all before
_EVERY, _SURE, _AWAY = 1 / 16, 3 / 4, 1 / 2
_BEAT = 1 / 8
_AWAY_S = 1.5  #: looks of a thread that looks for all groups may be half a second apart


def lost_after() -> float:
    """Within how many seconds a rank that cannot come is given up; 0: never. From the environment.

    Raises ``ConfigurationError`` if that is no such number.
    """
    text = os.environ.get(_VARIABLE)
    try:
        seconds = float(text) if text else _DEFAULT_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigurationError(f"{_VARIABLE} is not a number of seconds", got=repr(text),
                                 remedy="Set it to 15, say, or to 0 for no limit.")
    return seconds


class Signs:
    """What one wait has seen of other ranks."""

    def __init__(self) -> None:
        self._looked, self._since = time.monotonic(), dict[int, tuple[str, float]]()
        self._beats: dict[int, str] = {}  #: the last ones of ranks on other hosts

    def lost(self, ranks: Sequence[int], limit_s: float) -> dict[int, str]:
        """Look at ``ranks``: those that will not come, and why, after most of ``limit_s``."""
        now = time.monotonic()
        known = self._since if now - self._looked <= max(_AWAY * limit_s, _AWAY_S) else {}
        self._looked, self._since = now, {}
        for rank, state in (self._silent(ranks) | absent(ranks)).items():  # what is seen is surer than silence
            before = known.get(rank)
            self._since[rank] = before if before is not None and before[0] == state else (state, now)
        return {rank: f"{state} (for {now - since:.1f} s)" for rank, (state, since) in self._since.items()
                if now - since >= _SURE * limit_s}

    def _silent(self, ranks: Sequence[int]) -> dict[int, str]:
        """Who has not beaten since the last look, as far as this rank can hear."""
        before, self._beats = self._beats, Beats.heard(ranks)
        silent = [rank for rank, beat in self._beats.items() if not beat or beat == before.get(rank)]
        self._beats |= {rank: before[rank] for rank in silent if before.get(rank)}
        return dict.fromkeys(silent, _SILENT)

    def last_beats(self, ranks: Iterable[int]) -> str:
        """What ``ranks`` said that they were doing."""
        said = {rank: self._beats.get(rank, "").partition(" ")[2] for rank in ranks}
        return "".join(f"; its last sign: {text}" for text in said.values() if text)


def begin_beats(hosts: Mapping[int, str], limit_s: float) -> None:
    """Give signs of life, as all of these ranks do, if some have other ``hosts``. ``limit_s``: that of their group."""
    far = [rank for rank, host in hosts.items() if host != hosts[dist.get_rank()]]
    Beats.begin(far, _BEAT * min(lost_after() or limit_s, limit_s))


def look(wait: Waiting) -> None:
    """Raise ``PeerError`` if a rank that ``wait`` needs will not come. To be called ``wait.next_look``, and again."""
    limit_s = lost_after()
    wait.next_look = time.monotonic() + min(_EVERY * limit_s or 1.0, 1.0)
    notice_leavers(wait)
    if wait.missing is not None:  # else it is not known who has come here
        if wait.crossing is None:
            wait.crossing = Crossing(f"collectives of {wait.members}", wait.subject())
        wait.crossing.look(wait.needed())
    if not limit_s:
        return
    if wait.signs is None:
        wait.signs = Signs()
    if lost := wait.signs.lost(wait.needed(), limit_s):
        who = " and ".join(f"rank {rank} {state}" for rank, state in lost.items())
        words = f"{wait.came_last()}{words_of(lost)}{wait.signs.last_beats(lost)}; {_VARIABLE}=0 would go on waiting"
        raise peer_error(who, wait.call, wait.members, wait.describe, words, wait.errand)
