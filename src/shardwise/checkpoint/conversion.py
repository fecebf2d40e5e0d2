"""Weights from other formats into ours, and back, one tensor at a time where the format allows it.

    safetensors   ours, or any folder or file of safetensors
    dcp           a folder of torch.distributed.checkpoint (FSDP2, sharded FSDP1)
    torch         one file of torch.save: a full state dict (full FSDP1, ``zero_to_fp32`` of DeepSpeed)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.peers import Peers
from ..errors import CheckpointError
from .contents import Piece
from .file_plan import plan_files
from .ranged_io import Staging
from .safetensors_header import Entry
from .snapshot import Snapshot
from .source import Source
from .writing import SaveJob, SharedFolder

__all__ = ["KINDS", "Converted", "convert", "kind_of"]

KINDS = ("safetensors", "dcp", "torch")
Progress = Callable[[int], object]
_NESTED = ("model", "module", "state_dict")  # keys under which training scripts put the weights


@dataclass(frozen=True)
class Converted:
    """What a conversion did: how many tensors and bytes, and the names that it left out."""

    tensors: int
    nbytes: int
    left_out: tuple[str, ...]


@dataclass
class _Weights:
    """Weights by name, read when asked for."""

    entries: list[Entry]
    read: Callable[[str], Tensor]
    left_out: list[str]
    progress: Progress = bool

    def __iter__(self) -> Iterator[tuple[Entry, Tensor]]:
        for entry in self.entries:
            yield entry, self.read(entry.name)
            self.progress(entry.nbytes)


def kind_of(path: Path) -> str:
    """Which of ``KINDS`` lies at ``path``. Raises ``CheckpointError``."""
    if path.is_dir():
        return "dcp" if (path / ".metadata").is_file() else "safetensors"
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}", remedy="Check the path.")
    return "safetensors" if path.suffix == ".safetensors" else "torch"


def convert(source: Path, target: Path, to: str, *, prefix: str | None = None,
            max_shard_bytes: int = 5 * 10**9, started: Progress = bool, progress: Progress = bool
            ) -> Converted:
    """Write the weights at ``source`` to ``target`` in format ``to``.

    ``prefix``: names begin with it in the source, and lose it; others are left out. None: the common
    ones of training scripts are found by themselves. Raises ``CheckpointError``; an existing target
    is refused, or replaced as a whole if it is a checkpoint of ours.
    """
    if to not in KINDS:
        raise CheckpointError("no such format", expected=" or ".join(KINDS), got=to)
    with _OPEN[kind_of(source)](source) as weights:
        _strip(weights, prefix)
        started(sum(entry.nbytes for entry in weights.entries))
        weights.progress = progress
        if to == "safetensors":
            _write_safetensors(weights, target, max_shard_bytes)
        else:
            _write_torch(weights, target, to)
    return Converted(len(weights.entries), sum(entry.nbytes for entry in weights.entries),
                     tuple(weights.left_out))


@contextmanager
def _alone() -> Generator[None]:
    """Inside, DCP does not warn that it works in one process: that is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is")
        yield


def _strip(weights: _Weights, prefix: str | None) -> None:
    if prefix is None:
        heads = {entry.name.partition(".")[0] for entry in weights.entries}
        others = heads - {"optim", "optimizer"}
        prefix = f"{next(iter(others))}." if len(others) == 1 and others <= set(_NESTED) else ""
    read, chosen = weights.read, [e for e in weights.entries if e.name.startswith(prefix)]
    weights.left_out += [e.name for e in weights.entries if not e.name.startswith(prefix)]
    weights.entries = [Entry(e.name.removeprefix(prefix), e.dtype, e.shape) for e in chosen]
    weights.read = lambda name: read(prefix + name)
    if not chosen:
        raise CheckpointError("no tensor has a name with this prefix", expected=repr(prefix),
                              got=", ".join(weights.left_out[:4]) or "no tensors")


# ---------------------------------------------------------------------- reading
@contextmanager
def _open_safetensors(path: Path) -> Generator[_Weights]:
    with Source(path) as source:
        found, aliases = source.tensors("model")
        found = found | {alias: found[name] for alias, name in aliases.items()}
        staging = Staging()
        entries = [Entry(name, at.entry.dtype, at.entry.shape) for name, at in found.items()]
        yield _Weights(entries, lambda name: source.whole(found[name], staging), [])


@contextmanager
def _open_dcp(path: Path) -> Generator[_Weights]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(path))
    described = reader.read_metadata().state_dict_metadata
    entries = [Entry(name, facts.properties.dtype, tuple(facts.size))
               for name, facts in described.items() if isinstance(facts, TensorStorageMetadata)]
    by_name = {entry.name: entry for entry in entries}

    def read(name: str) -> Tensor:
        state = {name: torch.empty(by_name[name].shape, dtype=by_name[name].dtype)}
        with _alone():
            load(cast("dict[str, Any]", state), storage_reader=FileSystemReader(str(path)), no_dist=True)
        return state[name]

    yield _Weights(entries, read, [name for name in described if name not in by_name])


@contextmanager
def _open_torch(path: Path) -> Generator[_Weights]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"not a file of tensors that torch.save wrote: {path}",
                              got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                              remedy="Only tensors and plain containers are read, since others can run code.",
                              ) from error
    flat = dict(_flat("", loaded))
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in flat.items()
               if isinstance(value, Tensor)]
    others = [name for name, value in flat.items() if not isinstance(value, Tensor)]
    yield _Weights(entries, flat.__getitem__, others)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value


_OPEN = {"safetensors": _open_safetensors, "dcp": _open_dcp, "torch": _open_torch}


# ---------------------------------------------------------------------- writing
@dataclass(frozen=True, eq=False)
class _Lazy(Snapshot):
    """A snapshot whose values are read one tensor at a time."""

    weights: _Weights

    def pieces(self) -> Iterator[tuple[Piece, str, int, Entry]]:
        for entry, values in self.weights:
            yield (Piece(entry.name, 0, values), *self.places["model"][entry.name])


def _write_safetensors(weights: _Weights, target: Path, max_shard_bytes: int) -> None:
    plan = plan_files("model", weights.entries, {}, max_shard_bytes)
    texts = {plan.index[0]: plan.index[1]} if plan.index is not None else {}
    snapshot = _Lazy(plan.files, {"model": plan.places()}, {}, texts, weights)
    SaveJob(target.absolute(), snapshot, Peers(None), SharedFolder(target.absolute())).run()


def _write_torch(weights: _Weights, target: Path, to: str) -> None:
    if target.exists():
        raise CheckpointError(f"there is something at {target}", expected="nothing",
                              remedy="Choose another path.")
    state: dict[str, Any] = {entry.name: values for entry, values in weights}
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".tmp-{target.name}")
    if to == "torch":
        with aside.open("wb") as file:
            torch.save(state, file)
    else:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with _alone():
            save({"model": state}, storage_writer=FileSystemWriter(str(aside)), no_dist=True)
    aside.rename(target)
