"""The whole value of one parameter, gathered by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .flat_storage import FlatStorage

__all__ = ["gather_one"]


def gather_one(storage: FlatStorage, index: int, local: Tensor) -> Tensor:
    """Whole value of parameter ``index`` of ``storage`` from every rank's ``local`` rows (a collective)."""
    if storage.world_size == 1:
        return local.detach().clone()
    spec, form = storage.layout.parameters[index], storage.formats[index]
    spans = [storage.layout.span(index, rank) for rank in range(storage.world_size)]
    slot = max(span.numel for span in spans)
    mine = torch.zeros(slot, dtype=local.dtype, device=local.device)
    mine[: local.numel()] = form.flatten(local.detach()) if spec.shape else local.detach()
    everyone = torch.empty(slot * storage.world_size, dtype=local.dtype, device=local.device)
    storage.comm.all_gather(everyone, mine).wait()
    pieces = [everyone[rank * slot : rank * slot + span.numel] for rank, span in enumerate(spans)]
    return torch.cat(pieces).as_strided(spec.shape, form.strides(spec.shape)).clone()
