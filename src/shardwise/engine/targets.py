"""Where the gradient of one leaf goes before a reduction, and where its part of the sum goes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..plan.reduction import Piece, ReductionPlan
from ..storage.flat_buffer import FlatBuffer
from ..storage.flat_storage import FlatStorage, Visible

__all__ = ["Binding", "Cut", "Target", "cuts_of"]

_Dims = tuple[int, ...] | None


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A visible parameter, the targets that it stands for, and where its part of a chunk lies."""

    storage: FlatStorage
    seen: Visible
    numbers: tuple[int, ...]
    kind: type[Tensor]  #: the class of its gradient
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Cut:
    """How one chunk is cut at once into the gradients of one storage: far quicker than a view for each.

    ``sizes`` are those of all pieces, gaps included. ``rows`` tell which piece is whose, with the size of those
    that are to be viewed, and the strides of those that no view can have.
    """

    __slots__ = ("rows", "sizes", "storage")

    def __init__(self, storage: FlatStorage, bindings: Sequence[Binding], chunk_numel: int) -> None:
        self.storage, self.sizes = storage, list[int]()
        numels, places, end = {binding: prod(binding.size) for binding in bindings}, dict[Binding, int](), 0
        for binding in sorted(bindings, key=lambda one: one.offset if numels[one] else -1):
            if numels[binding] and binding.offset > end:
                self.sizes.append(binding.offset - end)
            places[binding] = len(self.sizes)
            self.sizes.append(numels[binding])
            if numels[binding]:
                end = binding.offset + numels[binding]
        if chunk_numel > end:
            self.sizes.append(chunk_numel - end)
        self.rows: list[tuple[int, Binding, _Dims, _Dims]] = []  # in the order of the parameters
        for binding in bindings:
            plain = torch.empty(binding.size, device="meta").stride() == tuple(binding.stride)
            self.rows.append((places[binding], binding, None if len(binding.size) == 1 else binding.size,
                              None if plain else binding.stride))

    def pieces(self, chunk: Tensor) -> Sequence[Tensor]:
        """The pieces of ``chunk``; to be called without grad mode.

        They share its memory, but no version counter: like gradients that autograd makes, they are no views.
        """
        return chunk.unsafe_split_with_sizes(self.sizes)


class Target:
    """One leaf, and where its gradient goes."""

    __slots__ = ("index", "kept", "leaf", "number", "pieces", "storage", "views")

    def __init__(self, number: int, storage: FlatStorage, index: int, pieces: tuple[Piece, ...], own: int) -> None:
        self.number = number
        self.storage, self.index, self.pieces = storage, index, pieces
        self.leaf = storage.leaves[index]
        self.views: list[Tensor] = []
        self.kept = slice(own, own + storage.layout.span(index, storage.rank).numel)  #: of this rank's chunk

    def make_views(self, buffer: FlatBuffer) -> None:
        """Views of ``buffer`` for life: shaped like the leaf where it is one piece."""
        shape = self.storage.layout.parameters[self.index].shape
        if len(self.pieces) == 1:
            strides = self.storage.formats[self.index].strides(shape)
            self.views = [buffer.view(self.pieces[0].target, shape, strides)]
        else:
            self.views = [buffer.view(piece.target, (piece.numel,), (1,)) for piece in self.pieces]

    def unsent(self) -> Tensor:
        """What the views hold, in memory of its own, shaped like the leaf."""
        shape = self.storage.layout.parameters[self.index].shape
        if len(self.views) == 1:
            return self.views[0].clone()
        flat = self.leaf.new_zeros(prod(shape), dtype=self.views[0].dtype if self.views else None)
        for piece, view in zip(self.pieces, self.views, strict=True):
            flat[piece.source : piece.source + piece.numel] = view
        return flat.as_strided(shape, self.storage.formats[self.index].strides(shape))

    def sources(self, gradient: Tensor) -> Sequence[Tensor]:
        """The parts of ``gradient`` that belong to ``views``."""
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if len(self.views) == 1:
            return (dense,)
        flat = self.storage.formats[self.index].flatten(dense)
        return [flat[piece.source : piece.source + piece.numel] for piece in self.pieces]


def cuts_of(live: Sequence[FlatStorage], targets: Sequence[Target], plan: ReductionPlan) -> list[Cut]:
    """How this rank's chunk is cut into the gradients of each of the ``live`` storages."""
    numbers = {(id(target.storage), target.index): target.number for target in targets}
    cuts: list[Cut] = []
    for k, storage in enumerate(live):
        base, bindings = plan.base[k], list[Binding]()
        for seen in storage.visible:
            mine = tuple(numbers[id(storage), i] for i in seen.indices if (id(storage), i) in numbers)
            if mine:
                offset = base if storage.hidden and base is not None else plan.own[k][seen.indices[0]]
                bindings.append(Binding(storage, seen, mine, storage.kind.tensor_class, seen.size, seen.stride, offset))
        cuts.append(Cut(storage, bindings, plan.chunk_numel))
    return cuts
