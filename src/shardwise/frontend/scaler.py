"""``ShardedGradScaler``: loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.choose import collectives_for
from ..comm.collectives import Reduction
from ..comm.errands import Errand
from ..comm.mesh import default_group
from ..engine.traverse import map_tensors
from ..storage.optimizer_watch import adopt
from ..torch_private import AgreeingGradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(AgreeingGradScaler):
    """``torch.amp.GradScaler`` whose ranks skip a step together, with any gradients.

    torch's own scaler sees an infinity of another rank in gradients that are sharded by shardwise.
    This one asks all ranks of ``process_group`` (default: all) about every gradient of the
    optimizer: those of ignored parameters too, and also where a rank has none.

    ``device`` is where the loss is. Gradients may be on the CPU all the same, and in fp16.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale=init_scale, growth_factor=growth_factor,
                         backoff_factor=backoff_factor, growth_interval=growth_interval, enabled=enabled)
        self.process_group = process_group if process_group is not None or not self.is_enabled() else (
            default_group())

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale: a tensor, or any container of tensors."""
        if isinstance(outputs, Tensor) or not self.is_enabled():
            return super().scale(outputs)
        return map_tensors(outputs, super().scale)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """One that was made before its parameters became part of flat ones gets to see their gradients."""
        adopt(optimizer)

    @Errand("unscale_ of the gradient scaler")
    def agree(self, found: dict[torch.device, Tensor], device: torch.device) -> None:
        """An infinity on one rank is one on all. One small collective, whatever gradients there are."""
        assert self.process_group is not None
        worst = torch.zeros((1,), dtype=torch.float32, device=device)
        for flag in found.values():
            worst = torch.maximum(worst, flag.to(device))
        collectives_for(self.process_group, device).all_reduce(worst, Reduction.MAX).wait()
        if not found:
            found[device] = worst.view(())
        for flag in found.values():
            flag.copy_(worst.view(()))
