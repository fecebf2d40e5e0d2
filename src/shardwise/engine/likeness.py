"""Before the first forward all ranks compare what they start from: the model, its options, its values.

What differs would mix rows of different models without a word. One all-reduce of a few integers
finds out; only then do the ranks tell each other what they have. Of every parameter a few elements
are looked at, when it is sharded, for later each rank has its own rows only. Values count as long
as no rank has changed them: who loads a checkpoint after sharding may start from anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Collectives, Reduction
from ..comm.errands import Errand
from ..comm.words import exchange
from ..errors import DivergenceError
from ..plan.ownership import OwnedParameter
from ..storage.flat_storage import FlatStorage
from ..storage.tensor_parallel import local_part
from ..torch_private import no_gradients, without_torch_function
from .copied_rows import beginnings, warn_of_copies
from .numbering import count_of, renumber
from .unit import Unit

__all__ = ["note_first_rows", "note_first_values", "require_likeness"]

_SAMPLES = 8  # elements of each parameter, evenly spread
#: itemsize -> integers as wide: not every dtype can be picked from (fp8 cannot), and the bits are what counts
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Start:
    """A parameter when it was sharded: samples of the whole, and of this rank's rows."""

    whole: str
    rows: str


_STARTS: weakref.WeakKeyDictionary[Unit, dict[str, _Start]] = weakref.WeakKeyDictionary()
_SAID = {
    "model": ("ranks were given different models", "Build the same model on every rank."),
    "options": ("ranks shard a unit with different options", "Pass the same arguments on every rank."),
    "values": ("ranks start from different values",
               "Seed all ranks alike before the model is built, pass sync_module_states=True, "
               "or load a checkpoint before the first forward."),
}


def note_first_values(owned: Sequence[OwnedParameter]) -> dict[str, str]:
    """Samples of whole parameters (of tensor-parallel ones, of this rank's part), by FQN; of none on meta."""
    with without_torch_function(), torch.no_grad():
        real = {entry.fqn: local_part(entry.parameter) for entry in owned if not entry.parameter.is_meta}
        return dict(zip(real, _sampled(list(real.values())), strict=True))


def note_first_rows(unit: Unit, values: dict[str, str]) -> None:
    """Keep ``values`` with ``unit``, and samples of the rows that this rank was left with."""
    if values and any(comm.real for comm in unit.groups.nontrivial):
        rows = _rows(unit)
        _STARTS[unit] = {fqn: _Start(whole, rows[fqn]) for fqn, whole in values.items()}


def _rows(unit: Unit) -> dict[str, str]:
    names, parts = list[str](), list[Tensor]()
    for storage in unit.storages:
        for index, entry in enumerate(storage.owned):
            span = storage.layout.span(index, storage.rank)
            names.append(entry.fqn)
            parts.append(storage.shard[span.shard_offset : span.shard_offset + span.numel])
    return dict(zip(names, _sampled(parts), strict=True))


def _sampled(tensors: Sequence[Tensor]) -> list[str]:
    """For each tensor a few of its elements, as hexadecimal bytes; one copy to the host for all."""
    parts: list[Tensor] = []
    with no_gradients():
        for tensor in tensors:
            places = torch.linspace(0, max(tensor.numel() - 1, 0), min(_SAMPLES, tensor.numel())).long()
            picked = tensor.detach().view(_BITS.get(tensor.itemsize, tensor.dtype)).take(places.to(tensor.device))
            parts.append(picked.view(torch.uint8))
        if not parts:
            return []
        every = torch.cat([part.to(parts[0].device) for part in parts]).cpu()
    return [bytes(part.tolist()).hex() for part in every.split([part.numel() for part in parts])]


@Errand("the comparison of models before the first forward")
def require_likeness(root: Unit, units: Sequence[Unit]) -> bool:
    """Raise ``DivergenceError`` on all ranks unless they start from the same. A collective; gives True."""
    groups = [comm for comm in root.groups.nontrivial if comm.real]
    if groups:
        device = next((unit.storages[0].compute_device for unit in units if unit.storages), torch.device("cpu"))
        notes = {"model": list(_model(units)), "options": list(_options(root, units)), "values": _values(root, units)}
        starts = beginnings(units, dist.get_rank())
        alike, copied, first = _agree(
            groups, [repr(notes[kind]) for kind in _SAID], [number for _, number in starts], device)
        if not alike:
            _compare(exchange(groups, notes, device))
        if any(copied) and all(comm.rank == 0 for comm in groups):
            warn_of_copies([name for (name, _), same in zip(starts, copied, strict=True) if same])
        if first:
            renumber([unit for unit in units if next(unit.groups.nontrivial, None) is groups[0]], groups[0], first)
        for unit in units:
            _STARTS.pop(unit, None)
    return True


