"""The collective that this process waits in, for reports. Entered only where a wait may really block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from .agreement import Call, DescribeTag

__all__ = ["Waiting"]


class Waiting:
    """One wait; inside it, this process waits for the other ranks of a collective."""

    __slots__ = ("_before", "call", "describe", "members", "missing", "since")
    now: ClassVar[Waiting | None] = None  #: what this process waits in

    def __init__(self, call: Call, describe: DescribeTag | None, members: Sequence[int],
                 missing: Callable[[], Sequence[int]] | None = None) -> None:
        self.call, self.describe, self.members = call, describe, members
        self.missing = missing  #: who has not come, where that can be told
        self.since = time.monotonic()
        self._before = Waiting.now

    def __enter__(self) -> None:
        Waiting.now = self

    def __exit__(self, *_: object) -> None:
        Waiting.now = self._before

    def text(self) -> str:
        """``gather of 'layers.0' in the group of ranks 0, 1 (rank 1 has not come)``"""
        text = f"{self.call.subject(self.describe)} in the group of ranks {', '.join(map(str, self.members))}"
        missing = self.missing() if self.missing is not None else ()
        if missing:
            names = ", ".join(map(str, missing))
            text += f" (rank {names} has not come)" if len(missing) == 1 else f" (ranks {names} have not come)"
        return text
