"""What an optimizer's own ``state_dict()`` shows of its state for sharded parameters, and how that comes back.

    shaped like the rows      a record, which torch.distributed.checkpoint takes on any number of ranks
    a tensor of other shape   a record of one tensor for each rank, which it takes on as many ranks only
    a number, a 0-d tensor    as it is, the same on all ranks
    of a flat parameter       a dict of all this by the names of the originals behind it

No traffic. On one rank tensors stay tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..storage.flat_storage import FLAT, FlatStorage
from ..storage.global_norm import plain
from ..storage.sharded_parameter import home_of
from .model_tensors import local_rows
from .records import ShardedRecord
from .rows import placement_of

__all__ = ["are_whole", "members", "shown", "taken"]

Values = dict[str, Any]
"""Name of a state value -> the value, for one parameter."""


def members(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[Any, nn.Parameter]:
    """The optimizer's parameters by the keys that ``state_dict`` has for them."""
    keys = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(keys, parameters, strict=False))  # where they are not as many, torch says so


def shown(parameter: nn.Parameter, values: Values) -> Values:
    """``values`` as they go into a state dict; they share memory."""
    home = home_of(parameter)
    if home is None:
        return values
    storage, index = home
    if index != FLAT:
        return {name: _shown(storage, index, value) for name, value in values.items()}
    size = (storage.layout.shard_numel,)
    return {name: {spec.fqn: _shown(storage, i, local_rows(storage, i, value.detach()))
                   for i, spec in enumerate(storage.layout.parameters)}
            if isinstance(value, Tensor) and tuple(value.shape) == size else _shown(storage, 0, value)
            for name, value in values.items()}


def _shown(storage: FlatStorage, index: int, value: Any) -> Any:
    kept = not isinstance(value, Tensor) or isinstance(value, ShardedRecord) or not value.dim()
    if kept or storage.world_size == 1:
        return value
    rows, place = plain(value.detach()), placement_of(storage, index)
    if tuple(rows.shape) == storage.local_geometry(index)[1]:
        return ShardedRecord(rows, place)
    return ShardedRecord(rows.unsqueeze(0), place.one_each(tuple(rows.shape)))


def are_whole(state: Iterable[tuple[nn.Parameter, Values]]) -> bool:
    """Is this the state of an unsharded run: every tensor in it shaped like the whole parameter?

    One alone does not tell: what an optimizer keeps for a square matrix as a whole (Shampoo's factors) looks alike.
    """
    found = False
    for parameter, values in state:
        home = home_of(parameter)
        if home is None or home[1] == FLAT:
            continue
        whole, size = placement_of(*home).whole_shape, home[0].local_geometry(home[1])[1]
        for value in values.values():
            if isinstance(value, Tensor) and value.dim() and whole != size:
                if isinstance(value, ShardedRecord) or tuple(value.shape) != whole:
                    return False
                found = True
    return found


@torch.no_grad()
def taken(parameter: nn.Parameter, values: Values, *, cut: bool = False) -> Values:
    """``values`` out of a state dict as the optimizer works with them: this rank's rows.

    Takes what ``shown`` gives, and rows; whole tensors too if they are to be ``cut``. Records of another layout,
    and DTensors, are gathered (a collective). Raises ``CheckpointError`` for a record that does not fit.
    """
    home = home_of(parameter)
    if home is None:
        return values
    storage, index = home
    if index != FLAT:
        return {name: _taken(storage, index, name, value, cut=cut) for name, value in values.items()}
    return {name: _flat(storage, name, cast("Mapping[str, Any]", value)) if isinstance(value, Mapping)
            else _taken(storage, 0, name, value) for name, value in values.items()}


def _flat(storage: FlatStorage, name: str, by_name: Mapping[str, Any]) -> Tensor:
    index = {spec.fqn: place for place, spec in enumerate(storage.layout.parameters)}
    if set(by_name) != set(index):
        raise CheckpointError("optimizer state of other parameters than the flat one stands for", unit=storage.unit,
                              expected=list(index), got=list(by_name),
                              remedy="Load it into the model, wrapped as it was saved.")
    rows = {fqn: _taken(storage, index[fqn], name, value, cut=True) for fqn, value in by_name.items()}
    first: Tensor = next(iter(rows.values()))
    whole = torch.zeros(storage.layout.shard_numel, dtype=first.dtype, device=first.device)
    for fqn, value in rows.items():
        local_rows(storage, index[fqn], whole).copy_(value)
    return whole


def _taken(storage: FlatStorage, index: int, name: str, value: Any, *, cut: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return value
    place, size = placement_of(storage, index), storage.local_geometry(index)[1]
    if isinstance(value, ShardedRecord):
        theirs = value.placement
        if theirs.apart and (len(theirs.bounds), theirs.rank) == (storage.world_size, storage.rank):
            return value.to_local()[0]
        if theirs.apart or theirs.whole_shape != place.whole_shape:
            raise CheckpointError(
                "optimizer state of another shape, or one tensor for each of other ranks",
                fqn=f"{storage.layout.parameters[index].fqn}.{name}", unit=storage.unit, rank=storage.rank,
                expected=place.whole_shape, got=theirs.whole_shape,
                remedy="Load it into the model that it was saved from, on as many ranks.")
        return value.to_local() if theirs.same_rows(place) else place.cut_whole(value.full_tensor()).reshape(size)
    scalar = not value.dim() and (bool(place.shape) or name == "step")
    if not cut or scalar or tuple(value.shape) == size or tuple(value.shape) != place.whole_shape:
        return value
    if place.part is not None:
        return place.cut_whole(value).reshape(size).clone()
    gather = getattr(value, "full_tensor", None)  # a DTensor
    return place.cut(value if gather is None else gather()).reshape(size).clone()
