"""What the user's parameters were like when the engine last looked: is there anything to take over?

Asked before every forward of a unit, so it is a few comparisons of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..torch_private import without_torch_function
from .visible import Visible

__all__ = ["LastSeen"]

_place, _stride = Tensor.data_ptr, Tensor.stride
_is_trained, _shape, _dtype = attrgetter("requires_grad"), attrgetter("shape"), attrgetter("dtype")


class LastSeen:
    """The places in memory and the ``requires_grad`` of the visible parameters of one storage."""

    __slots__ = ("_forms", "_placeless", "_places", "_trained")

    def __init__(self) -> None:
        self._places: tuple[list[nn.Parameter], list[int]] | None = None
        self._forms: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])  # shapes and strides
        self._placeless: list[nn.Parameter] = []
        self._trained: list[bool] = []

    def forget_places(self) -> None:
        """The engine itself has moved a parameter."""
        self._places = None

    def unchanged(self, visible: Sequence[Visible], dtype: torch.dtype) -> bool:
        """Was nothing moved, cast, frozen or trained since? To be asked without torch functions."""
        if self._places is None:
            self._places = [seen.parameter for seen in visible], [seen.pointer for seen in visible]
            self._forms = [seen.form[0] for seen in visible], [seen.form[1] for seen in visible]
            self._placeless = [seen.parameter for seen in visible if not seen.pointer]
        parameters, expected = self._places
        return (
            [*map(_place, parameters)] == expected
            and [*map(_is_trained, parameters)] == self._trained
            and [*map(_shape, parameters)] == self._forms[0] and [*map(_stride, parameters)] == self._forms[1]
            # the place tells the dtype, but for parameters without memory
            and {dtype}.issuperset(map(_dtype, self._placeless))
        )

    def follow_requires_grad(self, visible: Sequence[Visible], leaves: Sequence[nn.Parameter]) -> bool:
        """Give the leaves the ``requires_grad`` of the user's objects; did anything change?"""
        changed = False
        with without_torch_function():
            self._trained = [seen.parameter.requires_grad for seen in visible]
        for seen, wanted in zip(visible, self._trained, strict=True):
            for index in seen.indices:
                if leaves[index].requires_grad != wanted:
                    leaves[index].requires_grad_(wanted)
                    changed = True
        return changed
