"""Values for parameters and buffers on the meta device, module by module, the same for every world size.

Modules are initialised in the order in which they are constructed: registration order, children
before the module that holds them. Each is given whole parameters for as long as its initialisation
takes, of which every rank keeps its rows; all ranks draw the same random numbers, those that the
first rank would. So the values are the ones of ``torch.manual_seed(s); Model()`` on one device, where
modules initialise themselves by ``reset_parameters`` at the end of their construction, and never
more than one module is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..comm.errands import Errand
from ..engine.build import units_below
from ..engine.hooks import unit_of
from ..engine.unit import Unit
from ..errors import ConfigurationError, OptionTypeError, name_list
from ..storage.faces import Showing, standing_in
from ..storage.filling import put_rows
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import give_memory, home_of

__all__ = ["Initialiser", "LeftToOuter", "materialise", "materialise_with"]

InitFunction = Callable[[nn.Module], None]


@dataclass(frozen=True)
class LeftToOuter:
    """The ``param_init_fn`` of a wrapper whose outer one will initialise everything in order."""

    param_init_fn: InitFunction | None

    def __call__(self, module: nn.Module) -> None:
        """Only what the outer wrapper cannot wait for."""
        if self.param_init_fn is not None:
            self.param_init_fn(module)


@dataclass(frozen=True)
class Initialiser:
    """How modules get values, where, and which are left alone."""

    param_init_fn: InitFunction | None = None
    device: torch.device | None = None  #: None: where the unit computes
    ignored: AbstractSet[nn.Module] = field(default_factory=frozenset[nn.Module])
    ignored_parameters: AbstractSet[nn.Parameter] = field(default_factory=frozenset[nn.Parameter])


def materialise(
    module: nn.Module, param_init_fn: InitFunction | None = None, *, device: torch.device | str | None = None
) -> nn.Module:
    """Give values to everything at and below ``module`` that is on the meta device; gives ``module``.

    For a model that was built under ``torch.device("meta")``, before or (which needs the least memory)
    after ``fully_shard``. A collective where the model is sharded.

    Args:
        param_init_fn: called with each module that has parameters or buffers on the meta device, to
            give memory and values to those of its own (``to_empty(device=..., recurse=False)``).
            Default: memory, and the module's ``reset_parameters()``.
        device: where to (default: where the model computes).

    Raises ``ConfigurationError`` for a module that has neither, before anything is changed, and for
    parameters or buffers that were left without values.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise OptionTypeError("param_init_fn must be callable", expected="a callable that takes a module",
                              got=type(param_init_fn).__name__)
    chosen = torch.device(device) if device is not None else None
    materialise_with(module, Initialiser(param_init_fn, chosen))
    return module


@Errand("materialise")
def materialise_with(root: nn.Module, how: Initialiser) -> None:
    """``materialise``, with what a front end ignores."""
    units = [unit for _, unit in units_below(root)]
    storages = [s for unit in units for s in unit.storages if s.on_meta]
    tasks = list(_tasks(root, storages, how))
    _require_initialisers(tasks, how)
    device = how.device or (storages[0].compute_device if storages else torch.device("cpu"))
    if not (waiting := [unit for unit in units if any(s.on_meta for s in unit.storages)]) and not tasks:
        return
    for unit in waiting:
        unit.leave_meta(how.device)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_same_draws(waiting, device))
        stack.enter_context(device)  # for what is made meanwhile, whatever device the model is built under
        for unit in units:  # a flat parameter must not be taken for one of the module's own
            stack.callback(unit.face.conceal)
            unit.face.reveal()
        done: set[Any] = set()
        for task in tasks:
            task.run(how, done)
    _require_untouched(waiting)


# ---------------------------------------------------------------------- what is to be done
@dataclass(frozen=True)
class _Task:
    """One module with parameters or buffers on the meta device."""

    name: str
    module: nn.Module
    showings: dict[str, Showing]  #: sharded parameters, by local name
    loose: dict[str, nn.Parameter]  #: others
    buffers: list[str]

    @property
    def names(self) -> list[str]:
        return [*self.showings, *self.loose, *self.buffers]

    def run(self, how: Initialiser, done: set[Any]) -> None:
        """Initialise, and keep what no module did before (tied parameters: the first one's values)."""
        fills = how.param_init_fn is None
        device = torch.device("meta") if not fills else how.device
        wholes = {name: self._whole(name, device) for name in (*self.showings, *self.loose)}
        with standing_in(self.module, wholes) as table:
            if how.param_init_fn is not None:
                how.param_init_fn(self.module)
            else:
                for name in self.buffers:
                    self.module._buffers[name] = _unset(self.module._buffers[name], how.device)
                reset: Any = getattr(self.module, "reset_parameters", None)
                reset()
            found = {name: table[name] for name in wholes}
        self._check({**found, **{name: self.module._buffers[name] for name in self.buffers}}, fills)
        for name, value in found.items():
            self._keep(name, value.data, done)

    def _whole(self, name: str, device: torch.device | None) -> nn.Parameter:
        showing = self.showings.get(name)
        if showing is None:
            user = self.loose[name]
            memory = _unset(user, device)
        else:
            storage, index = showing.storage, showing.index
            user, shape = storage.parameters[index], storage.layout.parameters[index].shape
            like = torch.empty_strided(shape, storage.formats[index].strides(shape),
                                       dtype=storage.stored_dtype, device="meta")
            memory = _unset(like, device or storage.compute_device)
        made = nn.Parameter(memory, user.requires_grad)
        made.__dict__.update(user.__dict__)  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def _keep(self, name: str, value: Tensor, done: set[Any]) -> None:
        showing = self.showings.get(name)
        key = id(self.loose[name]) if showing is None else (id(showing.storage), showing.index)
        if key in done:
            return
        done.add(key)
        if showing is None:
            give_memory(self.loose[name], value)
        else:
            put_rows(showing.storage, showing.index, value)

    def _check(self, found: dict[str, Any], filled: bool) -> None:
        left = [name for name, value in found.items() if value is None or value.is_meta
                or (filled and _is_unset(value))]
        if left:
            raise ConfigurationError(
                f"{'reset_parameters()' if filled else 'param_init_fn'} left parameters or buffers without "
                f"values ({name_list(left)})", unit=self.name or type(self.module).__name__,
                expected="values for all that the module itself registers", got=type(self.module).__name__,
                remedy="Compute them there too: buffers that no checkpoint holds can come from nowhere else.",
            )


