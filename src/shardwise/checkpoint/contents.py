"""What a checkpoint holds: the tensors of all ranks by name, and the parts that this rank writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..engine.build import owner_of
from ..errors import CheckpointError
from ..storage.flat_storage import FlatStorage
from .model_tensors import ModelTensor
from .safetensors_header import Entry, dtype_name

__all__ = ["Contents", "Piece", "is_mine", "model_contents", "replica"]


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements from ``start`` on of tensor ``name``, in row-major order, that this rank writes."""

    name: str
    start: int
    values: Tensor


@dataclass
class Contents:
    """Tensors that go into one set of files. ``entries`` and ``aliases`` are alike on all ranks."""

    entries: list[Entry] = field(default_factory=list[Entry])
    pieces: list[Piece] = field(default_factory=list[Piece])
    aliases: dict[str, str] = field(default_factory=dict[str, str])  #: dropped name -> kept name

    def add(self, entry: Entry, start: int, values: Tensor, *, mine: bool) -> None:
        """A tensor, and this rank's part of it if it is this rank's to write."""
        dtype_name(entry.dtype, entry.name)
        self.entries.append(entry)
        if mine and values.numel():
            self.pieces.append(Piece(entry.name, start, values))

    def on_host(self) -> Contents:
        """The same with copies of the values in host memory, which later training does not change."""
        copies = [replace(p, values=p.values.to("cpu", copy=True).contiguous()) for p in self.pieces]
        return replace(self, pieces=copies)


def replica(storage: FlatStorage) -> tuple[int, int]:
    """This rank's number among the ranks that hold the same rows, and how many they are."""
    unit = owner_of(storage.parameters[0])
    copies = unit.groups.replicate if unit is not None else None
    return (copies.rank, copies.size) if copies is not None else (0, 1)


def model_contents(tensors: Sequence[ModelTensor], dtype: torch.dtype | None, rank: int) -> Contents:
    """Parameters and persistent buffers; floating-point parameters in ``dtype`` (None: as stored).

    Replicas share the work: each writes every so-many-th parameter. What is not sharded is rank 0's.
    """
    contents = Contents()
    for number, tensor in enumerate(tensors):
        contents.add(Entry(tensor.fqn, _file_dtype(tensor, dtype), tensor.shape), tensor.start, tensor.values,
                     mine=is_mine(tensor.storage, number, rank))
        contents.aliases.update(dict.fromkeys(tensor.names[1:], tensor.fqn))
    _check_unique(contents.entries, contents.aliases)
    return contents


def is_mine(storage: FlatStorage | None, number: int, rank: int) -> bool:
    """Does this rank write its rows of the ``number``-th tensor?"""
    if storage is None:
        return rank == 0
    place, copies = replica(storage)
    return number % copies == place


def _file_dtype(tensor: ModelTensor, dtype: torch.dtype | None) -> torch.dtype:
    convert = dtype is not None and tensor.is_parameter and tensor.dtype.is_floating_point
    return dtype if convert and dtype is not None else tensor.dtype


def _check_unique(entries: Iterable[Entry], aliases: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in [*(entry.name for entry in entries), *aliases]:
        if name in seen:
            raise CheckpointError("two tensors of the model have one name", fqn=name,
                                  remedy="Rename one of the modules.")
        seen.add(name)
