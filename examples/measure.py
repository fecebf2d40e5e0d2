"""What a rank holds, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MB", "Bytes", "in_mb", "span", "state_bytes", "tensor_bytes", "unsharded_bytes"]

MB = 1e6


@dataclass(frozen=True)
class Bytes:
    """What one rank keeps between the backward pass and the end of a step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Count what this rank holds; call it after ``optimizer.step()`` and before ``zero_grad()``."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Bytes(
        tensor_bytes(parameters),
        tensor_bytes(p.grad for p in parameters if p.grad is not None),
        tensor_bytes(value for value in states if isinstance(value, Tensor)),
    )


def unsharded_bytes(model: nn.Module) -> Bytes:
    """What AdamW needs without sharding: two moments like the parameters, and a step count each."""
    size = tensor_bytes(model.parameters())
    return Bytes(size, size, 2 * size + 4 * len(list(model.parameters())))


def in_mb(nbytes: float) -> str:
    return f"{nbytes / MB:,.1f} MB"


def span(values: Sequence[int]) -> str:
    """One figure where all ranks agree, else the least and the most."""
    low, high = f"{min(values) / MB:,.1f}", f"{max(values) / MB:,.1f}"
    return f"{high} MB" if low == high else f"{low} to {high} MB"
