"""What the user sees of a flat parameter at rest, and where its memory lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .flat_buffer import BufferPool

__all__ = ["Place", "Visible", "version_of"]


@dataclass(frozen=True)
class Place:
    """Where a unit computes, and where its shards live."""

    device: torch.device
    pool: BufferPool
    offload: bool = False  #: shards on the host
    pin_memory: bool = True


@dataclass(eq=False, slots=True)
class Visible:
    """A parameter object that the user sees at rest, and the part of the shard it shows."""

    parameter: nn.Parameter
    fqn: str
    offset: int  #: in the shard, elements
    size: tuple[int, ...]
    stride: tuple[int, ...]
    indices: tuple[int, ...]  #: the leaves that it stands for
    pointer: int = 0  #: where its memory was when it was last pointed at the shard …
    form: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  #: … and its shape and strides

    def remember(self) -> None:
        """The parameter was pointed at the shard just now."""
        self.pointer, self.form = self.parameter.data_ptr(), (tuple(self.parameter.shape), self.parameter.stride())

    @property
    def moved(self) -> bool:
        """Does it show other memory, or the same in another layout? To be asked without torch functions."""
        shown = self.parameter
        return (shown.data_ptr() != self.pointer or (tuple(shown.shape), shown.stride()) != self.form
                or shown.is_conj())

    @property
    def numel(self) -> int:
        return self.parameter.numel()


def version_of(parameter: nn.Parameter) -> int:
    """Grows with each change in place, as an optimizer's step; 0 where torch does not count."""
    try:
        return parameter._version
    except RuntimeError:  # made in inference mode
        return 0