def _agree(
    groups: Sequence[Collectives], texts: Sequence[str], numbers: Sequence[int], device: torch.device
) -> tuple[bool, list[bool], int]:
    """Do all ranks say the same; which of the ``numbers`` are alike; and where ranks numbered their units differently,
    the next free number."""
    digests = [int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") for text in texts]
    mine = [*digests, *numbers, count_of(groups[0])]
    table = torch.tensor([*mine, *(-number for number in mine)], dtype=torch.int64, device=device)
    for comm in groups:
        comm.all_reduce(table, Reduction.MIN, tag=3).wait()
    (*least, fewest), (*most, counted) = table.view(2, -1).tolist()
    same = [low == -high for low, high in zip(least, most, strict=True)]
    return all(same[: len(digests)]), same[len(digests) :], 0 if fewest == -counted else -counted


def _model(units: Sequence[Unit]) -> Iterator[list[str]]:
    for unit in units:
        yield [unit.name, "", "a unit of " + ", ".join(type(module).__name__ for module in unit.modules)]
        for storage in unit.storages:
            for index, entry in enumerate(storage.owned):
                yield [unit.name, entry.fqn, _shape(storage, index)]


def _shape(storage: FlatStorage, index: int) -> str:
    dtype = str(storage.stored_dtype).removeprefix("torch.")
    trained = "trained" if storage.leaves[index].requires_grad else "frozen"
    return f"{tuple(storage.layout.parameters[index].shape)} {dtype} {trained}"


def _options(root: Unit, units: Sequence[Unit]) -> Iterator[list[str]]:
    yield [root.name, "", _settings(root.schedule, "backward", "forward", "limit", "skips")]
    for unit in units:
        names = ("reshard_after_forward", "keep_as_root", "reshard_after_backward", "sync_gradients", "all_reduce")
        yield [unit.name, "", f"{_settings(unit.settings, *names)}, {_settings(unit.policy)}"]


def _settings(chosen: object, *names: str) -> str:
    shown = names or tuple(field.name for field in fields(chosen))  # pyright: ignore[reportArgumentType]
    return ", ".join(f"{name}={getattr(chosen, name)}" for name in shown)


def _values(root: Unit, units: Sequence[Unit]) -> list[list[str]]:
    """Of each parameter what it was sharded from; nothing where this rank's rows have changed since.

    Units over fewer ranks than the root (experts on a mesh of their own) differ from rank to rank.
    """
    values: list[list[str]] = []
    for unit in units:
        if unit in _STARTS and root.groups.members <= unit.groups.members:
            now = {} if any(storage.on_meta for storage in unit.storages) else _rows(unit)
            values += [[unit.name, fqn, start.whole if now.get(fqn) == start.rows else ""]
                       for fqn, start in _STARTS[unit].items()]
    return values


def _compare(notes: dict[int, dict[str, list[list[str]]]]) -> None:
    ranks = list(notes)
    for kind, (what, remedy) in _SAID.items():
        for entries in _side_by_side([notes[rank][kind] for rank in ranks]):
            texts = [text for _, _, text in entries]
            if len(set(texts)) == 1 or (kind == "values" and "" in texts):
                continue
            unit, fqn, _ = next(entry for entry in entries if entry[0])
            pairs = list(zip(ranks, texts, strict=True))
            got = ", ".join(f"rank {rank} has {text or 'nothing here'}" for rank, text in pairs)
            if kind == "values":
                others = [str(rank) for rank, text in pairs if text != texts[0]]
                got = f"other ones on rank {', '.join(others)} than on rank {ranks[0]}"
            raise DivergenceError(what, unit=unit, fqn=fqn or None, got=got, remedy=remedy)


def _side_by_side(lists: Sequence[list[list[str]]]) -> Iterator[list[list[str]]]:
    """The entries of all ranks at the same place; empty ones where a rank has fewer, or another name."""
    for place in range(max(len(entries) for entries in lists)):
        yield [entries[place] if place < len(entries) else ["", "", ""] for entries in lists]