def _tasks(root: nn.Module, storages: Sequence[FlatStorage], how: Initialiser) -> Iterator[_Task]:
    showings: dict[nn.Module, dict[str, Showing]] = {}
    for storage in storages:
        for showing in storage.shown_by:
            showings.setdefault(showing.slot.module, {})[showing.name] = showing
    for name, module in _in_order_of_construction(root, how.ignored):
        task = _Task(
            name, module, showings.get(module, {}),
            {n: p for n, p in module._parameters.items() if p is not None and p.is_meta
             and home_of(p) is None and p not in how.ignored_parameters},
            [n for n, b in module._buffers.items() if b is not None and b.is_meta],
        )
        if task.names:
            yield task


def _in_order_of_construction(
    root: nn.Module, ignored: AbstractSet[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module._parameters) in seen or module in ignored:
            return
        seen.add(id(module._parameters))
        for child_name, child in module._modules.items():
            if child is not None:
                yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, _itself(module)

    yield from visit("", root)


def _itself(module: nn.Module) -> nn.Module:
    """The module behind a wrapper."""
    unit = unit_of(module)
    inner = unit.modules if unit is not None else ()
    return next((one for one in inner if one._parameters is module._parameters), module)


# ---------------------------------------------------------------------- checks
def _require_initialisers(tasks: Sequence[_Task], how: Initialiser) -> None:
    for task in tasks:
        if how.param_init_fn is None and not callable(getattr(task.module, "reset_parameters", None)):
            raise ConfigurationError(
                f"cannot materialise a module from the meta device ({name_list(task.names)})",
                unit=task.name or type(task.module).__name__,
                expected="param_init_fn, or a reset_parameters() method", got=type(task.module).__name__,
                remedy="Pass param_init_fn, or define reset_parameters() for what this module registers.",
            )


def _require_untouched(units: Sequence[Unit]) -> None:
    """An initialisation that goes on into submodules would undo theirs, which came before it."""
    for unit in units:
        for seen in (s for storage in unit.storages for s in storage.visible):
            if seen.parameter.data_ptr() != seen.pointer:
                raise ConfigurationError(
                    "param_init_fn gave new memory to a submodule's parameter, which has its values already",
                    fqn=seen.fqn, unit=unit.name, expected="a function that initialises one module",
                    remedy="Call to_empty(device=..., recurse=False).",
                )


_CHECKABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _unset(like: Tensor | None, device: torch.device | None) -> Tensor:
    """Memory like that of ``like``, with values that no initialisation gives."""
    assert like is not None
    memory = torch.empty_like(like, device=device or "cpu", requires_grad=False)
    if memory.is_meta:
        return memory
    if memory.dtype in _CHECKABLE:
        memory.fill_(float("nan"))
    elif memory.dtype is not torch.bool and not memory.is_floating_point():
        memory.fill_(torch.iinfo(memory.dtype).min)
    return memory


def _is_unset(value: Tensor) -> bool:
    if value.dtype in _CHECKABLE:
        return bool(value.isnan().any())
    if value.dtype is torch.bool or value.is_floating_point() or not value.dtype.is_signed:
        return False
    return bool((value == torch.iinfo(value.dtype).min).any())


# ---------------------------------------------------------------------- random numbers
@contextmanager
def _same_draws(units: Sequence[Unit], device: torch.device) -> Iterator[None]:
    """Inside, every rank draws what the first one would. A rank with another state goes on from that."""
    groups = list(dict.fromkeys(group for unit in units for group in unit.groups.nontrivial))
    generators = _generators(device)
    mine = [read() for read, _ in generators]
    common = [_from_first(state, groups, device) for state in mine]
    for (_, write), state in zip(generators, common, strict=True):
        write(state)
    try:
        yield
    finally:
        for (_, write), own, state in zip(generators, mine, common, strict=True):
            if not torch.equal(own, state):
                write(own)


def _from_first(state: Tensor, groups: Sequence[Collectives], device: torch.device) -> Tensor:
    moved = state.to(device, copy=True)
    for group in groups:
        group.broadcast(moved, 0).wait()
    return moved.cpu()


def _generators(device: torch.device) -> list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    found: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = [
        (torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        api: Any = torch.get_device_module(device)
        found.append((lambda: api.get_rng_state(device), lambda state: api.set_rng_state(state, device)))
    return found
