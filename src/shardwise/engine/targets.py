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

_Dims = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A visible parameter, the targets that it stands for, and where its part of a chunk lies."""

    storage: FlatStorage
    seen: Visible
    numbers: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Cut:
    """How one chunk is cut at once into the gradients of one storage: far quicker than a view for each.

    ``sizes`` are those of all pieces, gaps included; ``places`` tell which of them is whose, in the order of
    ``bindings``. Those that have not one dimension are given their shape afterwards, in place.
    """

    __slots__ = ("_shaped", "bindings", "kind", "places", "seen", "sizes", "storage")

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
        self.bindings, self.seen = list(bindings), [binding.seen for binding in bindings]
        self.kind = storage.kind.tensor_class  #: the class of the gradients
        self.places = [places[binding] for binding in bindings]
        # with the strides of those that are not plain, or have no dimension
        self._shaped: list[tuple[int, _Dims, _Dims | None]] = []
        for place, binding in zip(self.places, bindings, strict=True):
            plain = binding.size and torch.empty(binding.size, device="meta").stride() == tuple(binding.stride)
            if len(binding.size) != 1 or not plain:
                self._shaped.append((place, binding.size, None if plain else binding.stride))

    def gradients(self, chunk: Tensor) -> list[Tensor]:
        """What ``chunk`` has for each of ``bindings``; to be called without grad mode.

        They share its memory, but no version counter: like gradients that autograd makes, they are no views.
        """
        pieces = chunk.unsafe_split_with_sizes(self.sizes)
        for place, size, stride in self._shaped:
            if stride is None:
                pieces[place].resize_(*size)  # one by one: a tuple takes twice as long
            else:
                pieces[place].as_strided_(size, stride)
        gradients = [*map(pieces.__getitem__, self.places)]
        for gradient in gradients:
            gradient.__class__ = self.kind
        return gradients


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
                bindings.append(Binding(storage, seen, mine, seen.size, seen.stride, offset))
        cuts.append(Cut(storage, bindings, plan.chunk_numel))
    return cuts
