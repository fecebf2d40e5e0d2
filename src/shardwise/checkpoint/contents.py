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

__all__ = ["Contents", "Piece", "Writers", "model_contents", "replicas_of"]


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


class Writers:
    """Which rank of a group writes rows that several hold: replicas take turns, one tensor after the other.

    ``replicas[r]``: of rank ``r``, as ``replicas_of`` gives them. What is not sharded is rank 0's.
    """

    def __init__(self, tensors: Sequence[ModelTensor], rank: int, replicas: Sequence[Sequence[int]]) -> None:
        self._rank = rank
        self._alike = {storage: [other for other, said in enumerate(replicas) if said[number : number + 1] == [mine]]
                       if mine >= 0 else [rank]
                       for number, (storage, mine) in enumerate(zip(_storages(tensors), replicas[rank], strict=True))}

    def mine(self, storage: FlatStorage | None, number: int) -> bool:
        """Does this rank write its rows of the ``number``-th tensor?"""
        if storage is None:
            return self._rank == 0
        alike = self._alike[storage]
        return alike[number % len(alike)] == self._rank


def replicas_of(tensors: Sequence[ModelTensor]) -> list[int]:
    """For each storage a number that ranks have in common if they hold the same rows; -1 where no other has them.

    It is what was agreed when the model was sharded, so it holds after some of the ranks are lost.
    """
    units = [owner_of(storage.parameters[0]) for storage in _storages(tensors)]
    copies = [unit.groups.replicate if unit is not None else None for unit in units]
    return [comm.members[0] if comm is not None else -1 for comm in copies]


def _storages(tensors: Sequence[ModelTensor]) -> list[FlatStorage]:
    return list(dict.fromkeys(tensor.storage for tensor in tensors if tensor.storage is not None))


def model_contents(tensors: Sequence[ModelTensor], dtype: torch.dtype | None, writers: Writers) -> Contents:
    """Parameters and persistent buffers; floating-point parameters in ``dtype`` (None: as stored)."""
    contents = Contents()
    for number, tensor in enumerate(tensors):
        contents.add(Entry(tensor.fqn, _file_dtype(tensor, dtype), tensor.shape), tensor.start, tensor.values,
                     mine=writers.mine(tensor.storage, number))
        contents.aliases.update(dict.fromkeys(tensor.names[1:], tensor.fqn))
    _check_unique(contents.entries, contents.aliases)
    return contents


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
