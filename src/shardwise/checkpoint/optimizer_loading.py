"""An optimizer state dict by FQN, made into what ``optimizer.load_state_dict`` takes on this rank.

The inverse of ``optimizer_state``, for any wrapping and any number of ranks: whole tensors and
records are cut to this rank's rows, and values of several originals are laid into one where the
optimizer has a flat parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..storage.flat_storage import FLAT, FlatStorage
from ..storage.sharded_parameter import home_of
from .model_tensors import ModelTensor, local_rows, model_tensors
from .optimizer_contents import owners_by_parameter
from .records import ShardedRecord
from .rows import placement_of

__all__ = ["optimizer_state_to_load"]

_ALWAYS_PLAIN = frozenset({"step"})


@torch.no_grad()
def optimizer_state_to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, local: bool = False
) -> dict[str, Any]:
    """``state_dict`` by position of parameters, with this rank's rows; nothing is changed yet.

    ``local``: its tensors are rows already (``LOCAL_STATE_DICT``). A parameter without state gets
    none. Parameter groups keep the optimizer's own options where the dict has none for them.
    A record of another layout is gathered (a collective). Raises ``CheckpointError``.
    """
    tensors = model_tensors(model)
    given = _by_first_name(tensors, state_dict)
    reader = _Reader(given, _plain_names(tensors, given), local=local)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    sources = {fqn: group for group in state_dict.get("param_groups") or () for fqn in group["params"]}
    number = 0
    for group, pairs in zip(optimizer.param_groups, owners_by_parameter(tensors, optimizer), strict=True):
        numbers: list[int] = []
        source: Mapping[str, Any] | None = None
        for parameter, owners in pairs:
            numbers.append(number)
            read = reader.read(parameter, owners)
            if read:
                state[number] = read
            known = (sources[name] for owner in owners for name in owner.names if name in sources)
            source = source or next(known, None)
            number += 1
        options = {**group, **(source or {})}
        kept = {name: copy.deepcopy(value) for name, value in options.items() if name != "params"}
        groups.append({**kept, "params": numbers})
    return {"state": state, "param_groups": groups}


def _by_first_name(
    tensors: list[ModelTensor], state_dict: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The state by the first name of each parameter. Raises for names that the model does not have."""
    if "state" not in state_dict:
        raise CheckpointError("this is no optimizer state dict", expected="entries 'state', 'param_groups'",
                              got=sorted(map(str, state_dict))[:4])
    first = {name: tensor.fqn for tensor in tensors for name in tensor.names}
    unknown = [key for key in state_dict["state"] if key not in first]
    if unknown:
        raise CheckpointError(
            f"the optimizer state dict names {len(unknown)} parameters that the model does not have",
            got=unknown[:4], expected="FQNs of this model's parameters",
            remedy="Use rekey_optim_state_dict for one that is keyed by position."
            if any(isinstance(key, int) for key in unknown) else "Pass the model that it was saved from.",
        )
    return {first[key]: value for key, value in state_dict["state"].items()}


def _plain_names(tensors: list[ModelTensor], given: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Names of 0-d values that are not shaped like their parameter, even where that is 0-d too."""
    shapes = {tensor.fqn: tensor.shape for tensor in tensors}
    return _ALWAYS_PLAIN | {
        name for fqn, values in given.items() for name, value in values.items()
        if shapes[fqn] and isinstance(value, Tensor) and not value.dim()
    }


class _Reader:
    """Reads the state of the optimizer's parameters out of a dict by original FQN."""

    def __init__(self, given: dict[str, Mapping[str, Any]], plain: frozenset[str], *, local: bool) -> None:
        self._given, self._plain, self._local = given, plain, local

    def read(self, parameter: nn.Parameter, owners: list[ModelTensor]) -> dict[str, Any]:
        """What the optimizer keeps for ``parameter``."""
        home = home_of(parameter)
        if home is not None and home[1] == FLAT:
            return self._flat(home[0], owners)
        tensor = owners[0]
        return {name: self._value(tensor, name, value)
                for name, value in self._given.get(tensor.fqn, {}).items()}

    def _value(self, tensor: ModelTensor, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        part = tensor.storage.owned[tensor.index].parallel if tensor.storage is not None else None
        if part is not None and tuple(value.shape) == part.shape and not isinstance(value, ShardedRecord):
            value = part.cut(value)
        if tensor.storage is None or not self._is_by_rows(tensor, name, value):
            return _plain_tensor(value).detach().clone()
        rows = self._rows(tensor, name, value).detach().clone()
        shaped = tuple(rows.shape[1:]) == tensor.shape[1:]
        size = tensor.storage.local_geometry(tensor.index)[1] if shaped else rows.shape
        return rows.reshape(size)

    def _is_by_rows(self, tensor: ModelTensor, name: str, value: Tensor) -> bool:
        if isinstance(value, ShardedRecord):
            return True
        if name in self._plain and not value.dim():
            return False
        if self._local:
            assert tensor.storage is not None
            first, last = placement_of(tensor.storage, tensor.index).rows
            return value.dim() > 0 and value.shape[0] == last - first
        return tuple(value.shape) == tensor.shape or (
            value.dim() > 0 and bool(tensor.shape) and value.shape[0] == tensor.shape[0])

    def _rows(self, tensor: ModelTensor, name: str, value: Tensor) -> Tensor:
        assert tensor.storage is not None
        place = placement_of(tensor.storage, tensor.index)
        if isinstance(value, ShardedRecord):
            theirs = value.placement
            if theirs.bounds == place.bounds and theirs.rank == place.rank:
                return value.to_local()
            if theirs.shape[:1] != place.shape[:1]:
                raise CheckpointError("optimizer state of another shape", fqn=f"{tensor.fqn}.{name}",
                                      expected=tensor.shape, got=theirs.shape,
                                      remedy="Load it into the model that it was saved from.")
            return place.with_trailing(theirs.shape[1:]).cut_whole(value.full_tensor())
        if self._local:
            return value
        return place.with_trailing(tuple(value.shape[1:])).cut(_plain_tensor(value))

    def _flat(self, storage: FlatStorage, owners: list[ModelTensor]) -> dict[str, Any]:
        """One value for all originals behind a flat parameter; zeros for those without."""
        read: dict[str, Any] = {}
        first: dict[str, str] = {}
        for tensor in owners:
            for name, value in self._given.get(tensor.fqn, {}).items():
                if isinstance(value, Tensor) and self._is_by_rows(tensor, name, value):
                    rows = self._rows(tensor, name, value)
                    if tuple(rows.shape[1:]) != tensor.shape[1:]:
                        raise CheckpointError(
                            "a flat parameter can only take in state shaped like its parameters",
                            fqn=f"{tensor.fqn}.{name}", expected=tensor.shape, got=tuple(value.shape),
                            remedy="Use use_orig_params=True with this optimizer.")
                    if name not in read:
                        read[name] = rows.new_zeros(storage.layout.shard_numel)
                    target = local_rows(storage, tensor.index, read[name])
                    target.copy_(rows.reshape(target.shape))
                elif name not in read:
                    read[name] = self._value(tensor, name, value)
                    first[name] = tensor.fqn
                elif not _same(read[name], value):
                    raise CheckpointError(
                        f"parameters behind one flat parameter differ in {name!r}", fqn=tensor.fqn,
                        unit=storage.unit, expected=f"that of {first[name]!r}: {read[name]}", got=value,
                        remedy="Use use_orig_params=True, or wrap them in units of their own.")
        return read


def _plain_tensor(value: Tensor) -> Tensor:
    """A whole tensor out of a DTensor (a collective), or as it is."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)
