"""Whole parameters for a full state dict, gathered one unit at a time.

While the state dict of a unit's root module is made, each of its flat parameters is gathered
once and cut into the parameters; where only a submodule's is made, each parameter is gathered
on its own. What was made is remembered for the dict that it went into, so that tied
parameters share memory there, whichever units their names belong to.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..storage.flat_storage import FlatStorage
from ..storage.whole_value import gather_one
from ..torch_private import WeakIdKeyDictionary
from .rows import rows_now

__all__ = ["Wholes", "wholes_for"]

_MADE: Any = WeakIdKeyDictionary()


class Wholes:
    """The whole parameters in one state dict."""

    def __init__(self) -> None:
        self._flats: dict[FlatStorage, Tensor] = {}
        self._made: dict[tuple[FlatStorage, int], weakref.ref[Tensor] | None] = {}

    @torch.no_grad()
    def get(
        self, storage: FlatStorage, index: int, *, unit_at_once: bool, host: bool, keep: bool
    ) -> Tensor | None:
        """Parameter ``index``, on the host if ``host``; None if not to ``keep``; a collective in any case."""
        key = (storage, index)
        if key in self._made:
            made = self._made[key]
            return made() if made is not None else None
        if storage.widened and not storage.whole:
            self._require_absent(storage, keep=keep)
            self._made[key] = None
            return None
        whole = self._gather(storage, index, unit_at_once)
        if not keep:
            self._made[key] = None
            return None
        part = storage.owned[index].parallel
        if part is not None:
            whole = part.spread(whole)  # what the bare module has
        if host:
            whole = whole.cpu()
        self._made[key] = weakref.ref(whole)
        return whole

    @staticmethod
    def _require_absent(storage: FlatStorage, *, keep: bool) -> None:
        if keep:
            raise CheckpointError(
                "inside summon_full_params(rank0_only=True) only the first rank can give a full state dict",
                unit=storage.unit, rank=storage.rank,
                remedy="Use FullStateDictConfig(rank0_only=True), or summon on all ranks.")

    def _gather(self, storage: FlatStorage, index: int, unit_at_once: bool) -> Tensor:
        if storage.widened:
            return storage.parameters[index].detach().clone()
        if not unit_at_once:
            return gather_one(storage, index, rows_now(storage, index).to(storage.compute_device))
        flat = self._flats.get(storage)
        if flat is None:
            shard = storage.shard.to(storage.compute_device)
            flat = shard if storage.world_size == 1 else storage.gather_flat(shard)
            self._flats[storage] = flat
        return storage.pick(flat, index).clone()

    def forget(self, storage: FlatStorage) -> None:
        """Free the gathered flat parameter."""
        self._flats.pop(storage, None)


def wholes_for(destination: dict[str, Any]) -> Wholes:
    """What was made for ``destination`` so far. A plain dict cannot be remembered: each time anew."""
    if type(destination) is dict:
        return Wholes()
    if destination not in _MADE:
        _MADE[destination] = Wholes()
    return _MADE[destination]
