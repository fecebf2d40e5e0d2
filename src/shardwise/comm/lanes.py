"""Order between work on one device: streams and events, or nothing where work is immediate.

A *lane* is a queue of device work. The engine has three: ``compute`` (the stream that the
user's code runs on), ``gather`` and ``reduce``. Work issued on one lane that touches memory
which another lane touched must wait for a *mark* of it. On the CPU work is done when the call
returns, so lanes are empty shells and the same engine code runs unchanged.

``Lane.note`` states which memory a piece of work reads and writes. It does nothing here; a
recording lane in the tests logs it and fails on two conflicting accesses without an order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

__all__ = ["ImmediateLane", "Lane", "Lanes", "StreamLane", "lanes_for"]


class Lane(ABC):
    """A queue of device work; ``with lane:`` issues what is inside on it."""

    name: str

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def mark(self) -> Any:
        """A point after all work issued on this lane so far."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Work issued on this lane from now on starts after ``mark``."""

    def finish(self) -> None:
        """Let the host wait until all work issued on this lane is done."""
        return None

    def note(self, what: str, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """State the memory that the next piece of work touches (for checks only)."""
        return None


class ImmediateLane(Lane):
    """Work is finished when its call returns; there is nothing to order."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        return None


class StreamLane(Lane):
    """A stream of an accelerator; marks are events. ``own=False`` follows the current stream."""

    def __init__(self, name: str, device: torch.device, *, own: bool) -> None:
        self.name = name
        self._device = device
        self._api: Any = torch.get_device_module(device)
        self._stream: Any = self._api.Stream(device=device, priority=-1) if own else None
        self._entered: list[Any] = []

    def _current(self) -> Any:
        return self._stream if self._stream is not None else self._api.current_stream(self._device)

    def __enter__(self) -> None:
        context = self._api.stream(self._current())
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def mark(self) -> Any:
        event = self._api.Event()
        event.record(self._current())
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            self._current().wait_event(mark)

    def finish(self) -> None:
        self._current().synchronize()


@dataclass(frozen=True)
class Lanes:
    """The lanes of one device. ``immediate``: work is done when its call returns."""

    compute: Lane
    gather: Lane
    reduce: Lane
    immediate: bool


_LANES: dict[torch.device, Lanes] = {}


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of ``device``, made once: all units of all models share them."""
    if device not in _LANES:
        if device.type in ("cpu", "meta"):
            _LANES[device] = Lanes(
                ImmediateLane("compute"), ImmediateLane("gather"), ImmediateLane("reduce"), immediate=True
            )
        else:
            _LANES[device] = Lanes(
                StreamLane("compute", device, own=False),
                StreamLane("gather", device, own=True),
                StreamLane("reduce", device, own=True),
                immediate=False,
            )
    return _LANES[device]
