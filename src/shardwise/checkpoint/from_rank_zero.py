"""A state dict that only rank 0 has, spread to all ranks one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..comm.mesh import default_group, transports
from ..comm.peers import Peers
from ..errors import CheckpointError
from .model_tensors import ModelTensor, undivided_tensors
from .records import ShardedRecord
from .rows import placement_of

__all__ = ["spread_model_state", "spread_optimizer_state"]


@dataclass(frozen=True)
class _Coming:
    """A tensor that rank 0 is about to send."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _skeleton(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Coming(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: _skeleton(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_skeleton(item) for item in value]
    return value


class _Spreader:
    """Sends tensors of rank 0 in the order in which all ranks ask for them."""

    def __init__(self, model: nn.Module, state_dict: Any) -> None:
        self.tensors = {name: tensor for tensor in undivided_tensors(model) for name in tensor.names}
        storages = [t.storage for t in self.tensors.values() if t.storage is not None]
        self.device = storages[0].compute_device if storages else torch.device("cpu")
        peers = Peers.of()
        self.comm: Collectives | None = (
            transports((default_group(), None), self.device)[0] if peers.size > 1 else None)
        self.is_source = peers.rank == 0
        self.source = state_dict
        words = peers.gather(_skeleton(state_dict) if self.is_source else None)
        self.skeleton = words[0]
        if self.skeleton is None:
            raise CheckpointError("rank 0 has no state dict to spread", got=None,
                                  expected="a full state dict on rank 0", remedy="Load it on rank 0 before.")

    def receive(self, coming: _Coming, held: Any, tensor: ModelTensor | None, *, by_rows: bool) -> Tensor:
        """One tensor: this rank's rows as a record if it is ``by_rows``, else all of it."""
        if self.is_source:
            whole = held.detach().to(self.device).contiguous()
        else:
            whole = torch.empty(coming.shape, dtype=coming.dtype, device=self.device)
        if self.comm is not None:
            self.comm.broadcast(whole.view(-1), 0).wait()
        if not by_rows or tensor is None or tensor.storage is None:
            return whole
        place = placement_of(tensor.storage, tensor.index).with_trailing(coming.shape[1:])
        return ShardedRecord(place.cut(whole).clone().to(tensor.storage.shard.device), place)

    def filled(self, coming: Any, held: Any) -> Any:
        """A value that is no tensor, such as a module's extra state, with the tensors in it."""
        if isinstance(coming, _Coming):
            return self.receive(coming, held, None, by_rows=False)
        if isinstance(coming, dict):
            named = cast("dict[Any, Any]", coming)
            return {key: self.filled(item, held[key] if self.is_source else None) for key, item in named.items()}
        if isinstance(coming, list):
            items = enumerate(cast("list[Any]", coming))
            return [self.filled(item, held[place] if self.is_source else None) for place, item in items]
        return coming


def spread_model_state(model: nn.Module, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rank 0's full ``state_dict`` on every rank, sharded parameters as records (a collective)."""
    spreader = _Spreader(model, state_dict)
    result: dict[str, Any] = {}
    for key, coming in spreader.skeleton.items():
        if isinstance(coming, _Coming):
            tensor = spreader.tensors.get(key)
            fits = tensor is not None and tensor.is_parameter and coming.shape == tensor.shape
            held = spreader.source[key] if spreader.is_source else None
            result[key] = spreader.receive(coming, held, tensor, by_rows=fits)
        else:
            result[key] = spreader.filled(coming, spreader.source[key] if spreader.is_source else None)
    return result


def spread_optimizer_state(model: nn.Module, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same for a full optimizer state dict by FQN."""
    spreader = _Spreader(model, state_dict)
    state: dict[str, Any] = {}
    names = {name for fqn, values in spreader.skeleton["state"].items() for name, value in values.items()
             if isinstance(value, _Coming) and not value.shape and fqn in spreader.tensors
             and spreader.tensors[fqn].shape}
    plain = names | {"step"}

    def by_rows(fqn: str, name: str, shape: tuple[int, ...]) -> bool:
        tensor = spreader.tensors.get(fqn)
        return tensor is not None and shape == tensor.shape and not (name in plain and not shape)

    for fqn, values in spreader.skeleton["state"].items():
        state[fqn] = {
            name: spreader.receive(value, spreader.source["state"][fqn][name] if spreader.is_source else None,
                                   spreader.tensors.get(fqn), by_rows=by_rows(fqn, name, value.shape))
            if isinstance(value, _Coming) else value
            for name, value in values.items()
        }
    rest = {key: value for key, value in spreader.skeleton.items() if key != "state"}
    return {"state": state, **rest}


