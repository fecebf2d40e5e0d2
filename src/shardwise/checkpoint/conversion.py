"""Weights and optimizer state from other formats into ours, and back, one tensor at a time where they allow it.

    safetensors   ours, or any folder or file of safetensors
    dcp           a folder of torch.distributed.checkpoint (FSDP2, sharded FSDP1)
    torch         one file of torch.save: a full state dict (full FSDP1, ``zero_to_fp32`` of DeepSpeed)
    deepspeed     a folder of ZeRO stage 1, 2 or 3; only read
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.peers import Peers
from ..errors import CheckpointError
from .contents import Piece
from .deepspeed_folder import is_deepspeed, open_deepspeed
from .file_plan import FilePlan, plan_files
from .foreign import Opened, Table, Tensors, arrange
from .optimizer_contents import Described
from .plain_values import decode
from .ranged_io import Staging
from .safetensors_header import Entry
from .snapshot import STATE, Snapshot
from .source import Source
from .torch_file import open_torch
from .writing import SaveJob, SharedFolder

__all__ = ["KINDS", "Converted", "convert", "kind_of"]

#: what can be written
KINDS = ("safetensors", "dcp", "torch")
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Converted:
    """What a conversion did: how many tensors and bytes, and the names that it left out."""

    tensors: int
    nbytes: int
    has_optimizer: bool
    left_out: tuple[str, ...]


def kind_of(path: Path) -> str:
    """Which format lies at ``path``. Raises ``CheckpointError``."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return "dcp"
        return "deepspeed" if is_deepspeed(path) else "safetensors"
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}", remedy="Check the path.")
    return "safetensors" if path.suffix == ".safetensors" else "torch"


def convert(source: Path, target: Path, to: str, *, prefix: str | None = None, optimizer: bool = True,
            max_shard_bytes: int = 5 * 10**9, started: Progress = bool, progress: Progress = bool
            ) -> Converted:
    """Write what lies at ``source`` to ``target`` in format ``to``.

    ``prefix``: weights' names begin with it in the source, and lose it; others are left out. None: the
    common ones of training scripts are found by themselves. ``optimizer``: its state too, where the source
    has it by parameter names. Raises ``CheckpointError``; an existing target is refused, or replaced as a
    whole if it is a checkpoint of ours.
    """
    if to not in KINDS:
        raise CheckpointError("no such format", expected=" or ".join(KINDS), got=to)
    with _opened(source, prefix) as found:
        if not optimizer and found.described is not None:
            found.left_out += ["the optimizer's state"]
            found.optimizer, found.described = Tensors([], found.optimizer.read), None
        started(found.nbytes)
        for tensors in (found.model, found.optimizer):
            tensors.read = _counting(tensors, progress)
        if to == "safetensors":
            _write_safetensors(found, target, max_shard_bytes)
        else:
            _write_torch(found, target, to)
        return Converted(len(found.model.entries) + len(found.optimizer.entries), found.nbytes,
                         found.described is not None, tuple(found.left_out))


def _counting(tensors: Tensors, progress: Progress) -> Callable[[str], Tensor]:
    read, sizes = tensors.read, {entry.name: entry.nbytes for entry in tensors.entries}

    def counted(name: str) -> Tensor:
        value = read(name)
        progress(sizes[name])
        return value

    return counted


# ---------------------------------------------------------------------- reading
@contextmanager
def _opened(path: Path, prefix: str | None) -> Generator[Opened]:
    kind = kind_of(path)
    if kind == "safetensors":
        with Source(path) as source:
            yield _of_files(source, prefix)
    else:
        from .dcp_folder import open_dcp

        openers: dict[str, Callable[[Path], AbstractContextManager[Table]]] = {
            "dcp": open_dcp, "torch": open_torch, "deepspeed": open_deepspeed}
        with openers[kind](path) as table:
            yield arrange(table, prefix)


def _of_files(source: Source, prefix: str | None) -> Opened:
    """Files of safetensors; the optimizer's state of ours."""
    found, aliases = source.tensors("model")
    found = found | {alias: found[name] for alias, name in aliases.items()}
    staging = Staging()
    entries = {name: Entry(name, at.entry.dtype, at.entry.shape) for name, at in found.items()}
    opened = arrange(Table(entries, [], lambda name: source.whole(found[name], staging)), prefix)
    state: dict[str, Any] = json.loads(source.text(STATE) or "{}")
    states, _ = source.tensors("optimizer")
    opened.optimizer = Tensors([Entry(name, at.entry.dtype, at.entry.shape) for name, at in states.items()],
                               lambda name: source.whole(states[name], staging))
    opened.described = state.get("optimizer")
    if state.get("extra", {}).get("by_rank", {"0": None}) != {"0": None}:
        opened.left_out.append("extra")
    return opened


# ---------------------------------------------------------------------- writing
@dataclass(frozen=True, eq=False)
class _Lazy(Snapshot):
    """A snapshot whose values are read one tensor at a time."""

    lazy: dict[str, Tensors]

    def pieces(self) -> Iterator[tuple[Piece, str, int, Entry]]:
        for base, tensors in self.lazy.items():
            for entry, values in tensors:
                yield (Piece(entry.name, 0, values), *self.places[base][entry.name])


def _write_safetensors(found: Opened, target: Path, max_shard_bytes: int) -> None:
    lazy = {"model": found.model} | ({"optimizer": found.optimizer} if found.optimizer.entries else {})
    plans: dict[str, FilePlan] = {base: plan_files(base, tensors.entries, {}, max_shard_bytes)
                                  for base, tensors in lazy.items()}
    texts = {plan.index[0]: plan.index[1] for plan in plans.values() if plan.index is not None}
    if found.described is not None:
        extra = {"same": True, "by_rank": {"0": None}}
        state = {"world_size": 1, "optimizer": found.described, "extra": extra, "random": []}
        texts[STATE] = json.dumps(state)
    snapshot = _Lazy(tuple(file for plan in plans.values() for file in plan.files),
                     {base: plan.places() for base, plan in plans.items()}, {}, texts, lazy)
    SaveJob(target.absolute(), snapshot, Peers(), SharedFolder(target.absolute())).run()


def _write_torch(found: Opened, target: Path, to: str) -> None:
    if target.exists():
        raise CheckpointError(f"there is something at {target}", expected="nothing",
                              remedy="Choose another path.")
    state: dict[str, Any] = {entry.name: values for entry, values in found.model}
    if found.described is not None:
        state = {"model": state, "optim": _nested(found, found.described)}
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".tmp-{target.name}")
    if to == "torch":
        with aside.open("wb") as file:
            torch.save(state, file)
    else:
        from .dcp_folder import write_dcp

        write_dcp(state if "optim" in state else {"model": state}, aside)
    aside.rename(target)


def _nested(found: Opened, described: Described) -> dict[str, Any]:
    """The optimizer's state as torch's own functions have it: by name, then by key."""
    tensors = {entry.name for entry in found.optimizer.entries}
    state: dict[str, dict[str, Any]] = {}
    for fqn, keys in described["state"].items():
        for key, kind in keys.items():
            name = f"{fqn}.{key}"
            if "value" in kind:
                state.setdefault(fqn, {})[key] = decode(kind["value"], found.optimizer.read)
            elif name in tensors:
                state.setdefault(fqn, {})[key] = found.optimizer.read(name)
            else:
                found.left_out.append(f"{name}, which lies in parts of ranks")
    groups = [{**decode(group["options"], found.optimizer.read), "params": list(group["params"])}
              for group in described["groups"]]
    return {"state": state, "param_groups": groups}
