"""Binding: this rank's chunk of reduced gradients becomes the ``.grad`` of the user's parameters.

The bound gradients are views of one chunk to which the engine keeps no reference, so that
``zero_grad(set_to_none=True)`` frees the memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, ne

import torch
from torch import Tensor, nn

from ..comm.lanes import Lanes
from ..errors import WritebackError
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import BRINGERS, held_gradient, hold_gradient
from ..storage.writeback import take_over_edits
from ..torch_private import (
    NO_HOOKS,
    allow_gradient_dtype,
    foreach_add,
    gradient_dtype,
    gradient_hooks,
    no_gradients,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    without_torch_function,
)
from .collect import Collector
from .hidden_gradients import drop_zeroed, show_gradients
from .hidden_hooks import run_hidden_hooks, run_hidden_post_hooks
from .reduce import Reduced
from .targets import Binding, Cut

__all__ = ["Arrivals", "bind"]

_parameter, _shape = attrgetter("parameter"), attrgetter("shape")


class Arrivals:
    """What was reduced of one unit and is not bound yet."""

    __slots__ = ("_collector", "_lanes", "_sent", "at_once")

    def __init__(self, collector: Collector, lanes: Lanes) -> None:
        self._collector, self._lanes = collector, lanes
        self._sent: list[Reduced] = []
        self.at_once = False  #: it is bound as soon as it comes, and not after the backward

    def add(self, sent: Reduced) -> None:
        """A chunk has arrived. Without grad mode."""
        self._sent.append(sent)
        if self.at_once or len(self._sent) > 1:
            self.bind()
        else:
            BRINGERS[self] = self._bring

    def bind(self, *, free: bool = False) -> None:
        """Give the parameters that this rank used their gradients. Without grad mode.

        ``free``: they were seen to have neither gradients nor hooks.
        """
        BRINGERS.pop(self, None)
        while self._sent:
            sent = self._sent.pop(0)
            if not self._lanes.immediate:
                self._lanes.compute.note("bind", reads=[sent.chunk])
            bind(self._collector, sent.chunk, None if False not in sent.used else sent.has_any, free=free)

    def bind_unused(self, sent: Reduced, used_anywhere: Sequence[bool]) -> None:
        """Give the parameters that only other ranks used their part of ``sent``. Without grad mode.

        A flat parameter that this rank used in part has the whole of it already.
        """
        bind(self._collector, sent.chunk,
             lambda numbers: any(used_anywhere[n] for n in numbers) and not sent.has_any(numbers))

    def _bring(self) -> None:
        """Somebody, a hook say, asks for a gradient while the backward runs."""
        with no_gradients():
            self.bind()

    def forget(self) -> None:
        """An exception threw the iteration away."""
        BRINGERS.pop(self, None)
        self._sent.clear()

    @staticmethod
    def choose(all_of_them: Sequence[Arrivals]) -> None:
        """Decide, as a backward begins, whose gradients are bound at once; the others are bound together after it.

        Together takes half the time. At once go those that hooks of the user's wait for, and those that must not be
        held twice: where there is a gradient already, or where the host keeps them.
        """
        some = not Arrivals.are_free(all_of_them)
        for one in all_of_them:
            one.at_once = some and not Arrivals.are_free([one])
            for storage in one._collector.live:
                if storage.hidden or storage.place.offload:
                    one.at_once = True

    @staticmethod
    def are_free(all_of_them: Sequence[Arrivals]) -> bool:
        """Have their parameters neither gradients nor hooks?"""
        seen = chain.from_iterable([cut.seen for one in all_of_them for cut in one._collector.cuts])
        parameters = [*map(_parameter, seen)]
        with without_torch_function():
            return not (any(map(is_not, map(held_gradient, parameters), repeat(None))) or _any_hooks(parameters))


def bind(collector: Collector, chunk: Tensor, wanted: Callable[[Sequence[int]], bool] | None = None, *,
         free: bool = False) -> None:
    """Give the parameters whose targets are ``wanted`` (None: all of them) their part of the reduced chunk.

    To be called without grad mode. ``free``: all have been seen to be.
    """
    for storage in collector.live:
        if storage.hidden:  # before a step of the flat parameter, which would be lost
            take_over_edits(storage)
    sources = _sources(chunk, collector)
    for cut in collector.cuts:
        gradients = cut.gradients(sources[cut.storage])
        if wanted is None and (_hold_all(cut, gradients) if free else _add_to_all(cut, gradients)):
            continue
        _bind_with_care([(binding, gradient) for binding, gradient in zip(cut.bindings, gradients, strict=True)
                         if wanted is None or wanted(binding.numbers)])


def _any_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Has any of these hooks of the user's?"""
    return any(map(ne, map(gradient_hooks, parameters), repeat(NO_HOOKS)))


