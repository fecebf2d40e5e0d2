"""How a tensor of any dense strides lies in flat memory, row by row.

A shard holds whole rows (what lies behind one index of dim 0), so dim 0 must be outermost.
The order of the other dims is kept: a channels_last weight stays channels_last when gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["MemoryFormat", "format_of"]


@dataclass(frozen=True)
class MemoryFormat:
    """``order`` lists the dims from outermost to innermost; dim 0 comes first."""

    order: tuple[int, ...]

    def strides(self, size: Sequence[int]) -> tuple[int, ...]:
        """Element strides of a dense tensor of ``size``."""
        strides, step = [0] * len(size), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(size[dim], 1)
        return tuple(strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Its elements in memory order, 1-D; a view where the strides allow."""
        return tensor.permute(self.order).reshape(-1) if tensor.dim() > 1 else tensor.reshape(-1)


def format_of(tensor: Tensor) -> MemoryFormat:
    """The format that comes closest to the strides of ``tensor`` with dim 0 outermost."""
    inner = range(1, tensor.dim())
    strides = tensor.stride()
    dense = 0 not in strides and not tensor.is_contiguous()
    order = sorted(inner, key=lambda dim: -strides[dim]) if dense else list(inner)
    return MemoryFormat((0, *order) if tensor.dim() else ())
