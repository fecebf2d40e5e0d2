"""What the user's parameters were like when the engine last looked: is there anything to take over?

Asked before every forward of a unit, so what was seen is one number: comparing it touches no other memory than
the parameters' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter

from torch import Tensor, nn

from ..torch_private import without_torch_function
from .visible import Visible

__all__ = ["LastSeen"]

_place, _numel, _stride = Tensor.data_ptr, Tensor.numel, Tensor.stride
_is_trained, _dtype, _is_conjugate = attrgetter("requires_grad"), attrgetter("dtype"), Tensor.is_conj


class LastSeen:
    """The places in memory and the ``requires_grad`` of the visible parameters of one storage."""

    __slots__ = ("_expected", "_trained", "_watched")

    def __init__(self) -> None:
        self._expected: int | None = None  # a fingerprint of 64 bits
        self._watched: list[nn.Parameter] = []
        self._trained: list[bool] = []

    def forget_places(self) -> None:
        """The engine itself has moved a parameter."""
        self._expected = None

    def unchanged(self, visible: Sequence[Visible], shard: Tensor) -> bool:
        """Was nothing moved, cast, frozen or trained since? To be asked without torch functions. No on meta."""
        if self._expected is None:
            self._look(visible, shard)
        seen = self._watched
        return (
            hash((*map(_place, seen), *map(_is_trained, seen), *map(_numel, seen), *map(_stride, seen),
                  *map(_dtype, seen))) == self._expected
            and not shard.is_meta and not (shard.is_complex() and any(map(_is_conjugate, seen)))
        )

    def _look(self, visible: Sequence[Visible], shard: Tensor) -> None:
        self._watched = [seen.parameter for seen in visible]
        self._expected = hash((
            *[seen.pointer for seen in visible], *self._trained,
            *[prod(seen.form[0]) for seen in visible], *[seen.form[1] for seen in visible],
            *[shard.dtype] * len(visible),
        ))

    def follow_requires_grad(self, visible: Sequence[Visible], leaves: Sequence[nn.Parameter]) -> bool:
        """Give the leaves the ``requires_grad`` of the user's objects; did anything change?"""
        changed = False
        with without_torch_function():
            self._trained = [seen.parameter.requires_grad for seen in visible]
        self._expected = None
        for seen, wanted in zip(visible, self._trained, strict=True):
            for index in seen.indices:
                if leaves[index].requires_grad != wanted:
                    leaves[index].requires_grad_(wanted)
                    changed = True
        return changed
