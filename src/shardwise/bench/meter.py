"""What one step costs beside time: bytes on the wire, bytes held, function calls.

All contenders are seen alike, from below: a dispatch mode sees each operation and collective that
reaches torch, whoever calls it, from Python or C++. This library's shared memory is no collective
of torch, so its traffic is what its units report (``observe``).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.traverse import tensors_in
from ..frontend.report import observe
from ..torch_private import TorchDispatchMode

__all__ = ["Cost", "count_calls", "metered"]

_ORDINARY: Any = Tensor


@dataclass
class Cost:
    """``wire``: bytes that one rank receives in the best algorithm. ``peak``: bytes held at most."""

    wire: float = 0.0
    peak: int = 0


class _Meter(TorchDispatchMode):
    """Adds up collectives, and weighs the memory that operations touch after each of them."""

    def __init__(self, cost: Cost, world: int) -> None:
        super().__init__()
        self._cost, self._share = cost, (world - 1) / world
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not _ORDINARY.__torch_dispatch__ for kind in types):
            return NotImplemented  # a tensor made of others (DTensor): what it does with them comes here again
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._cost.wire += _received(func.name(), args) * self._share
        for tensor in (*tensors_in(args), *tensors_in(result)):
            self._note(tensor)
        self._cost.peak = max(self._cost.peak, self._weigh())
        return result

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and not tensor.is_meta:
            self._held.add(tensor.untyped_storage())

    def _weigh(self) -> int:
        """Storages are looked at anew each time: sharded parameters are freed inside a living storage."""
        return sum(storage.nbytes() for storage in self._held)


def _received(name: str, args: Any) -> int:
    """Bytes of the full tensor of a collective; an all-reduce needs it twice."""
    sizes = [sum(t.numel() * t.element_size() for t in tensors_in(argument)) for argument in args[:2]]
    return max(sizes, default=0) * (2 if "allreduce" in name else 1)


@contextmanager
def metered(module: nn.Module, world: int, *, own: bool) -> Iterator[Cost]:
    """Inside, what ``module`` costs. ``own``: it is sharded by this library."""
    cost = Cost()
    with _Meter(cost, world):
        if not own:
            yield cost
            return
        reported = 0

        def add(event: str, unit: str, nbytes: int, time_ns: int) -> None:
            nonlocal reported
            reported += nbytes if event in ("gather", "reduce") else 0

        with observe(module, add):
            yield cost
        cost.wire = reported * (world - 1) / world


def count_calls(run: Callable[[], object]) -> int:
    """Python and C functions that ``run`` calls on this thread (a backward on an accelerator has its own).

    Without what garbage of earlier runs may call while it is collected.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    return count
