"""The only place where hooks are registered: where user code and the engine meet.

    before forward   gather, show the leaves, cast inputs, watch one input
    after forward    show the user's objects, free, watch the outputs (also after an exception)
    outputs          gradients arrive: gather for backward
    watched input    gradients leave: free and reduce
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import LifecycleError
from ..storage.faces import Showing
from ..torch_private import base_of
from .precision import cast_floating, cast_inputs, cast_outputs, cast_up
from .session import Call, Session
from .traverse import map_tensors, tensors_in
from .unit import Unit

__all__ = ["Place", "StateAdapter", "UnitHooks", "alias", "attach", "attach_state", "detach", "hooks_of",
           "keep_precision", "unit_of"]

_UNITS: weakref.WeakKeyDictionary[nn.Module, UnitHooks] = weakref.WeakKeyDictionary()
_KEPT: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Enter the unit; outside the graph where a compiler looks on."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._before)(args, kwargs)
        return self._before(args, kwargs)

    def _before(self, args: Any, kwargs: Any) -> Any:
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

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Leave the unit; also called when forward raised, with ``output`` None."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._after)(output)
        return self._after(output)

    def _after(self, output: Any) -> Any:
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


class _KeepPrecision:
    """A module that computes in its own dtype among others that do not."""

    def __init__(self, module: nn.Module) -> None:
        self._given: list[torch.dtype | None] = []  # forwards under way, each with its inputs' dtype
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs, given = cast_up(module, args, kwargs)
        self._given.append(given)
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = self._given.pop() if self._given else None
        return None if given is None or output is None else cast_floating(given, output)


def keep_precision(module: nn.Module) -> None:
    """Let ``module`` take its floating-point inputs in its own dtype, and give back outputs in theirs."""
    if module not in _KEPT:
        _KEPT.add(module)
        _KeepPrecision(module)


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


# ---------------------------------------------------------------------- state dicts
# module -> its parameters that some unit saves and loads already (a module may be part of two units)
_PLACED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Place:
    """One module of a unit: its name below the unit's root, and the sharded parameters it registers."""

    module: nn.Module
    name: str
    showings: tuple[Showing, ...]


class StateAdapter(Protocol):
    """What a unit's part in state dicts is made by. ``prefix`` is that of the module concerned.

    Order of a save: ``begin`` at each root module, ``save`` at each module after its children,
    ``end`` at the root. Of a load: ``check`` at the root, ``load`` before and ``loaded`` after
    torch reads the entries of each module. A call on a module below the root skips the root's.
    """

    def begin(self) -> None: ...
    def save(self, place: Place, destination: dict[str, Any], prefix: str) -> None: ...
    def end(self, destination: dict[str, Any], prefix: str) -> None: ...
    def check(self, root: nn.Module, state: dict[str, Any], prefix: str) -> None: ...
    def load(self, place: Place, state: dict[str, Any], prefix: str, missing: list[str]) -> None: ...
    def loaded(self, place: Place) -> None: ...


def attach_state(unit: Unit, adapter: StateAdapter) -> None:
    """Let ``adapter`` take part in the state dicts of the modules of ``unit``."""
    showings: dict[nn.Module, list[Showing]] = {}
    for showing in unit.face.showings:
        showings.setdefault(showing.slot.module, []).append(showing)
    for root in unit.modules:
        root.register_state_dict_pre_hook(lambda _module, _prefix, _keep_vars: adapter.begin())
        root.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: adapter.check(module, state, prefix))
    for name, module in unit.own_modules:
        known = _PLACED.setdefault(module, set())
        fresh = tuple(s for s in showings.get(module, ()) if s.name not in known)
        if fresh or (module._buffers and not known):
            known.update(s.name for s in fresh)
            _attach_place(Place(module, name, fresh), adapter)
    for root in unit.modules:
        root.register_state_dict_post_hook(
            lambda _module, destination, prefix, _metadata: adapter.end(destination, prefix))


def _attach_place(place: Place, adapter: StateAdapter) -> None:
    module = place.module
    module.register_state_dict_post_hook(
        lambda _module, destination, prefix, _metadata: adapter.save(place, destination, prefix))
    module.register_load_state_dict_pre_hook(
        lambda _module, state, prefix, _metadata, _strict, missing, *_: adapter.load(
            place, state, prefix, missing))
    module.register_load_state_dict_post_hook(lambda _module, _keys: adapter.loaded(place))
