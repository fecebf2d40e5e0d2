"""What an optimizer's state is, agreed on by all ranks of a shard group.

A state value of a parameter is by *rows* (one part for each row of the parameter, so it is
sharded as the parameter is), of an *other* shape (a tensor that is not), or *plain* (a number,
None, a 0-d tensor; the same on all ranks). A rank cannot always tell from its own rows, and
may have no state at all where it has no rows: so the ranks say what they see and decide alike.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..errors import CheckpointError
from ..storage.flat_storage import FLAT
from ..storage.global_norm import ShardedGradient
from ..storage.sharded_parameter import home_of
from .model_tensors import ModelTensor, local_rows
from .optimizer_contents import owners_by_parameter
from .rows import placement_of

__all__ = ["Form", "Held", "Key", "Kind", "agree", "gather_words", "held_state"]

Key = tuple[str, str]
"""(FQN of the parameter, name of the state value)"""


class Kind(Enum):
    """How a state value relates to its parameter."""

    ROWS = "rows"
    OTHER = "other"
    PLAIN = "plain"


@dataclass(eq=False)
class Held:
    """One state value on this rank."""

    tensor: ModelTensor
    name: str
    value: Any


@dataclass(frozen=True)
class _Look:
    """The same as a rank describes it to the others."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None


@dataclass(eq=False)
class Form:
    """What all ranks agreed on. ``shape`` is a tensor's; for rows that of the dims behind dim 0."""

    kind: Kind
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    value: Any
    ranks: list[int]  #: who holds it


def held_state(tensors: list[ModelTensor], optimizer: torch.optim.Optimizer) -> dict[Key, Held]:
    """The optimizer's state here, by names of original parameters; a flat parameter's is cut into theirs."""
    held: dict[Key, Held] = {}
    for group in owners_by_parameter(tensors, optimizer):
        for parameter, owners in group:
            home = home_of(parameter)
            flat = home is not None and home[1] == FLAT
            for name, kept in optimizer.state.get(parameter, {}).items():
                # a copy that the optimizer made of a gradient is still of the gradient's class
                value = kept.as_subclass(Tensor) if isinstance(kept, ShardedGradient) else kept
                cut = flat and isinstance(value, Tensor) and value.shape == parameter.shape
                for tensor in owners:
                    part = local_rows(tensor.storage, tensor.index, value.detach()) if (
                        cut and tensor.storage is not None) else value
                    held[tensor.fqn, name] = Held(tensor, name, part)
    return held


def _look(held: Held) -> _Look:
    value, storage = held.value, held.tensor.storage
    if not isinstance(value, Tensor) or not value.dim():
        return _Look(Kind.PLAIN, value=value.detach().cpu() if isinstance(value, Tensor) else value)
    first, last = placement_of(storage, held.tensor.index).rows if storage is not None else (0, 0)
    by_rows = storage is not None and value.shape[0] == last - first
    return _Look(Kind.ROWS if by_rows else Kind.OTHER, tuple(value.shape), value.dtype)


def agree(held: dict[Key, Held], tensors: Iterable[ModelTensor], trained: Sequence[str]) -> dict[Key, Form]:
    """The form of every state value that any rank holds (a collective of each shard group).

    ``trained``: the FQNs that the optimizer has, which must be the same on all ranks.
    """
    by_fqn = {tensor.fqn: tensor for tensor in tensors}
    by_group: dict[Collectives | None, dict[Key, _Look]] = {}
    devices: dict[Collectives, torch.device] = {}
    for tensor in by_fqn.values():
        comm = tensor.storage.comm if tensor.storage is not None else None
        by_group.setdefault(comm, {})
        if tensor.storage is not None:
            devices[tensor.storage.comm] = tensor.storage.compute_device
    for key, one in held.items():
        by_group[one.tensor.storage.comm if one.tensor.storage is not None else None][key] = _look(one)
    forms: dict[Key, Form] = {}
    for comm, mine in by_group.items():
        word = (mine, list(trained))
        words = [word] if comm is None else gather_words(comm, word, devices[comm])
        _require_same(comm, [names for _, names in words])
        forms |= _merge([looks for looks, _ in words], by_fqn)
    order = {fqn: place for place, fqn in enumerate(by_fqn)}
    return dict(sorted(forms.items(), key=lambda item: order[item[0][0]]))


def _require_same(comm: Collectives | None, trained: Sequence[list[str]]) -> None:
    for place, names in enumerate(trained):
        if names != trained[0] and comm is not None:
            odd = sorted(set(names) ^ set(trained[0]))
            raise CheckpointError(
                "the optimizers of the ranks hold different parameters", rank=comm.members[place],
                expected=f"those of rank {comm.members[0]}", got=f"a difference in {odd or 'their order'}",
                remedy="Build the same optimizer, with the same parameters, on every rank.",
            )


def gather_words(comm: Collectives, word: Any, device: torch.device) -> list[Any]:
    """What every rank of the group said, in rank order (a collective)."""
    if comm.size == 1:
        return [word]
    text = torch.frombuffer(bytearray(pickle.dumps(word)), dtype=torch.uint8).to(device)
    sizes = torch.zeros(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(sizes, torch.tensor([text.numel()], device=device)).wait()
    slot = int(sizes.max())
    mine = torch.zeros(slot, dtype=torch.uint8, device=device)
    mine[: text.numel()] = text
    everyone = torch.empty(slot * comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(everyone, mine).wait()
    rows = everyone.cpu().view(comm.size, slot)
    return [pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _merge(everyone: Sequence[dict[Key, _Look]], tensors: dict[str, ModelTensor]) -> dict[Key, Form]:
    seen: dict[Key, dict[int, _Look]] = {}
    for rank, looks in enumerate(everyone):
        for key, look in looks.items():
            seen.setdefault(key, {})[rank] = look
    never_rows = {name for (_, name), looks in seen.items()
                  if any(look.kind is Kind.OTHER for look in looks.values())}
    return {key: _form(key, looks, tensors[key[0]].shape, key[1] in never_rows)
            for key, looks in seen.items()}


def _form(key: Key, looks: dict[int, _Look], shape: tuple[int, ...], never_rows: bool) -> Form:
    first, ranks = next(iter(looks.values())), list(looks)
    if all(look.kind is Kind.PLAIN for look in looks.values()):
        return Form(Kind.PLAIN, None, (), first.value, ranks)
    trailing = {look.shape[1:] for look in looks.values()}
    alike = len({look.dtype for look in looks.values()}) == 1
    by_rows = all(look.kind is Kind.ROWS for look in looks.values()) and len(trailing) == 1
    if alike and by_rows and (first.shape[1:] == shape[1:] or not never_rows):
        return Form(Kind.ROWS, first.dtype, first.shape[1:], None, ranks)
    if alike and len({look.shape for look in looks.values()}) == 1:
        return Form(Kind.OTHER, first.dtype, first.shape, None, ranks)
    raise CheckpointError(
        "ranks hold different optimizer state", fqn=f"{key[0]}.{key[1]}",
        got={rank: (look.kind.value, look.shape, look.dtype) for rank, look in looks.items()},
        remedy="Build the same optimizer, with the same options, on every rank.",
    )
