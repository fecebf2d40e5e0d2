"""``summon_full_params``: whole parameters on the user's own objects, for the length of a block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from ..comm.collectives import Reduction
from ..comm.errands import Errand
from ..engine.admission import owner_of
from ..engine.build import session_of, units_below
from ..engine.hooks import unit_of
from ..engine.replan import holds_gradients
from ..engine.settling import settle_unit
from ..engine.unit import Unit
from ..errors import LifecycleError, OptionTypeError, WritebackError
from ..plan.lifecycle import Pass
from ..storage.widening import Widened, WideningOptions
from ..torch_private import in_backward

__all__ = ["is_summoned", "iter_units_full", "summon_full_params"]

# unit -> how it is summoned
_SUMMONED: weakref.WeakKeyDictionary[Unit, WideningOptions] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside the block the parameters at ``module`` show their whole values. A collective on both ends.

    The objects stay the user's: ``p.data`` is the whole value, and with ``with_grads`` ``p.grad``
    the whole gradient. In flat mode the original parameters are registered inside.

    Args:
        module: any module at, above or inside a unit.
        recurse: units below ``module`` too.
        writeback: edits stay: in place, ``.data =``, ``.grad =``, a new ``nn.Parameter``. Each rank
            keeps its own rows of its own edit, so all ranks must make the same one. Without
            ``writeback`` nothing that was done inside stays.
        rank0_only: whole values on the first rank only; with ``writeback`` its edits reach all.
        offload_to_cpu: whole values on the CPU.
        with_grads: gradients too; where any rank has one, all show it.

    Peak memory is one whole copy, or one unit's with ``iter_units_full``. A forward inside runs
    without grad mode only, and computes with what the parameters show.

    Raises:
        LifecycleError: inside forward or backward, or in another summon with other options.
        WritebackError: an edit does not fit; the parameters are as they were before the block.
    """
    _check(recurse=recurse, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu,
           with_grads=with_grads)
    options = WideningOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    with _summoned(_units(module, recurse=recurse), options, "summon_full_params"):
        yield


@contextlib.contextmanager
def _summoned(units: list[Unit], options: WideningOptions, call: str) -> Iterator[None]:
    fresh = [unit for unit in units if not _joins(unit, options)]
    for unit in fresh:
        _require_rest(unit)
    opened: list[tuple[Unit, list[Widened]]] = []
    try:
        with Errand(call):
            for unit in fresh:
                opened.append((unit, []))
                _widen(unit, options, opened[-1][1])
        yield
    except BaseException as error:
        with Errand(call):
            failure = _narrow_all(opened, options)
        if failure is not None:
            error.add_note(f"and then: {failure}")
        raise
    with Errand(call):
        failure = _narrow_all(opened, options)
    if failure is not None:
        raise failure


