"""Optimizer state by parameter name: what of it is tensors in files, and what is text.

For each parameter and key the state is one of

    {"like": dtype}                     a tensor shaped like the parameter, sharded like it
    {"value": ...}                      a number, None, or a 0-d tensor
    {"whole": [dtype, shape]}           a tensor of another shape, the same on all ranks
    {"parts": {rank: [dtype, shape, span]}}   the same, but each rank has one for its rows (start, stop)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..storage.flat_storage import FLAT
from ..storage.sharded_parameter import home_of
from .contents import Contents, Writers
from .model_tensors import ModelTensor, local_rows
from .plain_values import encode
from .safetensors_header import Entry

__all__ = ["Described", "OptimizerState", "owners_by_parameter", "require_same_steps", "scalar_keys"]

Described = dict[str, Any]
"""``{"groups": [...], "state": {fqn: {key: kind}}}``, as JSON."""


@dataclass(frozen=True, eq=False)
class _Item:
    """One state value of one original parameter on this rank."""

    tensor: ModelTensor
    number: int  #: the parameter's, for sharing the work among replicas
    key: str
    value: Any
    like: bool


def owners_by_parameter(tensors: list[ModelTensor], optimizer: torch.optim.Optimizer
                        ) -> list[list[tuple[nn.Parameter, list[ModelTensor]]]]:
    """For each group the optimizer's parameters, each with the model's tensors that it stands for.

    A flat parameter stands for several. Raises ``CheckpointError`` for one that is not the model's.
    """
    by_place = {(id(t.storage), t.index): t for t in tensors if t.storage is not None}
    by_object = {id(t.parameter): t for t in tensors if t.parameter is not None}

    def owners(group: int, place: int, parameter: nn.Parameter) -> list[ModelTensor]:
        home = home_of(parameter)
        if home is not None and (home[1] == FLAT or home[0].hidden):
            indices = range(len(home[0].parameters)) if home[1] == FLAT else [home[1]]
            found = [by_place[id(home[0]), i] for i in indices if (id(home[0]), i) in by_place]
        else:
            found = [by_object[id(parameter)]] if id(parameter) in by_object else []
        if not found:
            raise CheckpointError(
                f"parameter {place} of group {group} of the optimizer is not a parameter of the model",
                got=f"one of shape {tuple(parameter.shape)}", expected="only parameters of this model",
                remedy="Pass the model that the optimizer trains, and build the optimizer after sharding "
                       "where use_orig_params=False.")
        return found

    return [[(p, owners(g, i, p)) for i, p in enumerate(group["params"])]
            for g, group in enumerate(optimizer.param_groups)]


def scalar_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Keys of 0-d state that is not shaped like its parameter, even where that is 0-d too."""
    return {"step"} | {key for parameter, state in optimizer.state.items() if parameter.dim()
                       for key, value in state.items() if isinstance(value, Tensor) and not value.dim()}


class OptimizerState:
    """The optimizer's state on this rank, by name; ``described`` becomes that of all ranks by ``merge``."""

    def __init__(self, tensors: list[ModelTensor], optimizer: torch.optim.Optimizer) -> None:
        owned = owners_by_parameter(tensors, optimizer)
        self._items = {(item.tensor.fqn, item.key): item for item in _items(tensors, owned, optimizer)}
        self._shapes = {tensor.fqn: tensor.shape for tensor in tensors}
        state: dict[str, dict[str, Any]] = {}
        for item in self._items.values():
            state.setdefault(item.tensor.fqn, {})[item.key] = _describe(item)
        groups = [_describe_group(group, pairs)
                  for group, pairs in zip(optimizer.param_groups, owned, strict=True)]
        self.described: Described = {"groups": groups, "state": state}

    @property
    def rowless(self) -> list[str]:
        """The parameters of which this rank has no rows."""
        return list({item.tensor.fqn: None for item in self._items.values() if not item.tensor.values.numel()})

    def merge(self, everyone: Sequence[Described]) -> None:
        """Take in what the other ranks hold: one without rows of a parameter may leave it out."""
        self.described["groups"] = _merge_groups([one["groups"] for one in everyone])
        merged: dict[str, dict[str, Any]] = {}
        for one in everyone:
            for fqn, keys in one["state"].items():
                for key, kind in keys.items():
                    known = merged.setdefault(fqn, {}).setdefault(key, kind)
                    if "parts" in known and "parts" in kind:
                        known["parts"].update(kind["parts"])
                    elif known.keys() != kind.keys() or known.get("like") != kind.get("like"):
                        raise CheckpointError("ranks hold different optimizer state", fqn=f"{fqn}.{key}",
                                              expected=known, got=kind)
        self.described["state"] = merged

    def contents(self, writers: Writers) -> Contents:
        """The tensors of all ranks, and this rank's part of them."""
        contents = Contents()
        for fqn, keys in self.described["state"].items():
            for key, kind in keys.items():
                _add(contents, f"{fqn}.{key}", kind, self._shapes[fqn], self._items.get((fqn, key)), writers)
        return contents


