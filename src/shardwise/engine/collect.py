"""Collecting: the gradients of a unit's leaves, copied into one buffer.

Large gradients are copied as they arrive, so that they need not be held twice. Small ones stay on
their leaves, where autograd leaves them without a call into Python, until the unit's backward is
known to be over (``sweep``); where nothing would tell of a backward, each has a hook too (``listen_to_all``).

The buffer is laid out by ``plan.reduction``, one chunk for each rank. It has the dtype of the
wire, or at least fp32 while gradients of several backward passes are added up unsent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..comm.lanes import Lanes
from ..plan.reduction import ReductionPlan, plan_reduction
from ..storage.flat_buffer import FlatBuffer, TransportPool
from ..storage.flat_storage import FlatStorage
from ..torch_private import foreach_add, foreach_copy, never_traced, no_gradients
from .targets import Target, cuts_of

__all__ = ["Collector"]

_Key = tuple[int, int]  # the id of a storage, and an index
_STRIDED, _layout = frozenset({torch.strided}), attrgetter("layout")


class Collector:
    """The unsent gradients of one unit. ``on_first()`` is called when a backward pass brings its first."""

    __slots__ = ("__weakref__", "_eighths", "_filled", "_hooks", "_lanes", "_listens_to_all", "_on_first", "_quiet",
                 "_ready", "_split", "_storages", "_views", "_waiting", "buffer", "cuts", "keep", "live", "patient",
                 "plan", "scale", "targets", "wire_dtype")

    #: gradients of at least this many elements are copied as soon as they arrive
    LARGE = 65_536

    def __init__(self, storages: Sequence[FlatStorage], lanes: Lanes, on_first: Callable[[], None]) -> None:
        self._storages, self._lanes = storages, lanes  # the unit's own list: it may grow
        self._on_first = on_first
        self._views: list[Tensor] = []  # of all targets
        self._waiting: dict[Target, Tensor] = {}
        self._filled: set[Target] = set()  # whose gradient is in the buffer
        self._ready = False  # this pass has opened the buffer
        self._hooks: list[Any] = []
        self._quiet: list[Target] = []  # those without a hook
        self._listens_to_all = self._split = False  # the second: a target has several pieces, or none
        self._eighths = False  #: some gradients arrive in float8
        self.buffer: FlatBuffer | None = None
        self.plan: ReductionPlan | None = None
        self.live: list[FlatStorage] = []
        self.targets: list[Target] = []
        self.wire_dtype = torch.float32  #: on the wire: the widest that the trained parameters ask for
        self.scale = 1.0
        self.keep = False  #: what arrives in this pass stays unsent after it
        self.patient = False  #: backwards of other units run in between: gradients wait as they are
        self.rebuild()

    def _widest(self) -> torch.dtype:
        dtypes = [s.precision.wire_dtype(s.stored_dtype) for s in self.live]
        self._eighths = any(s.compute_dtype.itemsize == 1 for s in self.live)
        return reduce(torch.promote_types, dtypes)

    def rebuild(self, others: Container[_Key] = ()) -> None:
        """Plan for the parameters that are trained now, and for ``others``; listen to their leaves."""
        for handle in self._hooks:
            handle.remove()
        flags = [[leaf.requires_grad or (id(storage), index) in others for index, leaf in enumerate(storage.leaves)]
                 for storage in self._storages]
        chosen = [(s, f) for s, f in zip(self._storages, flags, strict=True) if any(f)]
        self.live = [storage for storage, _ in chosen]
        self.targets, self.plan, self.buffer = [], None, None
        if chosen:
            self.wire_dtype = self._widest()
            self.plan = plan_reduction([s.layout for s in self.live], [f for _, f in chosen],
                                       self.live[0].rank, self.wire_dtype.itemsize)
        for k, (storage, trained) in enumerate(chosen):
            assert self.plan is not None
            for index, (pieces, own) in enumerate(zip(self.plan.pieces[k], self.plan.own[k], strict=True)):
                if trained[index]:
                    self.targets.append(Target(len(self.targets), storage, index, pieces, own))
        self._split = any(len(target.pieces) != 1 for target in self.targets)
        self._listen()
        self.cuts = cuts_of(self.live, self.targets, self.plan) if self.plan is not None else []

    def take_in_leaves(self) -> None:
        """Listen to the leaves that the storages have now, and to newly trained ones; what is unsent stays."""
        known = {(id(target.storage), target.index): target for target in self.targets}
        self.follow_leaves()
        if all((id(storage), index) in known for storage in self._storages
               for index, leaf in enumerate(storage.leaves) if leaf.requires_grad):
            return
        with no_gradients():
            waiting, self._waiting = self._waiting, {}
            unsent = {key: target.unsent() for key, target in known.items() if target in self._filled}
            for key, target in known.items():
                if target in waiting:
                    came = waiting[target] * self.scale
                    unsent[key] = came + unsent[key] if key in unsent else came
            self._filled.clear()
            self.close()
            self.rebuild(known)
            if not unsent:
                return
            self.open(keep=True)
            self._waiting = {target: unsent[key] for target in self.targets
                             if (key := (id(target.storage), target.index)) in unsent}
            scale, self.scale = self.scale, 1.0
            self._flush()
            self.scale = scale

    def follow_leaves(self) -> None:
        """Listen to the leaves that the storages have now, in their precision; what is unsent stays."""
        if self.live:
            self.wire_dtype = self._widest()
        for handle in self._hooks:
            handle.remove()
        for target in self.targets:
            target.leaf = target.storage.leaves[target.index]
        self._listen()

    def _listen(self) -> None:
        self._hooks, self._quiet = [], []
        for target in self.targets:
            if not target.leaf.requires_grad:
                continue
            split = target.storage.owned[target.index].parallel is not None  # by tensor parallelism
            if self._listens_to_all or split or target.leaf.numel() >= self.LARGE:
                self._hooks.append(target.leaf.register_post_accumulate_grad_hook(self._listener(target)))
            else:
                self._quiet.append(target)

    def listen_to_all(self) -> None:
        """Nothing but a gradient will tell that a backward of this unit has begun."""
        if not self._listens_to_all:
            self._listens_to_all = True
            self.follow_leaves()

    def _listener(self, target: Target) -> Callable[[Tensor], None]:
        # weak: what a tensor's hooks hold is beyond the reach of Python's garbage collection
        collector, number, large = weakref.ref(self), target.number, target.leaf.numel() >= self.LARGE
        part = target.storage.owned[target.index].parallel

        @never_traced
        def on_gradient(leaf: Tensor) -> None:
            gradient = leaf.grad
            leaf.grad = None
            mine = collector()
            if gradient is not None and mine is not None:
                mine._take(number, gradient if part is None else part.localise(gradient), large)

        return on_gradient

    def _begin(self) -> None:
        if not self._ready:
            self._on_first()
            self._ready = True

    def sweep(self) -> None:
        """Take the gradients that wait on their leaves."""
        waiting = self._waiting
        for target in self._quiet:
            leaf: Any = target.leaf
            gradient = leaf.grad
            if gradient is not None:
                if not self._ready:
                    self._begin()
                leaf.grad = None
                waiting[target] = self._summed(target, gradient) if target in waiting else gradient

    def _take(self, number: int, gradient: Tensor, large: bool) -> None:
        self._begin()
        target = self.targets[number]
        self._waiting[target] = self._summed(target, gradient)
        if large and not self.patient:
            with no_gradients():
                self._flush()

    def _summed(self, target: Target, gradient: Tensor) -> Tensor:
        """``gradient`` and what waits already: backwards inside of backwards bring several."""
        earlier = self._waiting.get(target)
        if earlier is None:
            return gradient
        return gradient + earlier if earlier.is_sparse else earlier + gradient  # torch adds sparse to dense only

    def _flush(self) -> None:
        """Copy the waiting gradients into the buffer: set what is empty, add to what is filled. Without grad mode."""
        self.open(keep=self.keep)
        waiting, self._waiting = self._waiting, {}
        if not self._lanes.immediate:
            self._lanes.compute.note("collect", reads=list(waiting.values()), writes=[self.buffer])
        if self._filled and (again := {t: waiting.pop(t) for t in [*waiting] if t in self._filled}):
            self._write(foreach_add, again)
        if waiting:
            self._write(foreach_copy, waiting)
            self._filled.update(waiting)

    def _write(self, operation: Callable[[list[Tensor], list[Tensor]], None], waiting: dict[Target, Tensor]) -> None:
        everything = len(waiting) == len(self.targets)
        targets = self.targets if everything else [*waiting]
        into = self._views if everything else [view for target in targets for view in target.views]
        sources = [*map(waiting.__getitem__, targets)]
        if self._split or not _STRIDED.issuperset(map(_layout, sources)):
            sources = [part for target in targets for part in target.sources(waiting[target])]
        if self._eighths:  # torch cannot add float8 to anything
            sources = [source.to(into[0].dtype) for source in sources]
        if self.scale != 1.0:  # before a cast to fp16, in which more is infinite
            sources = [source * self.scale for source in sources]
        if into:
            operation(into, sources)

    @property
    def holding(self) -> bool:
        """Are there gradients that were not sent?"""
        return bool(self._waiting) or (self.buffer is not None and self.buffer.allocated)

    @property
    def nbytes(self) -> int:
        """Bytes held by unsent gradients."""
        waiting = list(self._waiting.values())
        waiting += [gradient for target in self._quiet if (gradient := target.leaf.grad) is not None]
        return sum(gradient.nbytes for gradient in waiting) + (self.buffer.nbytes if self.buffer is not None else 0)

    def open(self, *, keep: bool) -> None:
        """Make room, unless there is some. ``keep``: they will stay unsent after this backward."""
        if (self.buffer is not None and self.buffer.allocated) or self.plan is None:
            return
        wire = self.wire_dtype
        dtype = self.live[0].policy.accumulation_dtype(wire) if keep else wire
        buffer = self.buffer
        if buffer is None or buffer.tensor.dtype != dtype:
            pool = TransportPool.of(self.live[0].comm) if self._lanes.immediate else self.live[0].pool
            buffer = FlatBuffer(self.plan.numel, dtype, self.live[0].compute_device, pool)
            buffer.allocate()
            for target in self.targets:
                target.make_views(buffer)
            self._views = [view for target in self.targets for view in target.views]
            self.buffer = buffer
        buffer.allocate()
        for storage in self.live:
            if storage.hidden:
                buffer.tensor.zero_()  # a flat parameter's gradient shows the padding as well
                break

    def hand_over(self) -> tuple[Tensor, list[bool]]:
        """All chunks in the wire dtype, zeros where nothing arrived, and what did arrive. Without grad mode."""
        self._ready = False
        if self._waiting:
            self._flush()
        else:
            self.open(keep=False)
        assert self.buffer is not None
        if not self._lanes.immediate:
            self._lanes.compute.note("hand over", writes=[self.buffer])
        filled, self._filled = self._filled, set()
        used = [True] * len(self.targets)
        if len(filled) < len(used):
            used = [target in filled for target in self.targets]
            for target in self.targets:
                if target not in filled:
                    for view in target.views:
                        view.zero_()
        full, wire = self.buffer.tensor, self.wire_dtype
        return full if full.dtype is wire else full.to(wire), used

    def close(self) -> None:
        """Give the memory back: what was there has been sent."""
        if self.buffer is not None:
            self.buffer.free()

    def drop(self) -> None:
        """Forget what arrived, and give the memory back."""
        self.forget(self.targets)

    def forget(self, targets: Iterable[Target]) -> None:
        """The same for some of them."""
        for target in targets:
            self._waiting.pop(target, None)
            self._filled.discard(target)
            target.leaf.grad = None
        if not (self._waiting or self._filled):
            self.close()

    def begin_pass(self) -> None:
        """A backward pass begins: no gradient of it has arrived."""
        self._ready = False

    def end_pass(self) -> None:
        """The backward pass is over: nothing waits any longer."""
        self.sweep()
        if self._waiting:
            with no_gradients():
                self._flush()
