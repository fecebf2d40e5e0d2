"""``ShardedGradScaler``, where code written for ``torch.distributed.fsdp`` looks for it."""

from __future__ import annotations

from shardwise.frontend.scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
