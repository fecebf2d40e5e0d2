"""What a module shows under a parameter's name: the user's object, or the leaf in use.

*At rest* a module shows the user's own object. *In use* (inside the unit's forward, and while
its backward runs) it shows the leaf, a view of the gathered buffer. This is the only place
that writes the tables in which modules keep their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..plan.ownership import OwnedParameter, Slot
from .flat_storage import FlatStorage

__all__ = ["FlatFace", "OriginalFace", "Showing"]


class Showing:
    """One slot with both of its faces."""

    __slots__ = ("index", "name", "slot", "storage", "table")

    def __init__(self, slot: Slot, storage: FlatStorage, index: int, table: dict[str, Any]) -> None:
        self.slot, self.storage, self.index = slot, storage, index
        self.table, self.name = table, slot.name


class OriginalFace:
    """``use_orig_params=True``: the user's parameters are registered, in ``module._parameters``."""

    def __init__(self) -> None:
        self.showings: list[Showing] = []
        self.in_use = False
        self._recurrent: list[tuple[nn.RNNBase, list[Any]]] = []

    def add(self, entry: OwnedParameter, storage: FlatStorage, index: int) -> None:
        """Show parameter ``index`` of ``storage`` in all slots of ``entry``."""
        for slot in entry.slots:
            self.showings.append(Showing(slot, storage, index, self._table(slot)))
            if isinstance(slot.module, nn.RNNBase) and all(m is not slot.module for m, _ in self._recurrent):
                self._recurrent.append((slot.module, []))

    def _table(self, slot: Slot) -> dict[str, Any]:
        return slot.module._parameters

    def show_leaves(self) -> None:
        """Show what forward computes with."""
        if self.in_use:
            return
        self.in_use = True
        for s in self.showings:
            s.table[s.name] = s.storage.leaves[s.index]
        self._follow_recurrent()

    def show_originals(self) -> None:
        """Show the user's own objects."""
        if not self.in_use:
            return
        self.in_use = False
        for s in self.showings:
            s.table[s.name] = s.storage.parameters[s.index]
        self._follow_recurrent()

    def _follow_recurrent(self) -> None:
        """Recurrent modules keep a second list of their weights; let it show the same."""
        for module, _ in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def strangers(self) -> list[tuple[Showing, Any]]:
        """Slots that show, at rest, another object than the one that shardwise put there."""
        return [
            (s, s.table.get(s.name)) for s in self.showings
            if s.table.get(s.name) is not s.storage.parameters[s.index]
        ]


class FlatFace(OriginalFace):
    """``use_orig_params=False``: one flat parameter is registered for each flat storage; the
    user's parameters are reachable as plain attributes, in ``module.__dict__``."""

    def _table(self, slot: Slot) -> dict[str, Any]:
        parameter = slot.module._parameters.pop(slot.name)
        slot.module.__dict__[slot.name] = parameter
        return slot.module.__dict__

    @staticmethod
    def register(module: nn.Module, storages: Sequence[FlatStorage]) -> None:
        """Make the shard of each storage a visible parameter of ``module``."""
        for number, storage in enumerate(storages):
            name = "_flat_param" if number == 0 else f"_flat_param_{number}"
            module._parameters[name] = storage.show_flat(name)
