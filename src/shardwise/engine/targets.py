"""Where the gradient of one leaf goes before a reduction, and where its part of the sum goes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.reduction import Piece
from ..storage.flat_buffer import FlatBuffer
from ..storage.flat_storage import FlatStorage, Visible

__all__ = ["Binding", "Target"]


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


class Target:
    """One leaf, and where its gradient goes."""

    __slots__ = ("index", "leaf", "number", "pieces", "storage", "views")

    def __init__(self, number: int, storage: FlatStorage, index: int, pieces: tuple[Piece, ...]) -> None:
        self.number = number
        self.storage, self.index, self.pieces = storage, index, pieces
        self.leaf = storage.leaves[index]
        self.views: list[Tensor] = []

    def make_views(self, buffer: FlatBuffer) -> None:
        """Views of ``buffer`` for life: shaped like the leaf where it is one piece."""
        shape = self.storage.layout.parameters[self.index].shape
        if len(self.pieces) == 1:
            strides = self.storage.formats[self.index].strides(shape)
            self.views = [buffer.view(self.pieces[0].target, shape, strides)]
        else:
            self.views = [buffer.view(piece.target, (piece.numel,), (1,)) for piece in self.pieces]

    def sources(self, gradient: Tensor) -> Sequence[Tensor]:
        """The parts of ``gradient`` that belong to ``views``."""
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if len(self.views) == 1:
            return (dense,)
        flat = self.storage.formats[self.index].flatten(dense)
        return [flat[piece.source : piece.source + piece.numel] for piece in self.pieces]
