"""``state_dict()`` and ``load_state_dict()`` of sharded modules, called anywhere in the tree.

Every module of a unit that registers sharded parameters takes part by itself, so a state dict
is right at any depth, under any prefix, and through any plain parent.

    save   before: torch has put this rank's rows (or nothing, or a flat parameter) under the keys
           after:  every key of the bare module is there with the value that the unit's settings
                   ask for; no other key; the model as it was
    load   before: the keys are those of the bare module; values are whole, records, or local rows
           after:  the rows are written in place, so the objects registered are those from before;
                   torch finds nothing left to do; an ill-fitting value has changed nothing
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.errands import Errand
from ..engine.admission import owner_of
from ..engine.build import units_below
from ..engine.hooks import Place, attach_state
from ..engine.settling import settle_unit
from ..engine.unit import Unit
from ..errors import CheckpointError
from ..plan.state_options import FullStateDictConfig, StateDictSettings, StateDictType, settings_for
from ..storage.faces import Showing
from ..storage.flat_storage import FlatStorage
from ..torch_private import Wish, is_persistent_buffer, torch_spreads, torch_wants_whole
from .from_rank_zero import spread_model_state
from .matching import check_values, share_tied
from .rows import record_of, rows_from, rows_now, write_rows
from .wholes import wholes_for

__all__ = ["UnitState", "install", "is_main_rank", "state_of", "takes_snapshots"]

_STATES: weakref.WeakKeyDictionary[Unit, UnitState] = weakref.WeakKeyDictionary()


def install(unit: Unit, kind: StateDictType, *, snapshot: bool) -> None:
    """Let ``unit`` take part in state dicts, of ``kind`` by default.

    ``snapshot``: records are copies, which later training does not change (else they share
    memory with the parameters, as the entries of an ordinary state dict do).
    """
    _STATES[unit] = state = UnitState(unit, settings_for(kind), snapshot=snapshot)
    attach_state(unit, state)


def state_of(unit: Unit) -> UnitState:
    """The part of ``unit`` in state dicts."""
    return _STATES[unit]


def is_main_rank(model: nn.Module) -> bool:
    """Does this rank keep what ``rank0_only`` asks for?"""
    return all(_STATES[unit].is_main for _, unit in units_below(model))


def takes_snapshots(model: nn.Module) -> bool:
    """Are the state dicts of ``model`` copies, also where they could share memory?"""
    return any(_STATES[unit].snapshot for _, unit in units_below(model))


class UnitState:
    """A unit's part in state dicts."""

    def __init__(self, unit: Unit, settings: StateDictSettings, *, snapshot: bool) -> None:
        self._unit = weakref.ref(unit)
        self.settings, self.snapshot = settings, snapshot
        self.whole_unit = False  #: the state dict of the unit's root module is being made
        self._cast = False  #: buffers wait to be cast back after a load

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None
        return unit

    @property
    def is_main(self) -> bool:
        """Does this rank keep what ``rank0_only`` asks for?"""
        return all(comm.rank == 0 for comm in self.unit.groups.nontrivial)

    @property
    def _keeps(self) -> bool:
        config = self.settings.state_dict_config
        return self.is_main or not (isinstance(config, FullStateDictConfig) and config.rank0_only)

    # ------------------------------------------------------------------ save
    def begin(self) -> None:
        """The state dict of the unit's root module begins."""
        settle_unit(self.unit)
        self.whole_unit = True

    @Errand("state_dict")
    def save(self, place: Place, destination: dict[str, Any], prefix: str) -> None:
        """Put the values of one module in, in the order of the bare module."""
        for unit in (self.unit, *self.unit.needs):
            unit.take_over_edits(adopt=False)
        behind_flat: dict[str, Any] = {}
        wish = torch_wants_whole()
        for showing in place.showings:
            key = prefix + showing.name
            held = destination.get(key)
            tracked = isinstance(held, nn.Parameter) and held.requires_grad  # keep_vars
            value = self._value(showing, destination) if wish is None else self._whole(showing, destination, wish)
            if value is not None and tracked and value.is_floating_point():
                value.requires_grad_()
            if showing.storage.hidden and value is not None:
                behind_flat[key] = value
            elif held is not None and value is not None:
                destination[key] = value
            else:
                destination.pop(key, None)
        self._save_buffers(place, destination, prefix)
        _put_first(destination, prefix, behind_flat)

    def _value(self, showing: Showing, destination: dict[str, Any]) -> Tensor | None:
        storage, index = showing.storage, showing.index
        kind, host = self.settings.state_dict_type, self.settings.state_dict_config.offload_to_cpu
        if kind is StateDictType.FULL_STATE_DICT:
            value = self._gathered(showing, destination, host=host, keep=self._keeps)
        elif kind is StateDictType.LOCAL_STATE_DICT:
            value = rows_now(storage, index).detach()
        else:
            value = record_of(storage, index)
            value = value.clone() if self.snapshot else value
        return value.cpu() if value is not None and host else value

    def _whole(self, showing: Showing, destination: dict[str, Any], wish: Wish) -> Tensor:
        """For torch's helper, which drops what a rank does not keep, misses keys that are not there, and sends
        memory as it is."""
        _, only_first = wish
        value = self._gathered(showing, destination, host=only_first, keep=self.is_main or not only_first)
        return record_of(showing.storage, showing.index) if value is None else value.contiguous()

    def _gathered(self, showing: Showing, destination: dict[str, Any], *, host: bool, keep: bool) -> Tensor | None:
        storage, index = showing.storage, showing.index
        owner = owner_of(storage.parameters[index]) or self.unit
        return wholes_for(destination).get(
            storage, index, unit_at_once=state_of(owner).whole_unit, host=host, keep=keep)

    def _save_buffers(self, place: Place, destination: dict[str, Any], prefix: str) -> None:
        host = self.settings.state_dict_config.offload_to_cpu
        for name, _ in place.module.named_buffers(recurse=False):
            key = prefix + name
            exact = self.unit.buffers.exact(f"{place.name}.{name}" if place.name else name)
            if key in destination and is_persistent_buffer(place.module, name):
                value = destination[key] if exact is None else exact.detach()
                destination[key] = value.cpu() if host else value

    def end(self, destination: dict[str, Any], prefix: str) -> None:
        """The state dict of the unit's root module is complete."""
        self.whole_unit = False
        for storage in self.unit.storages:
            if type(destination) is not dict:
                wholes_for(destination).forget(storage)
            if storage.hidden:
                destination.pop(prefix + storage.visible[0].fqn, None)
        if self.settings.state_dict_type is StateDictType.FULL_STATE_DICT and not self._keeps:
            for key in [key for key in destination if key.startswith(prefix)]:
                del destination[key]

    # ------------------------------------------------------------------ load
    @Errand("load_state_dict")
    def check(self, root: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Before anything is changed: can everything below the unit's root be loaded?"""
        unit = self.unit
        settle_unit(unit)
        if unit.uses:
            raise CheckpointError("cannot load a state dict into a unit in use", unit=unit.name,
                                  remedy="Load outside of forward and backward.")
        for one in (unit, *unit.needs):
            one.take_over_edits(adopt=False)
        if torch_spreads():
            self._spread(root, state, prefix)
        share_tied(root, state, prefix)
        check_values(root, state, prefix, local=self._local)
        for storage in unit.storages:
            if storage.hidden and root is unit.modules[0]:  # that is where it is registered
                state[prefix + storage.visible[0].fqn] = storage.visible[0].parameter

    def _spread(self, root: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """What torch did not spread: it looks for the parameters that are registered, and those are flat."""
        names = {s.slot.fqn for s in self.unit.face.showings if s.storage.hidden}
        if names:
            mine = {key: state[prefix + key] for key in sorted(names) if prefix + key in state}
            state.update({prefix + key: value for key, value in spread_model_state(root, mine).items()})

    @property
    def _local(self) -> bool:
        return self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT

    @Errand("load_state_dict")
    def load(self, place: Place, state: dict[str, Any], prefix: str, missing: list[str]) -> None:
        """Write the values of one module, and leave torch an entry that fits."""
        touched: set[FlatStorage] = set()
        for showing in place.showings:
            key, storage = prefix + showing.name, showing.storage
            if key in state:
                state[key] = self._load_one(storage, showing.index, state[key], key)
                touched.add(storage)
            if storage.hidden and state.pop(key, None) is None:
                missing.append(key)
        for unit in (self.unit, *self.unit.needs):
            if unit.uses == 0 and touched.intersection(unit.storages):
                unit.reshard()  # what is gathered is out of date
        if self.unit.buffers.is_cast:
            self.unit.buffers.for_checkpoint()
            self._cast = True

    def _load_one(self, storage: FlatStorage, index: int, value: Any, key: str) -> Any:
        """Write one value; what torch should find in its place."""
        parameter = storage.parameters[index]
        if not storage.widened:
            write_rows(storage, index, rows_from(storage, index, value, key, local=self._local))
            return parameter
        gather = getattr(value, "full_tensor", None)
        whole = value if gather is None else gather()
        if storage.whole and storage.hidden:
            with torch.no_grad():
                parameter.copy_(whole)
        return whole if storage.whole else parameter  # the first rank's edit reaches the others

    def loaded(self, place: Place) -> None:
        """Cast the buffers again if they were."""
        if self._cast:
            self._cast = False
            self.unit.buffers.for_compute()


def _put_first(destination: dict[str, Any], prefix: str, parameters: dict[str, Any]) -> None:
    """Add ``parameters`` where torch has a module's own: in front of all else below ``prefix``."""
    behind: list[str] = []
    for key in reversed(destination if parameters else {}):
        if not key.startswith(prefix):
            break
        behind.append(key)
    rest = {key: destination.pop(key) for key in reversed(behind)}
    destination.update(parameters)
    destination.update(rest)
