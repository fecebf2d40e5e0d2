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
from torch import nn

from ..errors import LifecycleError
from ..storage.faces import Showing
from ..torch_private import never_traced
from .departures import present_failure
from .frames import running
from .precision import cast_floating, cast_inputs, cast_outputs, cast_up
from .session import Session
from .side_outputs import SideOutputs
from .step import Call
from .unit import Unit
from .watch import Watched, watch, watch_input

__all__ = [
    "COPYING", "Place", "StateAdapter", "UnitHooks", "abandon", "alias", "attach", "attach_places",
    "attach_state", "detach", "hooks_of", "keep_precision", "take_hooks_off", "unit_of",
]

# module -> its hooks, weakly: the module itself holds them, and they hold the module
_UNITS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnitHooks]] = weakref.WeakKeyDictionary()
#: in the memo of a deepcopy that is made by ``copying``
COPYING = id(_UNITS)
_KEPT: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class UnitHooks:
    """The hooks of one module of a unit."""

    __slots__ = ("__weakref__", "_failed", "_handles", "_open", "_side", "_start_session", "session", "unit")

    def __init__(self, unit: Unit, module: nn.Module, start_session: Callable[[Unit], Session]) -> None:
        self.unit, self._start_session = unit, start_session
        self.session: Session | None = None
        self._open: list[Watched | None] = []  # forwards under way, each with its watched input
        self._failed = False  # the last attempt to enter a forward
        self._side = SideOutputs(module for _, module in unit.own_modules)
        self._handles = [
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        """The hooks of a copy are made by ``copy_module``, which takes these off it."""
        if memo.get(COPYING) is None:
            raise LifecycleError(
                "the module inside a wrapper cannot be copied alone", unit=self.unit.name,
                remedy="Use copy.deepcopy on the wrapper.",
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LifecycleError(
            "a sharded module cannot be pickled", unit=self.unit.name,
            remedy="Save model.state_dict(), or inside summon_full_params pickle copy.deepcopy(model).",
        )

    @never_traced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Enter the unit; outside the graph where a compiler looks on."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.before_forward)(module, args, kwargs)  # pyright: ignore[reportCallIssue]
        session = self.session or self._join()
        unit = self.unit
        if self._open and running(unit.modules) <= len(self._open):
            abandon(session)
        self._failed, depth = True, len(session.open)
        try:
            session.enter_forward(unit)
            if unit.precision.cast_inputs or unit is session.root:
                args, kwargs = cast_inputs(unit, args, kwargs, is_root=unit is session.root)
            watched = None
            if torch.is_grad_enabled():
                args, kwargs, watched = watch_input(args, kwargs)
        except BaseException as error:
            session.departures.failed_to_enter(unit, error, depth)
            raise
        self._failed = False
        self._open.append(watched)
        return args, kwargs

    def _join(self) -> Session:
        self.session = self._start_session(self.unit)
        return self.session

    @never_traced
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Leave the unit; also called when forward raised, with ``output`` None."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.after_forward)(module, args, kwargs, output)  # pyright: ignore[reportCallIssue]
        if self._failed or not self._open:
            self._failed = False
            return None
        watched = self._open.pop()
        session = self.session
        assert session is not None
        unit = self.unit
        call = session.leave_forward(unit)
        if output is None and (error := present_failure()) is not None:
            session.departures.failed(unit, error)
        changed = cast_outputs(unit, output) if unit.precision.output is not None else output
        if torch.is_grad_enabled() and output is not None and not (
                session.step.entered and session.step.is_entered(unit)):
            left = self._side.found(args, kwargs)
            if not watch(self, call, changed, left, watched):
                unit.collector.listen_to_all()
        return changed if changed is not output else None

    @never_traced
    def enter_backward(self, call: Call, gradients: Any) -> None:
        """Gradients reached an output of ``call``. The session may be another one than in forward."""
        assert self.session is not None
        self.session.enter_backward(call)

    @never_traced
    def leave_backward(self, call: Call, gradients: Any) -> None:
        """Gradients reached the watched input of ``call``."""
        assert self.session is not None
        self.session.leave_backward(call)


def abandon(session: Session) -> None:
    """Forwards were left without a word (an interrupt runs no hooks)."""
    session.recover()
    for unit in session.units:
        for module in unit.modules:
            hooks = hooks_of(module)
            if hooks is not None:
                hooks._open.clear()


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
        known = unit_of(module)
        if known is not None:
            raise LifecycleError(
                "this module is a sharded unit already", unit=known.name,
                got=type(module).__name__, remedy="Shard each module once.",
            )
    for module in unit.modules:
        _UNITS[module] = weakref.ref(UnitHooks(unit, module, start_session))


def alias(wrapper: nn.Module, module: nn.Module) -> None:
    """Let ``wrapper`` count as the unit that ``module`` is the root of."""
    _UNITS[wrapper] = _UNITS[module]


def detach(unit: Unit) -> None:
    """Remove all hooks of ``unit``."""
    for module in unit.modules:
        hooks = hooks_of(module)
        if hooks is not None:
            hooks.remove()
        _UNITS.pop(module, None)


def take_hooks_off(module: nn.Module) -> None:
    """Remove from a copied module what the engine had registered on the original."""
    for table in [value for key, value in vars(module).items() if key.endswith("_hooks")]:
        for number, hook in list((table or {}).items()):
            function = getattr(hook, "hook", hook)  # torch keeps some hooks in a shell
            if isinstance(getattr(function, "__self__", None), UnitHooks) or (
                    getattr(function, "__module__", None) == __name__ and "attach" in function.__qualname__):
                del table[number]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is (one of) the root(s) of."""
    hooks = hooks_of(module)
    return hooks.unit if hooks is not None else None


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks of ``module``, if it is a unit's."""
    known = _UNITS.get(module)
    return known() if known is not None else None


# ---------------------------------------------------------------------- state dicts
# module -> its parameters that some unit saves and loads already (a module may be part of two units)
_ADAPTERS: weakref.WeakKeyDictionary[Unit, StateAdapter] = weakref.WeakKeyDictionary()
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
    _ADAPTERS[unit] = adapter
    for root in unit.modules:
        root.register_state_dict_pre_hook(lambda _module, _prefix, _keep_vars: adapter.begin())
        root.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: adapter.check(module, state, prefix))
    attach_places(unit)
    for root in unit.modules:
        root.register_state_dict_post_hook(
            lambda _module, destination, prefix, _metadata: adapter.end(destination, prefix))


def attach_places(unit: Unit) -> None:
    """The same at each module, where that was not done before."""
    showings: dict[nn.Module, list[Showing]] = {}
    for showing in unit.face.showings:
        showings.setdefault(showing.slot.module, []).append(showing)
    for name, module in unit.own_modules:
        known = _PLACED.setdefault(module, set())
        fresh = tuple(s for s in showings.get(module, ()) if s.name not in known)
        if fresh or (module._buffers and not known):
            known.update(s.name for s in fresh)
            _attach_place(Place(module, name, fresh), _ADAPTERS[unit])


def _attach_place(place: Place, adapter: StateAdapter) -> None:
    module = place.module
    module.register_state_dict_post_hook(
        lambda _module, destination, prefix, _metadata: adapter.save(place, destination, prefix))
    module.register_load_state_dict_pre_hook(
        lambda _module, state, prefix, _metadata, _strict, missing, *_: adapter.load(
            place, state, prefix, missing))
    module.register_load_state_dict_post_hook(lambda _module, _keys: adapter.loaded(place))
