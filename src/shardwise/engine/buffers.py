"""Buffers under mixed precision: cast for computation, given back exactly for checkpoints.

Each unit casts the floating-point buffers of its own modules by its own policy; others are never
touched. The original is kept beside its cast, and a checkpoint gets it bit for bit, as long as
the registered buffer is what the original casts to. A buffer that the module changed since goes
into a checkpoint with its new value in the original dtype. What is registered in a third dtype
is no result of the computation: it is a new original.

    buffers_for_compute      which buffers leave their dtype for computation, and for which one
    buffers_for_checkpoint   which buffers return to their original dtype
    cast_buffers             does either
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import WeakIdKeyDictionary

__all__ = ["CastBuffer", "UnitBuffers", "buffers_for_checkpoint", "buffers_for_compute", "cast_buffers"]


@dataclass(eq=False)
class CastBuffer:
    """One buffer: where it is registered, its original dtype, and the original while a cast stands in."""

    table: dict[str, Tensor | None]  #: the ``_buffers`` of its module
    name: str
    dtype: torch.dtype
    original: Tensor | None = None
    cast_to: torch.dtype | None = None

    @property
    def now(self) -> Tensor | None:
        """What is registered."""
        return self.table.get(self.name)

    def exact(self) -> Tensor | None:
        """What a checkpoint should hold in place of what is registered; None: that itself."""
        now, original = self.now, self.original
        if now is None or original is None or now.dtype is not self.cast_to:
            return None
        with torch.no_grad():
            fresh = original.to(device=now.device, dtype=now.dtype)
            return original if _same_bits(fresh, now) else now.to(self.dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


# original -> {dtype: (its cast, the original's version then)}: a tensor registered twice stays one
_CASTS: Any = WeakIdKeyDictionary()


@dataclass(eq=False)
class _ModuleBuffers:
    """The buffers of one module; the first unit that takes the module in decides on their dtype."""

    table: dict[str, Tensor | None]
    dtype: torch.dtype | None
    owner: weakref.ref[UnitBuffers]
    noted: dict[str, CastBuffer] = field(default_factory=dict[str, CastBuffer])

    def note(self, name: str, now: Tensor) -> CastBuffer:
        """Take in what is registered; the dtype of what is not cast is the original one."""
        entry = self.noted.get(name)
        if entry is None:
            entry = self.noted[name] = CastBuffer(self.table, name, now.dtype)
        elif entry.original is None:
            entry.dtype = now.dtype
        return entry

    def note_all(self) -> None:
        """The same for every floating-point buffer."""
        for name, now in self.table.items():
            if now is not None and now.is_floating_point():
                self.note(name, now)


_MODULES: weakref.WeakKeyDictionary[nn.Module, _ModuleBuffers] = weakref.WeakKeyDictionary()


class UnitBuffers:
    """The buffers of one unit's own modules, by their names below the unit."""

    def __init__(self) -> None:
        self._modules: dict[str, _ModuleBuffers] = {}
        self._mixed: list[tuple[_ModuleBuffers, torch.dtype]] = []  #: those with a dtype for computation
        self.suspended = False  #: they stay as they were registered (full precision)

    def observe(self, modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype | None) -> None:
        """Note the original dtypes, and ``dtype`` for computation (None: as registered)."""
        for prefix, module in modules:
            known = _MODULES.get(module)
            if known is None or known.owner() is None:
                known = _MODULES[module] = _ModuleBuffers(module._buffers, dtype, weakref.ref(self))
            known.note_all()
            self._modules[prefix] = known
            if known.dtype is not None:
                self._mixed.append((known, known.dtype))

    @property
    def original_dtypes(self) -> dict[str, torch.dtype]:
        """The original dtype of each floating-point buffer."""
        for module in self._modules.values():
            module.note_all()
        return {f"{prefix}.{name}" if prefix else name: entry.dtype
                for prefix, module in self._modules.items() for name, entry in module.noted.items()}

    @property
    def is_cast(self) -> bool:
        """Does a cast stand in for any buffer now?"""
        return any(entry.original is not None for entry in self.entries())

    def entries(self) -> Iterator[CastBuffer]:
        """Every floating-point buffer noted so far."""
        for module in self._modules.values():
            yield from module.noted.values()

    def to_cast(self) -> Iterator[tuple[CastBuffer, torch.dtype]]:
        """Buffers whose dtype is not the one for computation, with that one."""
        for module, dtype in self._mixed if not self.suspended else ():
            for name, now in module.table.items():
                if now is not None and now.dtype is not dtype and now.is_floating_point():
                    yield module.note(name, now), dtype

    def for_compute(self) -> None:
        """Cast what the policy names. Safe to call again."""
        cast_buffers(buffers_for_compute([self]))

    def for_checkpoint(self) -> None:
        """Register the originals again, with what changed since folded in. Safe to call again."""
        cast_buffers(buffers_for_checkpoint([self]))

    def exact(self, fqn: str) -> Tensor | None:
        """What a checkpoint should hold for buffer ``fqn``; None: what is registered."""
        prefix, _, name = fqn.rpartition(".")
        module = self._modules.get(prefix)
        entry = module.noted.get(name) if module is not None else None
        return entry.exact() if entry is not None else None


def buffers_for_compute(units: Iterable[UnitBuffers]) -> list[tuple[CastBuffer, torch.dtype]]:
    """Which buffers of ``units`` leave their dtype for computation, and for which one."""
    return [chosen for unit in units for chosen in unit.to_cast()]


def buffers_for_checkpoint(units: Iterable[UnitBuffers]) -> list[tuple[CastBuffer, torch.dtype]]:
    """Which buffers of ``units`` return to their original dtype, and which that is."""
    return [(entry, entry.dtype) for unit in units for entry in unit.entries() if entry.original is not None]


def cast_buffers(
    chosen: Sequence[tuple[CastBuffer, torch.dtype]], device: torch.device | None = None
) -> None:
    """Register each buffer in its dtype, on ``device`` (None: where it is)."""
    for entry, dtype in chosen:
        now = entry.now
        if now is None:
            entry.original = None
            continue
        with torch.inference_mode(mode=False), torch.no_grad():
            if entry.original is not None and dtype is entry.dtype:
                entry.table[entry.name] = _given_back(entry, now)
                entry.original = None
            elif now.dtype is not dtype or device not in (None, now.device):
                entry.dtype, entry.original, entry.cast_to = now.dtype, now, dtype
                entry.table[entry.name] = _cast_of(now, dtype, device or now.device)


def _cast_of(original: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    casts: dict[torch.dtype, tuple[weakref.ref[Tensor], int]] = _CASTS.setdefault(original, {})
    reference, seen = casts.get(dtype, (None, 0))
    known = reference() if reference is not None else None
    version = -1 if original.is_inference() else original._version
    if known is None or known.device != device:
        known = original.to(device=device, dtype=dtype)
    elif version != seen:
        known.copy_(original)
    casts[dtype] = (weakref.ref(known), version)
    return known


def _given_back(entry: CastBuffer, now: Tensor) -> Tensor:
    """The tensor that the user registered, with the changed value in it where it changed."""
    original, exact = entry.original, entry.exact()
    if exact is None or original is None:
        return now
    if exact is original or original.shape != exact.shape or original.is_inference():
        return exact
    return original.copy_(exact)