def _hold_all(cut: Cut, gradients: Sequence[Tensor]) -> bool:
    """Let the parameters have ``gradients``. False where one cannot: a value of another shape was assigned after the
    forward, or its gradients have another dtype."""
    try:
        with without_torch_function():
            for parameter, gradient in zip(map(_parameter, cut.seen), gradients, strict=True):
                hold_gradient(parameter, gradient)
    except RuntimeError:
        with without_torch_function():
            for seen in cut.seen:  # they had none
                hold_gradient(seen.parameter, None)
        return False
    return True


def _add_to_all(cut: Cut, gradients: list[Tensor]) -> bool:
    """Add ``gradients`` to those that the parameters have. False where one has none, or hooks, or another shape."""
    if cut.storage.hidden:
        return False
    with without_torch_function():
        parameters = [*map(_parameter, cut.seen)]
        held = [*map(held_gradient, parameters)]
        if (any(map(is_, held, repeat(None))) or _any_hooks(parameters)
                or [*map(_shape, held)] != [*map(_shape, gradients)]):
            return False
        foreach_add(held, gradients)
    return True


def _bind_with_care(pairs: Sequence[tuple[Binding, Tensor]]) -> None:
    """Where there may be hooks of the user's, a gradient already, another dtype, or parameters behind them."""
    hidden = [(binding.storage, gradient) for binding, gradient in pairs if binding.storage.hidden]
    for storage, gradient in hidden:
        drop_zeroed(storage)
        run_hidden_hooks(storage, gradient)
    pairs = [(binding, _hooked(binding, gradient)) for binding, gradient in pairs]
    with without_torch_function():
        for binding, gradient in pairs:
            _give(binding, gradient)
    run_post_accumulate_hooks([binding.seen.parameter for binding, _ in pairs])
    for storage, _ in hidden:
        show_gradients(storage)
        run_hidden_post_hooks(storage)


def _sources(chunk: Tensor, collector: Collector) -> dict[FlatStorage, Tensor]:
    """The chunk in the dtype of the gradients of each storage, where its shard lies; converted once for all."""
    converted: dict[tuple[torch.dtype, torch.device], Tensor] = {(chunk.dtype, chunk.device): chunk}
    sources: dict[FlatStorage, Tensor] = {}
    for storage in collector.live:
        shard = storage.shard
        form = storage.precision.final_dtype(shard.dtype, chunk.dtype), shard.device
        if form not in converted:
            part = chunk.real.contiguous() if chunk.is_complex() and not form[0].is_complex else chunk
            converted[form] = part.to(dtype=form[0], device=form[1])
        sources[storage] = converted[form]
    return sources


def _hooked(binding: Binding, gradient: Tensor) -> Tensor:
    """What the user's hooks make of ``gradient``; it is this rank's part of a whole all the same."""
    changed = run_gradient_hooks(binding.seen.parameter, gradient)
    if changed is gradient:
        return gradient
    if changed.shape != gradient.shape:
        raise WritebackError(
            "a hook on a parameter gave back a gradient of another shape", fqn=binding.seen.fqn,
            unit=binding.storage.unit, rank=binding.storage.rank, expected=tuple(gradient.shape),
            got=tuple(changed.shape),
            remedy="A hook gets and gives the reduced gradient of this rank's rows.",
        )
    return binding.storage.kind.mark(changed.detach())


def _give(binding: Binding, gradient: Tensor) -> None:
    storage, seen = binding.storage, binding.seen
    if seen.parameter.shape != gradient.shape:  # a whole value was assigned after the forward
        take_over_edits(storage)
    parameter = seen.parameter
    held = parameter.grad
    if held is None:
        if gradient.dtype is not gradient_dtype(parameter):
            allow_gradient_dtype(parameter, gradient.dtype)
        hold_gradient(parameter, gradient)
    elif held.shape == gradient.shape:
        held.add_(gradient)
    else:
        raise WritebackError(
            "Cannot writeback: .grad has another shape than the sharded parameter", fqn=seen.fqn,
            unit=storage.unit, rank=storage.rank, expected=tuple(gradient.shape), got=tuple(held.shape),
            remedy="Assign a gradient of this rank's rows, or None.",
        )
