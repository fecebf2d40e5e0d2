"""``copy.deepcopy`` of sharded models: another sharded model of the same layout, without traffic.

Every rank copies its own rows. Inside ``summon_full_params``, where whole parameters are seen,
the copy is an ordinary, unsharded model (which can be pickled).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..checkpoint.model_state import install, state_of
from ..engine.build import start_session, units_below
from ..engine.direct import EnteredCall, show_at_rest
from ..engine.hooks import COPYING, attach, take_hooks_off, unit_of
from ..engine.precision import kept_modules
from ..engine.settling import settle_unit
from ..engine.unit import Unit
from ..errors import LifecycleError
from ..plan.ownership import OwnedParameter, Slot
from ..plan.state_options import StateDictType
from ..storage.flat_face import FlatFace
from ..storage.flat_storage import FlatStorage
from ..storage.roster import Roster
from .summon import is_summoned

__all__ = ["copy_module", "refuse_pickling"]

Memo = dict[int, Any]


def copy_module(module: nn.Module, memo: Memo) -> nn.Module:
    """What ``__deepcopy__`` of a sharded module gives.

    The other modules of its unit, and units that it borrows parameters from, are copied with it.
    Explicit prefetch lists are not. Raises ``LifecycleError`` inside a forward or backward.
    """
    if id(module) in memo:
        return memo[id(module)]
    unit = unit_of(module)
    assert unit is not None
    _check(unit)
    outer, memo[COPYING] = memo.get(COPYING), True
    try:
        unit.buffers.for_checkpoint()
        for one in unit.modules:
            _copy_object(one, memo)
        bare = {below for one in unit.modules for _, below in units_below(one) if below is not unit
                and unit_of(memo[id(below.modules[0])]) is None}  # modules without a ``__deepcopy__``
        for below in sorted(bare, key=lambda below: (len(below.needs), below.number)):  # owners first
            _follow(below, memo)
        _follow(unit, memo)
    finally:
        if outer is None:
            del memo[COPYING]
    return memo[id(module)]


def _follow(unit: Unit, memo: Memo) -> None:
    """Make a unit of modules that were copied, or bare modules inside a summon."""
    if is_summoned(unit):
        _make_plain(unit, memo)
        return
    for owner in unit.needs:
        copy_module(owner.modules[0], memo)
    _copy_unit(unit, memo)


def refuse_pickling(module: nn.Module) -> Any:
    """What ``__reduce_ex__`` of a sharded module does: a process of its own has no group to share with."""
    raise LifecycleError(
        "a sharded model cannot be pickled", unit=type(module).__name__,
        remedy="Save model.state_dict(), or inside summon_full_params pickle copy.deepcopy(model).",
    )


def _check(unit: Unit) -> None:
    settle_unit(unit)
    if unit.face.in_use:
        raise LifecycleError("a unit cannot be copied while it is in use", unit=unit.name,
                             remedy="Copy the model outside of forward and backward.")
    if is_summoned(unit) and not all(storage.whole for storage in unit.storages):
        raise LifecycleError("this rank has no whole parameters to copy: summon_full_params has rank0_only",
                             unit=unit.name, remedy="Copy on the group's first rank only, or outside.")


def _copy_object(module: nn.Module, memo: Memo) -> None:
    """What ``copy.deepcopy`` does for a module without a ``__deepcopy__`` of its own."""
    if id(module) in memo:
        return
    if is_parametrized(module):  # torch lets such a module be copied, and not reduced
        made = memo[id(module)] = type(module).__new__(type(module))
        made.__dict__ = copy.deepcopy(module.__dict__, memo)
        return
    reduced: Any = object.__reduce_ex__(module, 4)
    make, arguments, state = reduced[:3]
    made = make(*arguments)
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(state, memo))


def _copied(module: nn.Module, memo: Memo) -> nn.Module:
    return memo[id(module)] if id(module) in memo else copy.deepcopy(module, memo)


def _make_plain(unit: Unit, memo: Memo) -> None:
    for _, module in unit.own_modules:
        made = _copied(module, memo)
        take_hooks_off(made)
        for name, value in list(vars(made).items()):
            if isinstance(value, EnteredCall):
                del made.__dict__[name]
    for module in unit.modules:
        kind = getattr(type(module), "_unsharded", None)
        if kind is not None:
            memo[id(module)].__class__ = kind
    for made in (memo[id(module)] for _, module in unit.own_modules):
        if is_parametrized(made):  # by its class, which it would share with the original: removal changes the class
            kind = type(made)
            own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            made.__class__ = type(kind.__name__, kind.__bases__, own)


def _copy_unit(unit: Unit, memo: Memo) -> Unit:
    own = [(name, _copied(module, memo)) for name, module in unit.own_modules]
    for _, module in own:
        take_hooks_off(module)
    storages = [_copy_storage(storage, memo) for storage in unit.storages]
    face = unit.face.copied(lambda module: _copied(module, memo), lambda storage: memo[id(storage)])
    modules = [memo[id(module)] for module in unit.modules]
    if isinstance(face, FlatFace):
        face.register(modules[0], storages)
    settings = replace(unit.settings, forward_prefetch=[], backward_prefetch=None)
    made = Unit(modules, storages, face, unit.groups, unit.lanes, unit.policy)
    made.settings = settings
    made.schedule, made.own_modules, made.fqn = unit.schedule, own, unit.fqn
    made.roster, made.take_in = Roster(own), unit.take_in
    made.needs = [unit_of(memo[id(owner.modules[0])]) or owner for owner in unit.needs]
    _copy_communication(unit, made)
    kept = kept_modules((module for _, module in own), unit.policy)
    made.buffers.observe([(name, m) for name, m in own if m not in kept], unit.policy.buffer)
    attach(made, start_session)
    show_at_rest(made)
    _rebind_methods(made)
    install(made, StateDictType.FULL_STATE_DICT, snapshot=state_of(unit).snapshot)
    state_of(made).settings = state_of(unit).settings
    return made


def _copy_communication(unit: Unit, made: Unit) -> None:
    """Transports, hooks and divisors that were set on the unit."""
    made.gather.comm, made.reducer.groups = unit.gather.comm, unit.reducer.groups
    made.reducer.divide_factor = unit.reducer.divide_factor
    made.reducer.comm_hook, made.reducer.all_reduce_hook = unit.reducer.comm_hook, unit.reducer.all_reduce_hook


def _copy_storage(storage: FlatStorage, memo: Memo) -> FlatStorage:
    owned: list[OwnedParameter] = []
    for entry, parameter in zip(storage.owned, storage.parameters, strict=True):
        slots = [Slot(_copied(slot.module, memo), slot.name, slot.fqn) for slot in entry.slots]
        owned.append(OwnedParameter(copy.deepcopy(parameter, memo), slots, entry.parallel))
    made = FlatStorage(storage.unit, owned, storage.comm, storage.policy, storage.place, like=storage)
    if storage.hidden:
        flat = storage.visible[0]
        made.show_flat(flat.fqn, copy.deepcopy(flat.parameter, memo))
    memo[id(storage)] = made
    return made


def _rebind_methods(unit: Unit) -> None:
    """Let methods that were registered as entrances enter the copied unit."""
    for _, module in unit.own_modules:
        table = cast("dict[str, Any]", module.__dict__)  # pyright: ignore[reportUnnecessaryCast]
        for name, value in list(table.items()):
            if isinstance(value, EnteredCall) and name != "forward":
                table[name] = EnteredCall(module, name, unit)
