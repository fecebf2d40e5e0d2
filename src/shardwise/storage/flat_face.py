"""What a module shows with ``use_orig_params=False``: flat parameters are registered, the user's are attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.func import functional_call
from torch.nn.utils import stateless

from ..errors import WritebackError
from ..plan.ownership import Slot
from ..torch_private import under_way
from .faces import OriginalFace, Showing, refuse_for_one_call
from .flat_storage import FlatStorage
from .sharded_parameter import home_of

__all__ = ["FlatFace"]


class FlatFace(OriginalFace):
    """``use_orig_params=False``: one flat parameter is registered for each flat storage; the
    user's parameters are reachable as plain attributes, in ``module.__dict__``."""

    def __init__(self) -> None:
        super().__init__()
        self._flat: tuple[dict[str, Any], dict[str, nn.Parameter]] = ({}, {})
        self._orders: list[tuple[nn.Module, list[str]]] = []  # registered names before sharding
        self._revealed = False

    def _table(self, slot: Slot) -> dict[str, Any]:
        module = slot.module
        if all(known is not module for known, _ in self._orders):
            self._orders.append((module, [*module._parameters, slot.name]))
        parameter = module._parameters.pop(slot.name, None)
        if parameter is not None:
            module.__dict__[slot.name] = parameter
        return module.__dict__

    def register(self, module: nn.Module, storages: Sequence[FlatStorage]) -> None:
        """Make the shard of each storage a visible parameter of ``module``."""
        for number, storage in enumerate(storages):
            name = "_flat_param" if number == 0 else f"_flat_param_{number}"
            flat = storage.visible[0].parameter if storage.hidden else storage.show_flat(name)
            module._parameters[name] = self._flat[1][name] = flat
        self._flat = (module._parameters, self._flat[1])

    def copied(self, module_of: Callable[[nn.Module], nn.Module],
               storage_of: Callable[[FlatStorage], FlatStorage]) -> OriginalFace:
        made = super().copied(module_of, storage_of)
        assert isinstance(made, FlatFace)
        made._orders = [(module_of(module), names) for module, names in self._orders]
        return made

    def strangers(self) -> list[tuple[Showing, Any]]:
        for name, flat in self._flat[1].items() if not self._revealed else ():
            shown, home = self._flat[0].get(name), home_of(flat)
            if shown is not flat and home is not None:
                if under_way(functional_call, stateless.functional_call):
                    refuse_for_one_call(name, home[0], shown)
                raise WritebackError(
                    "Cannot writeback: a flat parameter was replaced in its module", fqn=name, unit=home[0].unit,
                    rank=home[0].rank, expected="the object that was registered there",
                    got=f"another {type(shown).__name__}", remedy="Change it in place, or edit the originals.",
                )
        return super().strangers()

    def reveal(self) -> None:
        self._revealed = True
        for name in self._flat[1]:
            del self._flat[0][name]
        for showing in self.showings:
            showing.slot.module._parameters[showing.name] = showing.table.pop(showing.name)
        for module, names in self._orders:
            table = module._parameters
            ordered = {name: table.pop(name) for name in names if name in table}
            rest = dict(table)
            table.clear()
            table.update(ordered | rest)

    def conceal(self) -> None:
        if not self._revealed:
            return
        self._revealed = False
        for showing in self.showings:
            showing.table[showing.name] = showing.slot.module._parameters.pop(showing.name, None)
        self._flat[0].update(self._flat[1])
