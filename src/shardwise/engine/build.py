"""Making units out of modules, and a session out of units. Everything is checked before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.choose import collectives_for
from ..comm.lanes import lanes_for
from ..errors import LifecycleError, WritebackError
from ..plan.lifecycle import Pass
from ..plan.options import Precision
from ..plan.ownership import OwnedParameter, Ownership, collect
from ..storage.faces import OriginalFace
from ..storage.flat_buffer import BufferPool, ZeroedPool
from ..storage.flat_face import FlatFace
from ..storage.flat_storage import FLAT, FlatStorage, Place
from ..storage.guard import guard
from ..storage.roster import Roster
from ..storage.sharded_parameter import home_of
from ..storage.tensor_parallel import ParallelPart, Together, take_local_part
from .admission import owner_of, require_children_first, require_shardable
from .direct import show_at_rest
from .hooks import attach, attach_places, hooks_of, keep_precision, unit_of
from .likeness import note_first_rows, note_first_values
from .precision import kept_modules
from .reduce import Groups
from .session import Session
from .settings import Schedule, Settings
from .skipping import SkippingSession
from .stuck import follow
from .unit import Unit

__all__ = ["Choices", "build_unit", "kinds_of", "session_of", "start_session", "units_below"]

_POOLS: dict[torch.device, BufferPool] = {}
_DRY_POOLS: dict[torch.device, BufferPool] = {}


#: parameters that make one flat parameter, and whether they keep their dtype in computation
Kind = tuple[list[OwnedParameter], bool]
#: ranks with other parts of the parameters than this one, by tensor parallelism
Split = tuple[tuple[DeviceMesh, int], ...]


@dataclass(frozen=True)
class Choices:
    """What a front end decided about one unit."""

    groups: Groups
    device: torch.device
    precision: Precision = field(default_factory=Precision)
    settings: Settings = field(default_factory=Settings)
    schedule: Schedule = field(default_factory=Schedule)
    original_parameters: bool = True
    offload: bool = False
    pin_memory: bool = True
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[nn.Parameter] = frozenset()


def build_unit(modules: Sequence[nn.Module], choices: Choices) -> Unit:
    """Shard the parameters of ``modules`` that no unit has yet, as one unit.

    Raises ``ConfigurationError`` or ``LifecycleError`` before anything is changed.
    """
    for module in modules:
        if unit_of(module) is not None:
            raise LifecycleError(
                "this module is a sharded unit already", unit=type(module).__name__,
                remedy="Apply fully_shard or FullyShardedDataParallel once to each module.",
            )

    ownership = _collect(modules, choices)
    require_children_first(modules, ownership)
    require_shardable(ownership, modules[0], choices.ignored_modules)
    values = note_first_values(ownership.owned)
    kept = kept_modules((module for _, module in ownership.modules), choices.precision)
    storages = _storages(type(modules[0]).__name__, ownership.owned, kept, choices)
    face = OriginalFace() if choices.original_parameters else FlatFace()
    for storage in storages:
        for index, entry in enumerate(storage.owned):
            face.add(entry, storage, index)
    needs = _borrow(ownership, face)
    if isinstance(face, FlatFace):
        face.register(modules[0], storages)
    precision = choices.precision.for_kept() if kept.issuperset(modules) else choices.precision
    unit = Unit(modules, storages, face, choices.groups, lanes_for(choices.device), precision)
    unit.settings, unit.schedule = choices.settings, choices.schedule
    unit.needs, unit.own_modules, unit.roster = needs, ownership.modules, Roster(ownership.modules)
    unit.take_in = partial(_take_in, choices=choices)
    unit.buffers.observe([(name, module) for name, module in ownership.modules if module not in kept],
                         precision.buffer)
    attach(unit, start_session)
    show_at_rest(unit)
    note_first_rows(unit, values)
    for module in kept:
        if choices.precision.param is not None and isinstance(module, choices.precision.kept_classes):
            keep_precision(module)
    return unit


def _collect(modules: Sequence[nn.Module], choices: Choices) -> Ownership:
    def elsewhere(module: nn.Module) -> bool:
        return unit_of(module) is not None or module in choices.ignored_modules

    several = len(modules) > 1
    return collect(
        [(str(i) if several else "", module) for i, module in enumerate(modules)],
        stop=elsewhere, ignored=set(choices.ignored_parameters), owner=owner_of,
    )


def _take_in(unit: Unit, choices: Choices) -> None:
    """Shard what was added to the modules of ``unit`` since they were looked at, as if it had been there.

    Every rank has to add the same. No traffic: each rank takes its rows of its own whole values.
    """
    ownership = _collect(unit.modules, choices)
    if ownership.owned and isinstance(unit.face, FlatFace):
        raise WritebackError(
            "Cannot writeback: a parameter was added after sharding, and no flat parameter has room for it",
            fqn=ownership.owned[0].fqn, unit=unit.name, rank=choices.groups.shard.rank,
            expected="a parameter that a unit holds", got="a parameter of this rank alone",
            remedy="Use use_orig_params=True, add it before sharding, or shard the new module as a unit of its own.",
        )
    require_shardable(ownership, unit.modules[0], choices.ignored_modules)
    kept = kept_modules((module for _, module in ownership.modules), choices.precision)
    storages = _storages(unit.name, ownership.owned, kept, choices)
    for storage in storages:
        for index, entry in enumerate(storage.owned):
            unit.face.add(entry, storage, index)
        storage.set_full_precision(unit.in_full_precision)
    shown = {(s.slot.module, s.name) for s in unit.face.showings}
    for entry in ownership.borrowed:  # registered under another name, too
        entry.slots[:] = [slot for slot in entry.slots if (slot.module, slot.name) not in shown]
    unit.needs += [owner for owner in _borrow(ownership, unit.face) if owner is not unit and owner not in unit.needs]
    known = {module for _, module in unit.own_modules}
    fresh = [(name, m) for name, m in ownership.modules if m not in known and m not in kept]
    unit.buffers.observe(fresh, unit.policy.buffer)
    unit.own_modules, unit.roster = ownership.modules, Roster(ownership.modules)
    unit.extend(storages)
    session = session_of(unit)
    if session is not None and session.guarded:
        guard(storages)
    show_at_rest(unit)
    attach_places(unit)


def _storages(
    unit: str, owned: Sequence[OwnedParameter], kept: set[nn.Module], choices: Choices
) -> list[FlatStorage]:
    for entry in owned:
        take_local_part(entry, choices.groups.members)
    pool = pool_for(choices.device, real=choices.groups.shard.real)
    place = Place(choices.device, pool, choices.offload, choices.pin_memory)
    precision, kept_precision = choices.precision, choices.precision.for_kept()
    return [FlatStorage(unit, alike, choices.groups.shard, kept_precision if is_kept else precision, place,
                        norm_comm=_norm_comm(_split(alike[0]), choices))
            for alike, is_kept in kinds_of(owned, kept)]


def _split(entry: OwnedParameter) -> Split:
    part: ParallelPart | None = entry.parallel
    return () if part is None else tuple((part.mesh, dim) for dim in part.split_dims)


def _norm_comm(split: Split, choices: Choices) -> Together | None:
    """Over whom norms are combined, where that is more than the shard group."""
    groups = [collectives_for(mesh.get_group(dim), choices.device) for mesh, dim in split]
    return Together([choices.groups.shard, *groups]) if groups else None


def pool_for(device: torch.device, *, real: bool = True) -> BufferPool:
    """The memory that units on ``device`` pass on to each other; ``real``: gathers fill all of it."""
    return _POOLS.setdefault(device, BufferPool(keep=3)) if real else _DRY_POOLS.setdefault(device, ZeroedPool(keep=3))


def kinds_of(owned: Sequence[OwnedParameter], kept: set[nn.Module]) -> list[Kind]:
    """Parameters of the same stored dtype, the same ``requires_grad``, and split over the same ranks go
    together. Those that only ``kept`` modules have (True) keep their dtype in computation, and go apart
    from the others."""
    kinds: dict[tuple[torch.dtype, bool, bool, Split], list[OwnedParameter]] = {}
    for entry in owned:
        is_kept = all(slot.module in kept for slot in entry.slots)
        kind = (entry.parameter.dtype, entry.parameter.requires_grad, is_kept, _split(entry))
        kinds.setdefault(kind, []).append(entry)
    return [(entries, is_kept) for (_, _, is_kept, _), entries in kinds.items()]


def _borrow(ownership: Ownership, face: OriginalFace) -> list[Unit]:
    needs: list[Unit] = []
    for entry in ownership.borrowed:
        home = home_of(entry.parameter)
        assert home is not None
        storage, index = home
        if index == FLAT:
            continue  # the unit's own flat parameter
        face.add(entry, storage, index)
        owner = Unit.owning(storage)
        if owner is not None and owner not in needs:
            needs.append(owner)
    return needs


# ---------------------------------------------------------------------- sessions
def units_below(root: nn.Module) -> list[tuple[str, Unit]]:
    """The units at and below ``root`` with their names in it, each once, in registration order."""
    found: dict[Unit, str] = {}
    for name, module in root.named_modules():
        unit = unit_of(module)
        if unit is not None:
            found[unit] = f"{found[unit]}+{name}" if unit in found and len(unit.modules) > 1 else (
                found.get(unit, name))
    return [(name, unit) for unit, name in found.items()]


def session_of(unit: Unit) -> Session | None:
    """The session that ``unit`` belongs to, once a forward has begun."""
    hooks = hooks_of(unit.modules[0])
    return hooks.session if hooks is not None else None


def start_session(root: Unit) -> Session:
    """Make ``root`` the root of a session with all units below it.

    Units that ran on their own before come along. Raises ``LifecycleError`` if one of them is
    in the middle of a pass.
    """
    named: dict[Unit, str] = {root: ""}
    for module in root.modules:
        for name, unit in units_below(module):
            named.setdefault(unit, name)
    for unit, name in named.items():
        other = session_of(unit)
        if other is not None and other.pass_ is not Pass.REST:
            raise LifecycleError(
                "two roots: a unit below this root runs in another root's pass", unit=name or "(root)",
                got=f"root {other.root.name}", remedy="Call the outermost sharded module first.",
            )
    skips = root.schedule.skips and any(comm.real for comm in root.groups.nontrivial)
    session = (SkippingSession if skips else Session)(root, list(named), root.lanes, root.schedule)
    follow(session)
    for unit, name in named.items():
        unit.fqn = name
        for storage in unit.storages:
            storage.unit = unit.name
        for module in unit.modules:
            hooks = hooks_of(module)
            if hooks is not None:
                hooks.session = session
    return session

