"""Watching one forward's place in the autograd graph, to know when its backward begins and ends.

Gradients that reach an output begin it; those that reach the watched input end it. Autograd runs
later nodes first, so when the node in front of the inputs runs, all later nodes have run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from ..torch_private import base_of, has_levels, hook_gradient, is_view, levels_of, made_after
from .step import Call
from .traverse import map_tensors, tensors_in

__all__ = ["Listener", "Watched", "watch", "watch_input"]


class Listener(Protocol):
    """What is told when the backward of a call begins and ends."""

    def enter_backward(self, call: Call, gradients: Any) -> None: ...
    def leave_backward(self, call: Call, gradients: Any) -> None: ...


class Watched:
    """The view of an input that a forward gets, and its node in the graph."""

    __slots__ = ("node", "view")

    def __init__(self, tensor: Tensor) -> None:
        self.view = tensor.view_as(tensor)
        self.node: Any = self.view.grad_fn


def watch_input(args: Any, kwargs: Any) -> tuple[Any, Any, Watched | None]:
    """Put a view in place of the first input that needs a gradient: its node is ours to watch."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            if value.requires_grad:
                watched = Watched(value)
                return (*args[:position], watched.view, *args[position + 1 :]), kwargs, watched
        elif not isinstance(value, (int, float, str, bool, type(None))):
            first = next((t for t in tensors_in(value) if t.requires_grad), None)
            if first is not None:
                watched = Watched(first)
                swapped = _swapped(value, first, watched)
                return (*args[:position], swapped, *args[position + 1 :]), kwargs, watched
    first = next((t for t in tensors_in(kwargs) if t.requires_grad), None)
    if first is not None:
        watched = Watched(first)
        return args, _swapped(kwargs, first, watched), watched
    return args, kwargs, None


def _swapped(value: Any, old: Tensor, new: Watched) -> Any:
    return map_tensors(value, lambda tensor: new.view if tensor is old else tensor)


def _nodes_of(output: Any, left_behind: Iterable[Tensor], watched: Watched | None) -> dict[Any, None]:
    """The nodes through which gradients enter: of outputs, of their bases, and of what was left behind."""
    nodes: dict[Any, None] = {}
    tensors: Iterable[Tensor] = (output,) if isinstance(output, Tensor) else _tensors(output)
    for tensor in chain.from_iterable(map(levels_of, tensors)) if has_levels() else tensors:
        if tensor.grad_fn is not None:
            nodes[tensor.grad_fn] = None
            # an in-place change of a view reroutes autograd through its base
            base = base_of(tensor) if is_view(tensor) else None
            if base is not None and base.grad_fn is not None and _is_new(base.grad_fn, watched):
                nodes[base.grad_fn] = None
    for tensor in left_behind:
        if _is_new(tensor.grad_fn, watched):
            nodes[tensor.grad_fn] = None
    return nodes


def _tensors(output: Any) -> Iterator[Tensor]:
    """Also one level down in an object of a class that is no container."""
    found = False
    for tensor in tensors_in(output):
        found = True
        yield tensor
    if not found:
        yield from tensors_in(getattr(output, "__dict__", None))


def _is_new(node: Any, watched: Watched | None) -> bool:
    """Was ``node`` made by the forward that was given ``watched``?"""
    return watched is None or made_after(node, watched.node)


class _Hook(partial[None]):
    """A hook that a user's output may carry into a file: torch need not warn that it's left out there."""

    __torch_unserializable__ = True


def watch(listener: Listener, call: Call, output: Any, left: Collection[Tensor], watched: Watched | None) -> bool:
    """Tell ``listener`` when gradients reach what a forward gave, and when they reach the watched input.

    False if none can: nothing that it gave, or ``left`` behind, has a history.
    """
    enter = _Hook(listener.enter_backward, call)
    if type(output) is Tensor and not left and not is_view(output) and not has_levels():
        node: Any = output.grad_fn
        if node is None:
            return False
        if not hook_gradient(output, node, enter):
            node.register_prehook(enter)
    else:
        nodes = _nodes_of(output, left, watched)
        if not nodes:
            return False
        for node in nodes:
            node.register_prehook(enter)
    call.unit.outstanding += 1
    call.watched = watched is not None  # if not by the input, then by the end of the pass
    # not all of the forward comes behind the node if the input was changed in place
    if watched is not None and watched.view.grad_fn is watched.node:
        leave = _Hook(listener.leave_backward, call)
        if not hook_gradient(watched.view, watched.node, leave):
            watched.node.register_prehook(leave)
    return True
