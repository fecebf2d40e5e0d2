"""Were shards initialised in place of whole parameters, with one seed? Then every rank drew the same rows.

This happens where a unit gets memory by ``to_empty`` and each rank calls ``reset_parameters`` on its rows. The
ranks compare the beginnings of a few matrices, among the numbers that they exchange before the first forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..storage.flat_storage import FlatStorage
from ..torch_private import no_gradients
from .unit import Unit

__all__ = ["SLOTS", "beginnings", "warn_of_copies"]

#: how many matrices are compared
SLOTS = 4
_ELEMENTS = 8


def beginnings(units: Sequence[Unit], rank: int) -> list[tuple[str, int]]:
    """Of the first matrices that were filled by hand the name and a number for how this rank's rows begin.

    Always ``SLOTS`` of them. The number is this rank's own where there is nothing to compare: for constants, and
    where there are fewer matrices.
    """
    found: list[tuple[str, int]] = []
    for unit in units:
        for storage in unit.storages:
            if storage.filled_by_hand and storage.world_size > 1 and not storage.on_meta:
                found += [(f"{unit.fqn}.{spec.fqn}".lstrip("."), _number(storage, index, rank))
                          for index, spec in enumerate(storage.layout.parameters)
                          if len(spec.shape) > 1 and _everywhere(storage, index)]
            if len(found) >= SLOTS:
                return found[:SLOTS]
    return found + [("", -1 - rank)] * (SLOTS - len(found))


def _everywhere(storage: FlatStorage, index: int) -> bool:
    return all(storage.layout.span(index, rank).numel >= _ELEMENTS for rank in range(storage.world_size))


def _number(storage: FlatStorage, index: int, rank: int) -> int:
    offset = storage.layout.span(index, storage.rank).shard_offset
    with no_gradients():
        begin: Tensor = storage.shard[offset : offset + _ELEMENTS].detach().cpu()
        if bool(torch.all(begin == begin[0])):
            return -1 - rank
    return int.from_bytes(blake2b(bytes(begin.view(torch.uint8).tolist()), digest_size=7).digest(), "big")


def warn_of_copies(names: Sequence[str]) -> None:
    """Say that the rows of the matrices ``names`` are the same on all ranks."""
    warnings.warn(
        f"shardwise: all ranks hold the same rows of {', '.join(map(repr, names))}: to_empty() and reset_parameters() "
        "with one seed initialise each rank's rows alike, so the whole matrices are copies of one block. "
        "Call shardwise.materialise(model) in place of them, or load a checkpoint",
        RuntimeWarning, stacklevel=2)
