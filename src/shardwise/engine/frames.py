"""Is a module's forward really running? An interrupt leaves it without running any hook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from torch import nn

__all__ = ["is_call", "running", "running_anywhere"]

_CALL = nn.Module._call_impl.__code__
_RESUMED = "torch_dynamo_resume_in"  # what is left of a function behind a graph break


def running(modules: Sequence[nn.Module]) -> int:
    """How many calls of ``modules`` are on this thread's stack. Slow: for the suspicion only."""
    return sum(_is_call(frame, modules) for frame in _outwards([sys._getframe(1)]))


def running_anywhere(modules: Sequence[nn.Module]) -> bool:
    """May any thread be in a call of ``modules``? What a compiler took apart may be one of any module."""
    return any(_is_call(frame, modules) or frame.f_code.co_name.startswith(_RESUMED)
               for frame in _outwards(sys._current_frames().values()))


def is_call(frame: FrameType) -> bool:
    """Is this the call of a module?"""
    return frame.f_code is _CALL


def _outwards(innermost: Iterable[FrameType]) -> Iterator[FrameType]:
    for first in innermost:
        frame: FrameType | None = first
        while frame is not None:
            yield frame
            frame = frame.f_back


def _is_call(frame: FrameType, modules: Sequence[nn.Module]) -> bool:
    return frame.f_code is _CALL and any(frame.f_locals.get("self") is module for module in modules)
