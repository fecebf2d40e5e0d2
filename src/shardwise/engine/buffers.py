"""Buffers under mixed precision: cast for computation, given back exactly for checkpoints.

Each unit casts its own floating-point buffers by its own policy; others are never touched.
The original value is kept, and a checkpoint gets it bit for bit, unless the module changed the
buffer since the cast: then it gets the changed value in the original dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["UnitBuffers", "buffers_for_checkpoint", "buffers_for_compute", "cast_buffers"]


@dataclass(eq=False)
class _Original:
    """A buffer as the user registered it, and the cast one that stands in for it."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    value: Tensor | None = None
    cast: Tensor | None = None
    version: int = 0

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


def buffers_for_compute(
    originals: Iterable[tuple[str, _Original]], dtype: torch.dtype | None
) -> list[tuple[_Original, torch.dtype]]:
    """Which buffers take part in computation in another dtype than the original, and which."""
    if dtype is None:
        return []
    return [(entry, dtype) for _, entry in originals if entry.dtype.is_floating_point]


def buffers_for_checkpoint(
    originals: Iterable[tuple[str, _Original]],
) -> list[tuple[_Original, torch.dtype]]:
    """Which buffers a checkpoint holds in another dtype than the present one, and which."""
    return [(entry, entry.dtype) for _, entry in originals if entry.cast is not None]


def cast_buffers(chosen: Sequence[tuple[_Original, torch.dtype]], device: torch.device | None = None) -> None:
    """Register each chosen buffer in its dtype, on ``device`` (None: where it is)."""
    for entry, dtype in chosen:
        now = entry.now
        if now is None or (now.dtype is dtype and device in (None, now.device)):
            continue
        with torch.no_grad():
            if entry.cast is None:
                entry.value = now
                entry.cast = now.to(device=device or now.device, dtype=dtype)
                entry.version = entry.cast._version
                entry.module._buffers[entry.name] = entry.cast
            else:
                entry.module._buffers[entry.name] = _given_back(entry, now, dtype)
                entry.cast = entry.value = None


def _given_back(entry: _Original, now: Tensor, dtype: torch.dtype) -> Tensor:
    """The original value, or the changed one in the original dtype."""
    untouched = now is entry.cast and now._version == entry.version and entry.value is not None
    if untouched and entry.value is not None:
        return entry.value
    changed = now.to(dtype)
    if entry.value is not None and entry.value.shape == changed.shape:
        entry.value.copy_(changed)  # the tensor that the user registered stays the registered one
        return entry.value
    return changed


class UnitBuffers:
    """The buffers of one unit's own modules."""

    def __init__(self) -> None:
        self._originals: list[tuple[str, _Original]] = []
        self.dtype: torch.dtype | None = None

    def observe(self, modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype | None) -> None:
        """Note the original dtype of every buffer, under its name below the unit."""
        self.dtype = dtype
        for prefix, module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    fqn = f"{prefix}.{name}" if prefix else name
                    self._originals.append((fqn, _Original(module, name, buffer.dtype)))

    @property
    def is_cast(self) -> bool:
        """Does any buffer stand in for an original of another dtype now?"""
        return any(entry.cast is not None for _, entry in self._originals)

    def for_compute(self) -> None:
        """Cast what the policy names."""
        if self.dtype is not None:
            cast_buffers(buffers_for_compute(self._originals, self.dtype))

    def for_checkpoint(self) -> None:
        """Give back the original dtypes and values."""
        if self.dtype is not None:
            cast_buffers(buffers_for_checkpoint(self._originals))

    def exact(self, fqn: str) -> Tensor | None:
        """The value of buffer ``fqn`` (below the unit) that a checkpoint should hold, if cast now."""
        for name, entry in self._originals:
            now = entry.now
            if name == fqn and entry.cast is not None and now is not None:
                if now is entry.cast and now._version == entry.version:
                    return entry.value
                return now.to(entry.dtype)
        return None
