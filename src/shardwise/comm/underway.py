"""The collective that this process waits in, for reports. Entered only where a wait may really block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from .agreement import Call, DescribeTag
from .errands import HERE, in_errand

if TYPE_CHECKING:
    from .crossing import Crossing
    from .passes import Passes
    from .vigil import Signs

__all__ = ["Waiting"]


class Waiting:
    """One wait; inside it, this process waits for the other ranks of a collective."""

    __slots__ = ("_before", "after", "call", "crossing", "describe", "errand", "members", "missing", "next_look",
                 "passes", "signs", "since")
    now: ClassVar[Waiting | None] = None  #: what this process waits in

    def __init__(self, call: Call, describe: DescribeTag | None, members: Sequence[int],
                 missing: Callable[[], Sequence[int]] | None = None, after: Call | None = None) -> None:
        self.call, self.describe, self.members = call, describe, members
        self.missing = missing  #: who has not come, where that can be told
        self.errand = HERE.number  #: the call of the library that it belongs to
        self.after = after  #: the collective of these ranks before this one, where it is known
        self.passes: Passes | None = None  #: those of these ranks, where the group outlives a wait that is given up
        self.since = time.monotonic()
        self.next_look = self.since + 1.0  #: when to look whether those that are missing can come (``vigil``) …
        self.signs: Signs | None = None  #: … and what was seen then
        self.crossing: Crossing | None = None
        self._before = Waiting.now

    def __enter__(self) -> None:
        Waiting.now = self

    def __exit__(self, *_: object) -> None:
        Waiting.now = self._before

    def text(self) -> str:
        """``gather of 'layers.0' in the group of ranks 0, 1 (rank 1 has not come)``"""
        text = f"{self.subject()} in the group of ranks {', '.join(map(str, self.members))}"
        missing = self.missing() if self.missing is not None else ()
        if missing:
            names = ", ".join(map(str, missing))
            text += f" (rank {names} has not come)" if len(missing) == 1 else f" (ranks {names} have not come)"
        return text

    def subject(self) -> str:
        """``all-reduce in clip_grad_norm_``"""
        return self.call.subject(self.describe) + in_errand(self.errand)

    def needed(self) -> Sequence[int]:
        """The ranks that have not come, as far as that is known."""
        return self.members if self.missing is None else self.missing()

    def came_last(self) -> str:
        """``; it came last to gather of 'layers.0'``, where that is known: all of these ranks did."""
        return f"; it came last to {self.after.subject(self.describe)}" if self.after is not None else ""
