"""Before a unit is sharded: its module moved, materialised from the meta device, and synchronised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..engine.hooks import unit_of
from ..errors import ConfigurationError
from ..plan.ownership import walk
from ..storage.sharded_parameter import home_of

__all__ = ["materialise", "move_to_device", "sync_states"]

#: states are broadcast in buckets of at most this many bytes
BUCKET_BYTES = 64 * 2**20


def _own_modules(module: nn.Module, ignored: AbstractSet[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that the unit of ``module`` takes in: not those of nested units or ignored ones."""
    yield from walk(module, "", lambda m: unit_of(m) is not None or m in ignored)


def move_to_device(
    module: nn.Module, device_id: int | torch.device | None, ignored: AbstractSet[nn.Module],
    ignored_parameters: AbstractSet[nn.Parameter],
) -> torch.device:
    """Move what will be sharded to ``device_id``; the device to compute on."""
    device = _device_of(module) if device_id is None else _as_device(device_id)
    with torch.no_grad():
        for _, one in _own_modules(module, ignored):
            for parameter in one._parameters.values():
                skip = parameter is None or parameter.is_meta or parameter in ignored_parameters
                if not skip and parameter is not None and home_of(parameter) is None:
                    if device_id is not None and parameter.device != device:
                        parameter.data = parameter.data.to(device)
            for name, buffer in one._buffers.items():
                if device_id is not None and buffer is not None and not buffer.is_meta:
                    one._buffers[name] = buffer.to(device)
    return device


def _as_device(device_id: int | torch.device) -> torch.device:
    if isinstance(device_id, torch.device):
        if device_id.type != "cpu" and device_id.index is None:
            index = torch.get_device_module(device_id).current_device()
            return torch.device(device_id.type, index)
        return device_id
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind is not None else "cpu", device_id if kind is not None else None)


def _device_of(module: nn.Module) -> torch.device:
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.device("cpu")


def materialise(
    module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device,
    ignored: AbstractSet[nn.Module], ignored_parameters: AbstractSet[nn.Parameter] = frozenset(),
) -> None:
    """Give values to parameters and buffers on the meta device, module by module.

    ``param_init_fn(module)`` does it where given, else ``to_empty`` and ``reset_parameters()``.
    Raises ``ConfigurationError`` for a module that has neither.
    """
    for name, one in list(_own_modules(module, ignored)):
        own = [p for p in one._parameters.values() if p is not None and p not in ignored_parameters]
        buffers = [b for b in one._buffers.values() if b is not None]
        if not any(t.is_meta for t in (*own, *buffers)):
            continue
        reset = getattr(one, "reset_parameters", None)
        if param_init_fn is not None:
            param_init_fn(one)
        elif callable(reset):
            _to_empty(one, device)
            with torch.no_grad():
                reset()
        else:
            raise ConfigurationError(
                "cannot materialise a module from the meta device", unit=name or type(one).__name__,
                expected="param_init_fn, or a reset_parameters() method", got=type(one).__name__,
                remedy="Pass param_init_fn, or define reset_parameters() for what this module registers.",
            )


def _to_empty(module: nn.Module, device: torch.device) -> None:
    """Memory without values for this module's own tensors; the parameter objects stay."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:
            torch.utils.swap_tensors(
                parameter, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def sync_states(
    module: nn.Module, groups: Sequence[Collectives], ignored: AbstractSet[nn.Module],
    ignored_parameters: AbstractSet[nn.Parameter],
) -> None:
    """Give every rank the parameters and buffers of the first one, in buckets of bounded size."""
    states: dict[int, Tensor] = {}
    for _, one in _own_modules(module, ignored):
        for parameter in one._parameters.values():
            if parameter is not None and parameter not in ignored_parameters and home_of(parameter) is None:
                states[id(parameter)] = parameter.data
        for buffer in one._buffers.values():
            if buffer is not None:
                states[id(buffer)] = buffer.data
    for group in groups:
        if group.size > 1:
            for bucket in _buckets(list(states.values())):
                _broadcast(bucket, group)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype
                       or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket


def _broadcast(bucket: Sequence[Tensor], group: Collectives) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    group.broadcast(flat, 0).wait()
    with torch.no_grad():
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))
