"""The optimizer's step on the accelerator over parameters and state, or state alone, that live on the host.

With CPU offload an optimizer steps on the host. Here what lives there travels to the device in
buckets of bounded size, is stepped there, and comes back into the memory it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..storage.sharded_parameter import home_of
from ..torch_private import allow_gradient_dtype

__all__ = ["streamed_step"]


@torch.no_grad()
def streamed_step(
    optimizer: torch.optim.Optimizer, device: torch.device | None = None, *,
    state_device: torch.device | None = None, bucket_bytes: int = 256 * 2**20,
) -> None:
    """``optimizer.step()``, run on ``device`` over at most ``bucket_bytes`` of parameters at a time.

    For optimizers that update each parameter by itself, as those of ``torch.optim`` do but for LBFGS;
    ``step`` and its hooks are called once for each bucket. Peak memory on the device is that of one
    bucket with its gradients and state. No collective. Everything is where it was afterwards, also
    after an exception, which leaves the parameters of later buckets as they were.

    Args:
        optimizer: any parameters; those without a gradient are left out.
        device: where to step; default: where the model's units compute.
        state_device: where new state is kept between steps; default: beside its parameter. The host, for
            parameters that stay on the device, offloads the optimizer alone.
        bucket_bytes: of parameters; a larger parameter is a bucket of its own.

    Raises:
        ConfigurationError: for fewer than one byte.
    """
    if bucket_bytes < 1:
        raise ConfigurationError("a bucket holds at least one byte", expected="1 or more", got=bucket_bytes)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # so that a step takes just those of its bucket
    try:
        for bucket in _buckets(list(zip(parameters, gradients, strict=True)), bucket_bytes):
            with _moved(optimizer, bucket, device, state_device):
                optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


_Pairs = list[tuple[nn.Parameter, Tensor]]


def _buckets(pairs: Sequence[tuple[nn.Parameter, Tensor]], most: int) -> Iterator[_Pairs]:
    bucket: _Pairs = []
    held = 0
    for parameter, gradient in pairs:
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and held + nbytes > most:
            yield bucket
            bucket, held = [], 0
        bucket.append((parameter, gradient))
        held += nbytes
    if bucket:
        yield bucket


@contextmanager
def _moved(
    optimizer: torch.optim.Optimizer, bucket: _Pairs, device: torch.device | None, state_device: torch.device | None
) -> Iterator[None]:
    """Parameters, gradients and state of ``bucket`` on the device; back where they were at the end."""
    homes = [parameter.data for parameter, _ in bucket]
    states: list[dict[str, Any]] = [optimizer.state[parameter] for parameter, _ in bucket]
    before = [{key: value for key, value in state.items() if _is_like(value, home)}
              for state, home in zip(states, homes, strict=True)]
    done = False
    try:
        for (parameter, gradient), home, state, kept in zip(bucket, homes, states, before, strict=True):
            there = device or _compute_device(parameter)
            parameter.data = home.to(there, copy=True)
            allow_gradient_dtype(parameter, gradient.dtype)
            parameter.grad = gradient.to(there)
            state.update({key: value.to(there, copy=True) for key, value in kept.items()})
        yield
        done = True
    finally:
        for (parameter, _), home, state, kept in zip(bucket, homes, states, before, strict=True):
            parameter.grad = None
            if done:
                home.copy_(parameter.data)
            parameter.data = home
            for key, value in list(state.items()):
                if key in kept:
                    state[key] = kept[key].copy_(value) if done else kept[key]
                elif _is_like(value, home):
                    state[key] = value.to(state_device or home.device)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _compute_device(parameter: nn.Parameter) -> torch.device:
    home = home_of(parameter)
    return parameter.device if home is None else home[0].compute_device
