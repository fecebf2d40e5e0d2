"""Before a unit is sharded: its module moved to its device, and made alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..comm.errands import Errand
from ..engine.hooks import unit_of
from ..plan.ownership import walk
from ..storage.sharded_parameter import home_of
from ..storage.tensor_parallel import local_part

__all__ = ["all_on_meta", "device_of", "move_to_device", "sync_states"]

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
    device = device_of([module]) if device_id is None else _as_device(device_id)
    with torch.no_grad():
        for _, one in _own_modules(module, ignored):
            for parameter in one._parameters.values():
                skip = parameter is None or parameter.is_meta or parameter in ignored_parameters
                if not skip and parameter is not None and home_of(parameter) is None and (
                        device_id is not None and parameter.device != device):
                    parameter.data = parameter.data.to(device)
            for name, buffer in one._buffers.items():
                if device_id is not None and buffer is not None and not buffer.is_meta:
                    one._buffers[name] = buffer.to(device)
    return device


def _as_device(device_id: int | torch.device) -> torch.device:
    if isinstance(device_id, torch.device):
        if device_id.type != "cpu" and device_id.index is None:  # pyright: ignore[reportUnnecessaryComparison]
            index = torch.get_device_module(device_id).current_device()
            return torch.device(device_id.type, index)
        return device_id
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind is not None else "cpu", device_id if kind is not None else None)  # pyright: ignore[reportArgumentType]


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """The device of the first parameter that has one; for meta ones the accelerator, if any."""
    on_meta = False
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                return parameter.device
            on_meta = True
    if on_meta and torch.accelerator.is_available():
        return _as_device(torch.accelerator.current_device_index())
    return torch.device("cpu")


def all_on_meta(
    module: nn.Module, ignored: AbstractSet[nn.Module], ignored_parameters: AbstractSet[nn.Parameter]
) -> bool:
    """Are all parameters that the unit of ``module`` takes in on the meta device?"""
    owned = (p for _, one in _own_modules(module, ignored) for p in one._parameters.values() if p is not None)
    return all(p.is_meta for p in owned if p not in ignored_parameters and home_of(p) is None)


@Errand("sync_module_states")
def sync_states(
    module: nn.Module, groups: Sequence[Collectives], ignored: AbstractSet[nn.Module],
    ignored_parameters: AbstractSet[nn.Parameter],
) -> None:
    """Give every rank the parameters and buffers of the first one, in buckets of bounded size."""
    states: dict[int, Tensor] = {}
    for _, one in _own_modules(module, ignored):
        for parameter in one._parameters.values():
            if parameter is not None and parameter not in ignored_parameters and home_of(parameter) is None:
                states[id(parameter)] = local_part(parameter.data)
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
