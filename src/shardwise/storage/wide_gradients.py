"""Whole gradients on the user's parameters inside a summon, and what becomes of them afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives, Reduction
from ..torch_private import allow_gradient_dtype
from .flat_storage import FlatStorage
from .global_norm import GradientKind, plain

__all__ = ["WideGradients"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class WideGradients:
    """The gradients of one storage while a summon is open on it.

    ``rest`` is what the visible parameters had before: rows, or one flat gradient. A gradient that
    any rank has is shown on all of them, with zeros for the rows of those that had none.
    """

    def __init__(self, storage: FlatStorage, kind: GradientKind) -> None:
        self._storage, self._kind = storage, kind
        self._rest = [seen.parameter.grad for seen in storage.visible]
        self._before = [parameter.grad for parameter in storage.parameters]
        self._backup: list[Tensor | None] | None = None
        self._dtype = storage.stored_dtype
        self.whole: list[Tensor | None] | None = None  #: None: gradients are not widened

    # ------------------------------------------------------------------ wider
    def keep_backup(self) -> None:
        """The gradients are whole as they are; note their values."""
        self._backup = [None if gradient is None else plain(gradient).clone() for gradient in self._rest]

    def gather(self, device: torch.device, *, keep: bool) -> None:
        """Whole gradients on ``device`` (a collective, also where they are not kept)."""
        storage = self._storage
        here = storage.compute_device
        table = torch.tensor([*self._flags(), self._code()], dtype=torch.int32, device=here)
        storage.comm.all_reduce(table, Reduction.MAX).wait()
        *anywhere, code = (int(value) for value in table.tolist())
        self.whole = [None] * len(storage.parameters)  # pyright: ignore[reportAttributeAccessIssue]
        if not any(anywhere):
            return
        self._dtype = _DTYPES[code]
        full = storage.gather_flat(self._rows().to(here)).to(device)
        if keep:
            self.whole = [storage.pick(full, i) if has else None for i, has in enumerate(anywhere)]

    def _flags(self) -> list[int]:
        if self._storage.hidden:
            return [int(self._rest[0] is not None)] * len(self._storage.parameters)
        return [int(gradient is not None) for gradient in self._rest]

    def _code(self) -> int:
        return _code_of(self._rest)

    def _rows(self) -> Tensor:
        """This rank's gradients, laid out like the shard."""
        storage = self._storage
        rows = torch.zeros(storage.layout.shard_numel, dtype=self._dtype, device=storage.shard.device)
        for seen, gradient in zip(storage.visible, self._rest, strict=True):
            if gradient is not None:
                storage.local_view(seen, rows).copy_(plain(gradient))
        return rows

    def show(self) -> None:
        """Put the whole gradients on the user's parameters, whose ``.data`` is whole by now."""
        if self.whole is None:
            return
        for parameter, gradient in zip(self._storage.parameters, self.whole, strict=True):
            parameter.grad = None
            _set(parameter, gradient)

    # ------------------------------------------------------------------ narrower
    def assigned(self, shown: list[nn.Parameter | None]) -> list[Tensor | None]:
        """What the parameters show now; ``shown``: those that the module shows, new ones too."""
        old = self._storage.parameters
        return [(new if new is not None else mine).grad for new, mine in zip(shown, old, strict=True)]

    def settle(self, now: list[Tensor | None], *, writeback: bool) -> None:
        """Put gradients at rest on the visible parameters, which show rows by now.

        ``now``: what the parameters showed at the end of the summon.
        """
        if self._backup is not None:
            for gradient, value in zip(self._rest, self._backup, strict=True):
                if gradient is not None and value is not None:
                    plain(gradient).copy_(value)
        if writeback and self._changed(now):
            self._rest = self._taken_over(now)
        for parameter in self._storage.parameters:
            parameter.grad = None
        for seen, gradient in zip(self._storage.visible, self._rest, strict=True):
            _set(seen.parameter, gradient)
        for seen in self._storage.stepped:
            if self._rest[0] is not None and self._before[seen.indices[0]] is not None:
                _set(seen.parameter, self._storage.local_view(seen, plain(self._rest[0])))

    def _changed(self, now: list[Tensor | None]) -> bool:
        if self.whole is not None:
            return True
        return any(new is not old for new, old in zip(now, self._before, strict=True))

    def _taken_over(self, now: list[Tensor | None]) -> list[Tensor | None]:
        storage = self._storage
        if storage.hidden:
            return [self._flat_from(now)]
        taken: list[Tensor | None] = []
        for index, (gradient, old) in enumerate(zip(now, self._rest, strict=True)):
            if gradient is None or gradient is old:
                taken.append(gradient)
                continue
            seen = storage.visible[index]
            rows = self._local(index, gradient)
            fits = old is not None and old.dtype is rows.dtype
            target = old if fits and old is not None else self._fresh(seen.size, seen.stride, rows.dtype)
            plain(target).copy_(rows.as_strided(seen.size, seen.stride))
            taken.append(target)
        return taken

    def _local(self, index: int, gradient: Tensor) -> Tensor:
        storage = self._storage
        whole = tuple(gradient.shape) == storage.layout.parameters[index].shape
        rows = storage.rows_of(index, plain(gradient)) if whole else plain(gradient)
        return rows.to(storage.shard.device)

    def _fresh(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device=self._storage.shard.device)
        return self._kind.mark(made)

    def _flat_from(self, now: list[Tensor | None]) -> Tensor | None:
        storage, old = self._storage, self._rest[0]
        present = [gradient for gradient in now if gradient is not None]
        if not present:
            return old if self.whole is None else None
        dtype = present[0].dtype
        flat = old if old is not None and old.dtype is dtype else self._fresh(
            (storage.layout.shard_numel,), (1,), dtype)
        if flat is not old or self.whole is not None:
            plain(flat).zero_()
        for index, gradient in enumerate(now):
            if gradient is not None:
                seen = storage.hidden[index]
                rows = self._local(index, gradient)
                storage.local_view(seen, plain(flat)).copy_(rows.as_strided(seen.size, seen.stride))
        return flat

    def from_main(self, now: list[Tensor | None], *, main: bool, replicate: Collectives | None
                  ) -> list[Tensor | None]:
        """What the main rank's parameters showed, on every rank (collectives)."""
        storage, here = self._storage, self._storage.compute_device
        flags = torch.tensor([int(g is not None) for g in now], dtype=torch.int32, device=here)
        code = torch.tensor([_code_of(now)], dtype=torch.int32, device=here)
        groups = [comm for comm in (storage.comm, replicate) if comm is not None and comm.size > 1]
        for comm in groups:
            comm.broadcast(flags, 0).wait()
            comm.broadcast(code, 0).wait()
        full = torch.zeros(storage.layout.flat_numel, dtype=_DTYPES[int(code)], device=here)
        if main:
            for index, gradient in enumerate(now):
                if gradient is not None:
                    storage.pick(full, index).copy_(plain(gradient))
        for comm in groups:
            comm.broadcast(full, 0).wait()
        return [storage.pick(full, i) if has else None for i, has in enumerate(flags.tolist())]


def _code_of(gradients: list[Tensor | None]) -> int:
    """A number for the dtype, the largest where there are several."""
    return max((_DTYPES.index(g.dtype) for g in gradients if g is not None), default=0)


def _set(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is not None and gradient.dtype is not parameter.dtype:
        allow_gradient_dtype(parameter, gradient.dtype)
    parameter.grad = gradient
