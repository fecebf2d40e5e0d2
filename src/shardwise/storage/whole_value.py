"""The whole value of one parameter, gathered by itself, and the way back of its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from .flat_storage import FlatStorage

__all__ = ["WholeValue", "gather_one"]


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


class WholeValue(torch.autograd.Function):
    """``WholeValue.apply(parameter, whole, storage, index)``: ``whole``, whose gradient goes to ``parameter``.

    Every rank computes the same from the whole value, so each keeps its own rows of the gradient and
    nothing is exchanged: the mean over ranks is what each of them has. (As DTensor's ``full_tensor`` does.)
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, whole: Tensor, storage: FlatStorage, index: int) -> Tensor:
        ctx.parameter, ctx.storage, ctx.index = parameter, storage, index
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameter, storage, index = ctx.parameter, ctx.storage, ctx.index
        if index < 0:
            size = storage.layout.shard_numel
            rows = gradients[0][storage.rank * size : (storage.rank + 1) * size]
        else:
            _, size, stride = storage.local_geometry(index)
            rows = storage.rows_of(index, gradients[0]).as_strided(size, stride)
        if parameter.grad is None:
            parameter.grad = rows.clone()  # through the class, which lets it count for all ranks
        else:
            parameter.grad.add_(rows)
        return None, None, None, None