def require_same_steps(everyone: Sequence[tuple[Described, list[str]]]) -> None:
    """Raise ``CheckpointError`` if ranks, each with what it holds and is ``rowless`` of, took different steps.

    That is what a rank may leave behind that is lost between the backwards of two replicas.
    """
    first: dict[str, tuple[int, Any]] = {}
    for rank, (described, rowless) in enumerate(everyone):
        for fqn in described["state"].keys() - set(rowless):
            step = described["state"][fqn].get("step", {}).get("value")
            if step is None:
                continue
            known = first.setdefault(fqn, (rank, step))
            if known[1] != step:
                raise CheckpointError(
                    "ranks have taken different numbers of optimizer steps", fqn=fqn,
                    expected=f"{_number(known[1])} as on rank {known[0]}", got=f"{_number(step)} on rank {rank}",
                    remedy="Go on from the last checkpoint.")


def _number(step: Any) -> Any:
    return step["$scalar"][1] if isinstance(step, dict) else step


def _merge_groups(everyone: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    options = [[group["options"] for group in groups] for groups in everyone]
    if any(one != options[0] for one in options):
        raise CheckpointError("ranks hold optimizers with other groups or options", expected=options[0],
                              got=next(one for one in options if one != options[0]),
                              remedy="Build the optimizer alike on every rank.")
    return [{"params": list(dict.fromkeys(name for group in alike for name in group["params"])),
             "options": alike[0]["options"]} for alike in zip(*everyone, strict=True)]


def _describe_group(group: dict[str, Any], pairs: list[tuple[nn.Parameter, list[ModelTensor]]]) -> Any:
    options = {key: value for key, value in group.items() if key != "params"}
    return {"params": [tensor.fqn for _, owners in pairs for tensor in owners],
            "options": encode(options, "param_groups", _no_tensors)}


def _no_tensors(name: str, tensor: Tensor) -> None:
    raise CheckpointError("an option of the optimizer is a tensor with dimensions", fqn=name,
                          got=tuple(tensor.shape), expected="a number or a 0-d tensor")


def _items(tensors: list[ModelTensor], owned: list[list[tuple[nn.Parameter, list[ModelTensor]]]],
           optimizer: torch.optim.Optimizer) -> Iterator[_Item]:
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    scalars = scalar_keys(optimizer)
    for group in owned:
        for parameter, owners in group:
            for key, value in optimizer.state.get(parameter, {}).items():
                like = isinstance(value, Tensor) and value.shape == parameter.shape and key not in scalars
                for tensor in owners:
                    part = _part(value, parameter, tensor, like)
                    yield _Item(tensor, numbers[id(tensor)], str(key), part, like)


def _part(value: Any, parameter: nn.Parameter, tensor: ModelTensor, like: bool) -> Any:
    """The part of a flat parameter's state that belongs to ``tensor``."""
    home = home_of(parameter)
    if like and home is not None and home[1] == FLAT:
        return local_rows(home[0], tensor.index, value.detach())
    return value


def _describe(item: _Item) -> dict[str, Any]:
    value, storage = item.value, item.tensor.storage
    if not isinstance(value, Tensor) or (not value.dim() and not item.like):
        return {"value": encode(value, f"{item.tensor.fqn}.{item.key}", _no_tensors)}
    name = str(value.dtype).removeprefix("torch.")
    if item.like:
        return {"like": name}
    if storage is None or storage.world_size == 1:
        return {"whole": [name, list(value.shape)]}
    span = [item.tensor.start, item.tensor.start + item.tensor.values.numel()]
    return {"parts": {str(storage.rank): [name, list(value.shape), span]}}


def _add(contents: Contents, name: str, kind: dict[str, Any], shape: tuple[int, ...],
         item: _Item | None, writers: Writers) -> None:
    values = item.value if item is not None and isinstance(item.value, Tensor) else torch.empty(0)
    storage = item.tensor.storage if item is not None else None
    writes = item is not None and writers.mine(storage, item.number)
    if "like" in kind:
        start = item.tensor.start if item is not None else 0
        contents.add(Entry(name, getattr(torch, kind["like"]), shape), start, values.detach(), mine=writes)
    elif "whole" in kind:
        dtype, size = kind["whole"]
        contents.add(Entry(name, getattr(torch, dtype), tuple(size)), 0, values.detach(), mine=writes)
    elif "parts" in kind:
        for place, (dtype, size, _) in sorted(kind["parts"].items(), key=lambda pair: int(pair[0])):
            here = writes and storage is not None and storage.rank == int(place)
            contents.add(Entry(f"{name}.shard{place}", getattr(torch, dtype), tuple(size)), 0,
                         values.detach(), mine=here)
