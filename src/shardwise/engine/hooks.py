"""The only place where hooks are registered: where user code and the engine meet.

    before forward   gather, show the leaves, cast inputs, watch one input
    after forward    show the user's objects, free, watch the outputs (also after an exception)
    outputs          gradients arrive: gather for backward
    watched input    gradients leave: free and reduce
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LifecycleError
from ..torch_private import base_of
from .precision import cast_inputs, cast_outputs
from .session import Call, Session
from .traverse import map_tensors, tensors_in
from .unit import Unit

__all__ = ["UnitHooks", "alias", "attach", "detach", "hooks_of", "unit_of"]

_UNITS: weakref.WeakKeyDictionary[nn.Module, UnitHooks] = weakref.WeakKeyDictionary()


class UnitHooks:
    """The hooks of one module of a unit."""

    def __init__(self, unit: Unit, module: nn.Module, start_session: Callable[[Unit], Session]) -> None:
        self.unit, self._start_session = unit, start_session
        self.session: Session | None = None
        self._open: list[Tensor | None] = []  # forwards under way, each with its watched input
        self._handles = [
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Enter the unit."""
        session = self.session or self._join()
        unit = self.unit
        session.enter_forward(unit)
        try:
            if unit.precision.cast_inputs or unit is session.root:
                args, kwargs = cast_inputs(unit, args, kwargs, is_root=unit is session.root)
            watched = None
            if torch.is_grad_enabled():
                args, kwargs, watched = _watch_input(args, kwargs)
        except BaseException:
            session.leave_forward(unit)
            raise
        self._open.append(watched)
        return args, kwargs

    def _join(self) -> Session:
        self.session = self._start_session(self.unit)
        return self.session

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Leave the unit; also called when forward raised, with ``output`` None."""
        if not self._open:
            return None
        watched = self._open.pop()
        session = self.session
        assert session is not None
        unit = self.unit
        call = session.leave_forward(unit)
        changed = cast_outputs(unit, output) if unit.precision.output is not None else output
        if torch.is_grad_enabled() and output is not None:
            _watch(session, call, watched, changed)
        return changed if changed is not output else None


def _watch_input(args: Any, kwargs: Any) -> tuple[Any, Any, Tensor | None]:
    """Put a view in place of the first input that needs a gradient: its node is ours to watch."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            if value.requires_grad:
                view = value.view_as(value)
                return (*args[:position], view, *args[position + 1 :]), kwargs, view
        elif not isinstance(value, (int, float, str, bool, type(None))):
            first = next((t for t in tensors_in(value) if t.requires_grad), None)
            if first is not None:
                view = first.view_as(first)
                swapped = map_tensors(value, lambda t, old=first, new=view: new if t is old else t)
                return (*args[:position], swapped, *args[position + 1 :]), kwargs, view
    first = next((t for t in tensors_in(kwargs) if t.requires_grad), None)
    if first is not None:
        view = first.view_as(first)
        return args, map_tensors(kwargs, lambda t: view if t is first else t), view
    return args, kwargs, None


def _watch(session: Session, call: Call, watched: Tensor | None, output: Any) -> None:
    """Listen for gradients at the outputs, and at the watched input."""
    nodes: list[Any] = []
    outputs = (output,) if isinstance(output, Tensor) else tensors_in(output)
    for tensor in outputs:
        if tensor.grad_fn is None:
            continue
        nodes.append(tensor.grad_fn)
        base = base_of(tensor)  # an in-place change of a view reroutes autograd through its base
        if base is not None and base.grad_fn is not None:
            nodes.append(base.grad_fn)
    if not nodes:
        return
    call.unit.outstanding += 1

    def on_output(gradients: Any) -> None:
        session.enter_backward(call)

    for node in dict.fromkeys(nodes):
        node.register_prehook(on_output)
    if watched is not None and watched.grad_fn is not None:
        call.watched = True

        def on_input(gradients: Any) -> None:
            session.leave_backward(call)

        watched.grad_fn.register_prehook(on_input)


def attach(unit: Unit, start_session: Callable[[Unit], Session]) -> None:
    """Hook the modules of ``unit``. Raises ``LifecycleError`` if one belongs to a unit already."""
    for module in unit.modules:
        if module in _UNITS:
            raise LifecycleError(
                "this module is a sharded unit already", unit=_UNITS[module].unit.name,
                got=type(module).__name__, remedy="Shard each module once.",
            )
    for module in unit.modules:
        _UNITS[module] = UnitHooks(unit, module, start_session)


def alias(wrapper: nn.Module, module: nn.Module) -> None:
    """Let ``wrapper`` count as the unit that ``module`` is the root of."""
    _UNITS[wrapper] = _UNITS[module]


def detach(unit: Unit) -> None:
    """Remove all hooks of ``unit``."""
    for module in unit.modules:
        hooks = _UNITS.pop(module, None)
        if hooks is not None:
            hooks.remove()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is (one of) the root(s) of."""
    hooks = _UNITS.get(module)
    return hooks.unit if hooks is not None else None


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks of ``module``, if it is a unit's."""
    return _UNITS.get(module)