def iter_units_full(
    module: nn.Module, *, writeback: bool = False, rank0_only: bool = False, offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Walk the units at and below ``module``: (name, whole parameters by FQN), one unit at a time.

    Each unit's parameters are whole until the next one is asked for. The arguments are those of
    ``summon_full_params``; every rank must walk, as far as the others do.
    """
    options = WideningOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    for name, unit in units_below(module):
        with _summoned([unit], options, "iter_units_full"):
            yield name, _named(unit, name)


def _named(unit: Unit, name: str) -> dict[str, nn.Parameter]:
    prefix = f"{name}." if name and len(unit.modules) == 1 else ""
    return {prefix + spec.fqn: parameter for storage in unit.storages
            for spec, parameter in zip(storage.layout.parameters, storage.parameters, strict=True)}


def is_summoned(unit: Unit) -> bool:
    """Is a summon open on ``unit``?"""
    return any(storage.widened for storage in unit.storages)


# ---------------------------------------------------------------------- what, and whether
def _check(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionTypeError(f"summon_full_params: {name} has the wrong type", expected="bool",
                                  got=type(value).__name__)


def _units(module: nn.Module, *, recurse: bool) -> list[Unit]:
    """Units below ``module``, and those that own parameters registered there."""
    below = [unit for _, unit in units_below(module)] if recurse else []
    mine = unit_of(module)
    if mine is not None:
        below += [mine, *mine.needs]
    for one in module.modules() if recurse else [module]:
        attributes = (value for value in vars(one).values() if isinstance(value, nn.Parameter))
        for parameter in (*one.parameters(recurse=False), *attributes):
            owner = owner_of(parameter)
            if owner is not None:
                below.append(owner)
    return list(dict.fromkeys(below))


def _joins(unit: Unit, options: WideningOptions) -> bool:
    """Is ``unit`` summoned already, in the same way? Then the outer block answers for it."""
    if not is_summoned(unit):
        return False
    outer = _SUMMONED.get(unit)
    fits = outer is not None and (outer.writeback, outer.rank0_only, outer.offload_to_cpu) == (
        options.writeback, options.rank0_only, options.offload_to_cpu)
    if not fits or outer is None or (options.with_grads and not outer.with_grads):
        raise LifecycleError("summon_full_params inside another one with other options", unit=unit.name,
                             expected=outer, got=options,
                             remedy="Use the same options, or leave the outer one.")
    return True


def _require_rest(unit: Unit) -> None:
    settle_unit(unit)
    session = session_of(unit)
    if unit.face.in_use or in_backward() or (session is not None and session.pass_ is not Pass.REST):
        raise LifecycleError(
            "summon_full_params inside forward or backward", unit=unit.name, expected="a model at rest",
            got="BACKWARD" if in_backward() else "FORWARD",
            remedy="Call it before or after; inside its own forward a unit's parameters are whole anyway.",
        )


# ---------------------------------------------------------------------- wider, narrower
def _widen(unit: Unit, options: WideningOptions, opened: list[Widened]) -> None:
    unit.take_over_edits()
    session = session_of(unit)
    if session is None or not session.step.keep_gathered:
        unit.reshard()  # what a step left gathered; a backward that still needs it gathers again
    main = not options.rank0_only or all(comm.rank == 0 for comm in unit.groups.nontrivial)
    _SUMMONED[unit] = options
    for storage in unit.storages:
        widened = Widened(storage, options, main)
        widened.open()
        opened.append(widened)
    unit.face.reveal()


def _narrow_all(opened: list[tuple[Unit, list[Widened]]], options: WideningOptions) -> WritebackError | None:
    failure: WritebackError | None = None
    for unit, widened in opened:
        found = _narrow(unit, widened, options)
        failure = failure or found
    return failure


def _narrow(unit: Unit, widened: list[Widened], options: WideningOptions) -> WritebackError | None:
    replicate = unit.groups.replicate
    unit.face.conceal()
    edits, failure = [], None
    shown = [unit.face.shown(one.storage) for one in widened]
    try:
        edits = [one.edits(parameters) for one, parameters in zip(widened, shown, strict=True)]
    except WritebackError as error:
        failure = error
    edited = any(edits) or any(one.changed_in_place for one in widened)
    if options.broadcasts:
        failure, edited = _agree(unit, failure, edited)
    keep = options.writeback and failure is None
    leaves = [storage.leaves for storage in unit.storages]
    for one, changed in zip(widened, edits, strict=False):
        if keep:
            one.take_over(changed, replicate)
    for one, parameters in zip(widened, shown, strict=True):
        one.close(parameters, keep=keep, replicate=replicate)
        one.note_edits(keep and edited)
    _SUMMONED.pop(unit, None)
    if keep:
        unit.take_over_edits()
    else:
        unit.face.put_back()
    if any(storage.leaves is not old for storage, old in zip(unit.storages, leaves, strict=True)):
        (unit.collector.follow_leaves if holds_gradients(unit) else unit.collector.rebuild)()
    return failure


def _agree(unit: Unit, failure: WritebackError | None, edited: bool) -> tuple[WritebackError | None, bool]:
    """The main rank's failure is everybody's, and so are its edits."""
    device = unit.storages[0].compute_device if unit.storages else None
    flags = torch.tensor([int(failure is not None), int(edited)], dtype=torch.int32, device=device)
    for comm in unit.groups.nontrivial:
        comm.all_reduce(flags, Reduction.MAX).wait()
    failed, edited = map(bool, flags.tolist())
    if failure is None and failed:
        failure = WritebackError("Cannot writeback: the first rank's edit inside summon_full_params did not fit",
                                 unit=unit.name, remedy="See the error of the group's first rank.")
    return failure, edited
