"""A checkpoint in the host memory of some ranks: every tensor is cut into even parts, one for each holder.

    elements of a tensor    | part 0 | part 1 | part 2 | part 3 |
    holder                      0        1        2        3
    and with copies=2           2        3        0        1        also

So everyone knows where every element lies, whatever layout it came from and whatever it goes into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import CheckpointError
from .safetensors_header import Entry
from .streams import Range, Row

__all__ = ["MEMORY", "MemoryCheckpoint", "Parts", "Table"]

MEMORY = "the checkpoint in memory"


@dataclass(frozen=True)
class Parts:
    """Part ``p`` of a tensor of ``numel`` elements has those from ``numel * p // count`` on."""

    count: int

    def span(self, numel: int, part: int) -> tuple[int, int]:
        """First element of a part, and the one behind its last."""
        return numel * part // self.count, numel * (part + 1) // self.count

    def cut(self, numel: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements ``[start, stop)`` by the parts that they are in: part, first, and the one behind the last."""
        while start < stop:
            part = ((start + 1) * self.count - 1) // numel
            end = min(stop, self.span(numel, part)[1])
            yield part, start, end
            start = end


@dataclass(frozen=True, eq=False)
class Table:
    """What a checkpoint in memory holds; the same on all ranks. Tensors have numbers, in this order."""

    key: str
    state: str  #: what files have in state.json
    entries: Mapping[str, Sequence[Entry]]
    aliases: Mapping[str, str]
    parts: Parts

    @cached_property
    def numbered(self) -> list[Entry]:
        """All tensors by number."""
        return [entry for entries in self.entries.values() for entry in entries]

    @cached_property
    def numbers(self) -> dict[tuple[str, str], int]:
        """By base (model, optimizer, extra) and name."""
        keys = [(base, entry.name) for base, entries in self.entries.items() for entry in entries]
        return {key: number for number, key in enumerate(keys)}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """All that occur, in an order that ranks agree on."""
        return list(dict.fromkeys(entry.dtype for entry in self.numbered))

    def cut(self, number: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """``Parts.cut`` of tensor ``number``."""
        return self.parts.cut(self.numbered[number].numel, start, stop)

    def first(self, number: int, part: int) -> int:
        """The first element of tensor ``number`` in ``part``."""
        return self.parts.span(self.numbered[number].numel, part)[0]

    def part_of(self, number: int, element: int) -> int:
        """In which part an element of tensor ``number`` is."""
        return next(self.cut(number, element, element + 1))[0]

    def memory(self, part: int) -> list[Tensor]:
        """New host memory for ``part`` of every tensor, 1-D."""
        spans = [self.parts.span(entry.numel, part) for entry in self.numbered]
        return [torch.empty(stop - start, dtype=entry.dtype)
                for entry, (start, stop) in zip(self.numbered, spans, strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class MemoryCheckpoint:
    """This rank's share of a checkpoint that some ranks hold in host memory; see ``save_to_memory``.

    It can be loaded as often as is wanted. Its memory is free when nothing refers to it any longer.
    """

    table: Table
    held: Mapping[int, list[Tensor]]  #: part -> its elements of every tensor

    @property
    def nbytes(self) -> int:
        """Host memory of this rank's share; 0 on ranks that hold none."""
        return sum(values.nbytes for part in self.held.values() for values in part)

    def __repr__(self) -> str:
        parts = ", ".join(map(str, self.held)) or "none"
        return f"MemoryCheckpoint(parts {parts} of {self.table.parts.count}, {self.nbytes} bytes)"

    def require_whole(self, arrived: Sequence[Sequence[Row]]) -> None:
        """Raise ``CheckpointError`` unless the ranges from all ranks fill what is held here."""
        counts: dict[tuple[int, int], int] = {}
        for number, start, stop in (row for rows in arrived for row in rows):
            place = (self.table.part_of(number, start), number)
            counts[place] = counts.get(place, 0) + stop - start
        lacking = {number: counts.get((part, number), 0) - values.numel()
                   for part, memory in self.held.items() for number, values in enumerate(memory)
                   if counts.get((part, number), 0) != values.numel()}
        if lacking:
            number, surplus = next(iter(lacking.items()))
            name = self.table.numbered[number].name
            raise CheckpointError(
                f"{'no rank has' if surplus < 0 else 'several ranks have'} some rows of {len(lacking)} tensors",
                fqn=name, expected="every row on one rank of the process group, or on replicas",
                remedy="Call it on all ranks that hold the model, or on those of a whole replica.")

    def ranges(self, rows: Sequence[Row]) -> list[Range]:
        """Where the elements of ``rows`` lie in what is held here."""
        found: list[Range] = []
        for number, start, stop in rows:
            part = self.table.part_of(number, start)
            first = self.table.first(number, part)
            found.append(Range(self.held[part][number], start - first, stop - first))
        return found
