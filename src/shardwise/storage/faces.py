"""What a module shows under a parameter's name: the user's object, or the leaf in use.

*At rest* a module shows the user's own object. *In use* (inside the unit's forward, and while
its backward runs) it shows the leaf, a view of the gathered buffer. This is the only place
that writes the tables in which modules keep their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_not
from typing import Any, NoReturn

from torch import nn
from torch.func import functional_call
from torch.nn.utils import stateless

from ..errors import LifecycleError
from ..plan.ownership import OwnedParameter, Slot
from ..torch_private import under_way
from .flat_storage import FlatStorage

__all__ = ["OriginalFace", "Showing", "refuse_for_one_call", "standing_in"]


@contextmanager
def standing_in(module: nn.Module, values: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Any]]:
    """Register ``values`` in place of what ``module`` registers under their names, for the length of a block.

    Gives the table, to see what stands there at the end of it.
    """
    table = module._parameters
    before = {name: table[name] for name in values}
    table.update(values)
    try:
        yield table
    finally:
        table.update(before)


class Showing:
    """One slot with both of its faces.

    ``faces``: those of all units that show this very slot (a module below several of them).
    """

    __slots__ = ("faces", "index", "name", "slot", "storage", "table")

    def __init__(self, slot: Slot, storage: FlatStorage, index: int, table: dict[str, Any]) -> None:
        self.slot, self.storage, self.index = slot, storage, index
        self.table, self.name = table, slot.name
        twin = next((s for s in storage.shown_by if s.table is table and s.name == slot.name), None)
        self.faces: list[OriginalFace] = [] if twin is None else twin.faces

    @property
    def in_use(self) -> bool:
        """Does any unit need the leaf here now?"""
        return any(face.in_use for face in self.faces)

    def present(self) -> Any:
        """What stands under the name now. (A flat unit's parameters are attributes until one is assigned.)"""
        found = self.table.get(self.name)
        return self.slot.module._parameters.get(self.name) if found is None else found


#: one table with both faces of its slots, each to be written in one go: leaves, and originals but for shared slots
_Table = tuple[dict[str, Any], dict[str, nn.Parameter], dict[str, nn.Parameter]]


def refuse_for_one_call(fqn: str, storage: FlatStorage, shown: Any) -> NoReturn:
    """Raise ``LifecycleError``: ``shown`` stands in for parameter ``fqn`` for the length of a call."""
    raise LifecycleError(
        "torch.func.functional_call with other parameters: a sharded module computes with its own, which its unit "
        "gathers", fqn=fqn, unit=storage.unit, rank=storage.rank, expected="the module's own parameters",
        got=f"another {type(shown).__name__}",
        remedy="Call it on an unsharded model: copy.deepcopy(model) inside summon_full_params.",
    )


class OriginalFace:
    """``use_orig_params=True``: the user's parameters are registered, in ``module._parameters``."""

    __slots__ = (
        "_cleared", "_expected", "_recurrent", "_shared", "_tables", "at_rest", "in_use", "outdated",
        "showings",
    )

    def __init__(self) -> None:
        self.showings: list[Showing] = []
        self.in_use = False
        self._tables: list[_Table] = []
        self._expected: tuple[list[dict[str, Any]], list[str], list[nn.Parameter]] = ([], [], [])
        self._shared: list[Showing] = []  # slots that other units show as well
        self.outdated = True  #: there are other leaves or originals than ``_tables`` was made from
        self._recurrent: list[tuple[nn.RNNBase, list[Any]]] = []
        self.at_rest: list[tuple[dict[str, Any], str, Any]] = []  #: more that is shown at rest
        self._cleared = False

    def add(self, entry: OwnedParameter, storage: FlatStorage, index: int) -> None:
        """Show parameter ``index`` of ``storage`` in all slots of ``entry``."""
        for slot in entry.slots:
            showing = Showing(slot, storage, index, self._table(slot))
            showing.faces.append(self)
            for face in showing.faces:
                face.outdated = True
            self.showings.append(showing)
            storage.shown_by.append(showing)
            if isinstance(slot.module, nn.RNNBase) and all(m is not slot.module for m, _ in self._recurrent):
                self._recurrent.append((slot.module, []))

    def _table(self, slot: Slot) -> dict[str, Any]:
        return slot.module._parameters

    def show_leaves(self) -> None:
        """Show what forward computes with."""
        if self.in_use:
            return
        self.in_use = True
        for table, leaves, _ in self._tables if not self.outdated else self._current_tables():
            table.update(leaves)
        if self._recurrent:
            self._follow_recurrent()

    def clear_the_way(self) -> None:
        """Show nothing that is for rest only: the unit's own forward begins."""
        self._cleared = True
        for table, name, value in self.at_rest:
            if table.get(name) is value:
                del table[name]

    def show_originals(self) -> None:
        """Show the user's own objects."""
        if not self.in_use:
            return
        self.in_use = False
        for table, _, originals in self._tables if not self.outdated else self._current_tables():
            table.update(originals)
        for s in self._shared:
            if not s.in_use:
                s.table[s.name] = s.storage.parameters[s.index]
        if self._cleared:
            self._cleared = False
            for table, name, value in self.at_rest:
                table.setdefault(name, value)
        if self._recurrent:
            self._follow_recurrent()

    def claim(self, showing: Showing) -> Any:
        """Take what was assigned under a name and registered elsewhere than the face keeps it."""
        found = showing.slot.module._parameters.pop(showing.name, None)
        showing.table[showing.name] = found
        return found

    def reveal(self) -> None:
        """Register the user's parameters, where a flat one is registered in their place."""

    def conceal(self) -> None:
        """The counterpart of ``reveal``."""

    def shown(self, storage: FlatStorage) -> list[Any]:
        """What stands under the first name of each parameter of ``storage``."""
        first: dict[int, Any] = {}
        for s in self.showings:
            if s.storage is storage:
                first.setdefault(s.index, s.table.get(s.name))
        return [first.get(index) for index in range(len(storage.parameters))]

    def put_back(self) -> None:
        """Show the user's own objects where others were put in their places."""
        for showing, _ in self.strangers():
            showing.table[showing.name] = showing.storage.parameters[showing.index]

    def retarget(self, showing: Showing, storage: FlatStorage, index: int) -> None:
        """Let a slot show another parameter from now on: it was tied to that one."""
        showing.storage.shown_by.remove(showing)
        showing.storage, showing.index = storage, index
        storage.shown_by.append(showing)
        self.outdated = True

    def copied(self, module_of: Callable[[nn.Module], nn.Module],
               storage_of: Callable[[FlatStorage], FlatStorage]) -> OriginalFace:
        """The same face over copies of the modules and storages."""
        made = type(self)()
        for s in self.showings:
            storage, slot = storage_of(s.storage), Slot(module_of(s.slot.module), s.slot.name, s.slot.fqn)
            made.add(OwnedParameter(storage.parameters[s.index], [slot]), storage, s.index)
        return made

    def _follow_recurrent(self) -> None:
        """Recurrent modules keep a second list of their weights; let it show the same."""
        for module, _ in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def strangers(self) -> list[tuple[Showing, Any]]:
        """Slots that show, at rest, another object than the one that shardwise put there.

        Raises ``LifecycleError`` where it stands there for one ``torch.func.functional_call``.
        """
        found = [
            (s, s.table.get(s.name)) for s in self.showings
            if s.table.get(s.name) is not s.storage.parameters[s.index] and not s.in_use
        ]
        if found and under_way(functional_call, stateless.functional_call):
            refuse_for_one_call(found[0][0].slot.fqn, found[0][0].storage, found[0][1])
        return found

    def undisturbed(self) -> bool:
        """Are there no strangers? The quick form; it may say no for slots that other units show."""
        if self.outdated:
            self._current_tables()
        tables, names, originals = self._expected
        return not (self._shared or any(map(is_not, map(dict.get, tables, names), originals)))

    def _current_tables(self) -> list[_Table]:
        """Leaves and originals by table."""
        if self.outdated:
            self.outdated, tables = False, dict[int, _Table]()
            self._shared = [s for s in self.showings if len(s.faces) > 1]
            for s in self.showings:
                _, leaves, originals = tables.setdefault(id(s.table), (s.table, {}, {}))
                leaves[s.name] = s.storage.leaves[s.index]
                if len(s.faces) == 1:
                    originals[s.name] = s.storage.parameters[s.index]
            self._tables = list(tables.values())
            rows = [(table, name, p) for table, _, originals in self._tables for name, p in originals.items()]
            self._expected = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
        return self._tables
