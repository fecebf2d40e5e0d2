"""Widening: the user's own parameter objects show whole values for a while, then rows again.

``p.data`` becomes a view of the gathered flat parameter and ``p.grad`` the whole gradient; the
object stays. Narrowing takes over what the user did meanwhile: changes in place, ``.data =``,
``.grad =`` (a new ``nn.Parameter`` is taken over afterwards, like one assigned at rest).

On one rank parameters are whole at rest, so nothing is gathered; a backup answers for
``writeback=False``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..errors import WritebackError
from .flat_storage import FlatStorage
from .guard import guard, unguard
from .sharded_parameter import home_of
from .visible import version_of
from .wide_gradients import WideGradients

__all__ = ["Widened", "WideningOptions"]


@dataclass(frozen=True)
class WideningOptions:
    """What is shown, where, and whether edits stay."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    @property
    def broadcasts(self) -> bool:
        """Do the edits of the main rank reach the others?"""
        return self.rank0_only and self.writeback


class Widened:
    """One storage while a summon is open on it. ``main``: this rank sees whole values."""

    def __init__(self, storage: FlatStorage, options: WideningOptions, main: bool) -> None:
        self.storage, self.options, self.main = storage, options, main
        self.device = torch.device("cpu") if options.offload_to_cpu else storage.shard.device
        self.full: Tensor | None = None  #: [N*S] gathered; None where nothing had to be
        self._backup = storage.shard.clone() if storage.world_size == 1 and not options.writeback else None
        self._pointers: list[int] = []
        self._versions: list[int] = []
        self._gradients = WideGradients(storage, storage.kind)
        self._guarded = False  # rows must not be computed with; whole values may be

    # ------------------------------------------------------------------ wider
    def open(self) -> None:
        """Gather (a collective, also on ranks that keep nothing) and show."""
        storage = self.storage
        stays = storage.world_size == 1 and self.device == storage.shard.device
        with torch.inference_mode(mode=False), torch.no_grad():
            if not stays:
                full = storage.gather_flat(storage.shard.to(storage.compute_device))
                self.full = full.to(self.device) if self.main else None
                del full
            if self.options.with_grads and stays and not storage.hidden:
                if not self.options.writeback:
                    self._gradients.keep_backup()
            elif self.options.with_grads:
                self._gradients.gather(self.device, keep=self.main)
            storage.widened = True
            if self.full is not None:
                storage.whole = True
                self._guarded = unguard([storage])
                for index, parameter in enumerate(storage.parameters):
                    parameter.data = storage.pick(self.full, index)
            self._pointers = [parameter.data_ptr() for parameter in storage.parameters]
            self._versions = [version_of(parameter) for parameter in storage.parameters]
            if self.main:
                self._gradients.show()

    # ------------------------------------------------------------------ narrower
    def edits(self, shown: list[nn.Parameter | None]) -> list[tuple[int, Tensor]]:
        """Values that the user assigned (not in place), by parameter. Raises ``WritebackError``.

        ``shown``: what the module shows now under each parameter's first name.
        """
        if not self.main:
            return []
        changed = [(i, p.data) for i, p in enumerate(shown) if p is not None and self._assigned(i, p)]
        dtypes = {value.dtype for _, value in changed}
        moved = len(changed) == len(shown) and len(dtypes) == 1 and not self.options.broadcasts
        for index, value in changed:
            self._check(index, value, value.dtype if moved else self.storage.stored_dtype)
        return changed

    @property
    def changed_in_place(self) -> bool:
        """Was any of the parameters changed so, on this rank?"""
        return [version_of(parameter) for parameter in self.storage.parameters] != self._versions

    def note_edits(self, edited: bool) -> None:
        """Let the count of changes grow if any rank ``edited`` what is kept, and only then."""
        storage = self.storage
        seen = 0 if storage.hidden else version_of(storage.parameters[0]) - self._versions[0]
        storage.edits += int(edited) - seen

    def _assigned(self, index: int, parameter: nn.Parameter) -> bool:
        if parameter is self.storage.parameters[index]:
            return parameter.data_ptr() != self._pointers[index]
        return home_of(parameter) is None  # one that has a home was tied, not given a value

    def _check(self, index: int, value: Tensor, dtype: torch.dtype) -> None:
        storage, spec = self.storage, self.storage.layout.parameters[index]
        expected = f"{spec.shape} {dtype}"
        if tuple(value.shape) != spec.shape or value.dtype is not dtype:
            raise WritebackError(
                "Cannot writeback: inside summon_full_params a parameter was given a value that does not fit",
                fqn=spec.fqn, unit=storage.unit, rank=storage.rank, expected=expected,
                got=f"{tuple(value.shape)} {value.dtype}",
                remedy="Assign the whole parameter in its own dtype.",
            )

    def take_over(self, changed: list[tuple[int, Tensor]], replicate: Collectives | None) -> None:
        """Bring edits into the shard: every rank its own, or the main rank's to all (collectives)."""
        storage = self.storage
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.options.broadcasts:
                self._from_main(changed, replicate)
                return
            size = storage.layout.shard_numel
            if self.full is not None:
                storage.shard.copy_(self.full[storage.rank * size : (storage.rank + 1) * size])
            if changed and changed[0][1].dtype is not storage.stored_dtype:
                storage.settle_in(storage.renewed(changed[0][1].dtype))
            for index, value in changed:
                span = storage.layout.span(index, storage.rank)
                rows = storage.rows_of(index, value)
                storage.shard[span.shard_offset : span.shard_offset + span.numel] = rows

    def _from_main(self, changed: list[tuple[int, Tensor]], replicate: Collectives | None) -> None:
        storage, shard, here = self.storage, self.storage.shard, self.storage.compute_device
        size = storage.layout.shard_numel
        if replicate is None or replicate.rank == 0:
            if self.main:
                full = (shard if self.full is None else self.full).to(here, copy=self.full is None)
                for index, value in changed:
                    storage.pick(full, index).copy_(value)
            else:
                full = torch.empty(storage.layout.flat_numel, dtype=shard.dtype, device=here)
            if storage.world_size > 1:
                storage.comm.broadcast(full, 0).wait()
            shard.copy_(full[storage.rank * size : (storage.rank + 1) * size])
        if replicate is not None and replicate.size > 1:
            rows = shard.to(here)
            replicate.broadcast(rows, 0).wait()
            shard.copy_(rows)

    def close(self, shown: list[nn.Parameter | None], *, keep: bool, replicate: Collectives | None) -> None:
        """Show rows again; what was gathered goes. ``keep``: with the gradients of what is ``shown``."""
        storage = self.storage
        with torch.inference_mode(mode=False), torch.no_grad():
            now = self._gradients.assigned(shown)
            if keep and self.options.broadcasts and self.options.with_grads:
                now = self._gradients.from_main(now, main=self.main, replicate=replicate)
            storage.widened, storage.whole, self.full = False, storage.world_size == 1, None
            if self._backup is not None:
                storage.shard.copy_(self._backup)
            for parameter in storage.parameters:
                parameter.grad = None
            for seen in (*storage.visible, *storage.hidden):
                storage.point_at_shard(seen)
            if self._guarded:
                guard([storage])
            self._gradients.settle(now, writeback=keep)
