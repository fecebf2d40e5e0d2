"""Collecting: the gradients of a unit's leaves, copied into one buffer as they arrive.

The buffer is laid out by ``plan.reduction``, one chunk for each rank. It has the dtype of the
wire, or at least fp32 while gradients of several backward passes are added up unsent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.lanes import Lanes
from ..plan.reduction import Piece, ReductionPlan, plan_reduction
from ..storage.flat_buffer import FlatBuffer
from ..storage.flat_storage import FlatStorage

__all__ = ["Collector", "Target"]


class Target:
    """One leaf, and where its gradient goes."""

    __slots__ = ("filled", "index", "leaf", "number", "pieces", "storage", "views")

    def __init__(self, number: int, storage: FlatStorage, index: int, pieces: tuple[Piece, ...]) -> None:
        self.number = number
        self.storage, self.index, self.pieces = storage, index, pieces
        self.leaf = storage.leaves[index]
        self.views: list[Tensor] = []
        self.filled = False

    def make_views(self, buffer: FlatBuffer) -> None:
        """Views of ``buffer`` for life: shaped like the leaf where it is one piece."""
        shape = self.storage.layout.parameters[self.index].shape
        if len(self.pieces) == 1:
            strides = self.storage.formats[self.index].strides(shape)
            self.views = [buffer.view(self.pieces[0].target, shape, strides)]
        else:
            self.views = [buffer.view(piece.target, (piece.numel,), (1,)) for piece in self.pieces]

    def put(self, gradient: Tensor, scale: float) -> None:
        """Set, or add to, what is there."""
        sources: Sequence[Tensor] = (gradient,)
        if len(self.views) != 1:
            flat = self.storage.formats[self.index].flatten(gradient)
            sources = [flat[piece.source : piece.source + piece.numel] for piece in self.pieces]
        for view, source in zip(self.views, sources, strict=True):
            if self.filled:
                view.add_(source, alpha=scale)
            else:
                view.copy_(source)
                if scale != 1.0:
                    view.mul_(scale)
        self.filled = True


class Collector:
    """The unsent gradients of one unit.

    ``on_arrival(target)`` is called before a gradient is taken (it opens the buffer),
    ``on_complete()`` when every leaf has delivered in this backward pass.
    """

    def __init__(self, storages: Sequence[FlatStorage], lanes: Lanes,
                 on_arrival: Callable[[], None], on_complete: Callable[[], None]) -> None:
        self._storages, self._lanes = list(storages), lanes
        self._on_arrival, self._on_complete = on_arrival, on_complete
        self._hooks: list[Any] = []
        self.buffer: FlatBuffer | None = None
        self.plan: ReductionPlan | None = None
        self.live: list[FlatStorage] = []
        self.targets: list[Target] = []
        self.missing = 0
        self.scale = 1.0
        self.rebuild()

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype on the wire: the widest that the trained parameters ask for."""
        dtypes = [s.precision.wire_dtype(s.stored_dtype) for s in self.live]
        wire = dtypes[0]
        for dtype in dtypes[1:]:
            wire = torch.promote_types(wire, dtype)
        return wire

    def rebuild(self) -> None:
        """Plan for the parameters that are trained now, and listen to their leaves."""
        for handle in self._hooks:
            handle.remove()
        flags = [[leaf.requires_grad for leaf in storage.leaves] for storage in self._storages]
        chosen = [(s, f) for s, f in zip(self._storages, flags, strict=True) if any(f)]
        self.live = [storage for storage, _ in chosen]
        self.targets, self.plan, self.buffer = [], None, None
        if chosen:
            self.plan = plan_reduction([s.layout for s in self.live], [f for _, f in chosen],
                                       self.live[0].rank, self.wire_dtype.itemsize)
        for k, (storage, trained) in enumerate(chosen):
            for index in range(len(storage.leaves)):
                if trained[index]:
                    pieces = self.plan.pieces[k][index] if self.plan is not None else ()
                    self.targets.append(Target(len(self.targets), storage, index, pieces))
        self._hooks = [t.leaf.register_post_accumulate_grad_hook(self._listener(t)) for t in self.targets]
        self.missing = len(self.targets)

    def _listener(self, target: Target) -> Callable[[Tensor], None]:
        def on_gradient(leaf: Tensor) -> None:
            gradient = leaf.grad
            leaf.grad = None
            if gradient is not None:
                self._on_arrival()
                self._take(target, gradient)
        return on_gradient

    def _take(self, target: Target, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        self._lanes.compute.note("collect", reads=[gradient], writes=[self.buffer])
        with torch.no_grad():
            target.put(gradient, self.scale)
        self.missing -= 1
        if self.missing == 0:
            self._on_complete()

    @property
    def holding(self) -> bool:
        """Are there gradients that were not sent?"""
        return self.buffer is not None and self.buffer.allocated

    @property
    def nbytes(self) -> int:
        """Bytes held by unsent gradients."""
        return self.buffer.nbytes if self.buffer is not None else 0

    def open(self, *, keep: bool) -> None:
        """Make room, unless there is some. ``keep``: they will stay unsent after this backward."""
        if self.holding or self.plan is None:
            return
        dtype = torch.promote_types(self.wire_dtype, torch.float32) if keep else self.wire_dtype
        buffer = self.buffer
        if buffer is None or buffer.tensor.dtype != dtype:
            buffer = FlatBuffer(self.plan.numel, dtype, self.live[0].compute_device, self.live[0].pool)
            buffer.allocate()
            for target in self.targets:
                target.make_views(buffer)
            self.buffer = buffer
        buffer.allocate()
        if any(storage.hidden for storage in self.live):
            buffer.tensor.zero_()  # a flat parameter's gradient shows the padding as well

    def hand_over(self) -> tuple[Tensor, list[bool]]:
        """All chunks in the wire dtype, zeros where nothing arrived, and what did arrive."""
        assert self.buffer is not None
        used = [target.filled for target in self.targets]
        with torch.no_grad():
            for target in self.targets:
                if not target.filled:
                    for view in target.views:
                        view.zero_()
                target.filled = False
            return self.buffer.tensor.to(self.wire_dtype), used

    def close(self) -> None:
        """Give the memory back: what was there has been sent."""
        if self.buffer is not None:
            self.buffer.free()

    def drop(self) -> None:
        """Forget what arrived, and give the memory back."""
        for target in self.targets:
            target.filled = False
            target.leaf.grad = None
        self.close()

    def expect_all(self) -> None:
        """Count from the start for the next backward pass."""
        self.missing = len(self.targets)
