"""What one save holds, taken while training stands still: contents, plan and text of all files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.peers import Peers
from ..errors import CheckpointError
from .contents import Contents, Piece, Writers, model_contents, replicas_of
from .extra_state import extra_states
from .file_plan import FilePlan, PlannedFile, plan_files
from .model_tensors import ModelTensor, undivided_tensors
from .optimizer_contents import Described, OptimizerState, require_same_steps
from .plain_values import encode
from .random_state import capture_random_state
from .ranged_io import bytes_of
from .safetensors_header import Entry
from .together import together

__all__ = ["STATE", "Snapshot", "take_snapshot"]

STATE = "state.json"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """``plan``: all files; ``pieces``: this rank's part; ``texts``: small files of rank 0, by name."""

    files: tuple[PlannedFile, ...]
    places: dict[str, dict[str, tuple[str, int, Entry]]]  #: contents -> tensor -> file, first byte, entry
    contents: dict[str, Contents]
    texts: dict[str, str]

    def on_host(self) -> Snapshot:
        """The same, independent of what training does next."""
        copies = {name: contents.on_host() for name, contents in self.contents.items()}
        return Snapshot(self.files, self.places, copies, self.texts)

    def pieces(self) -> Iterator[tuple[Piece, str, int, Entry]]:
        """This rank's pieces with their file, their tensor's first byte there, and its entry."""
        for base, contents in self.contents.items():
            for piece in contents.pieces:
                yield (piece, *self.places[base][piece.name])


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, peers: Peers, *,
                  dtype: torch.dtype | None, max_shard_bytes: int) -> Snapshot:
    """A collective. Raises ``CheckpointError`` on every rank if anything is wrong on one of them."""
    contents: dict[str, Contents] = {}
    state: dict[str, Any] = {"world_size": peers.size}
    with together(peers, "taking the model's state") as words:
        tensors = undivided_tensors(model)
        words.mine = replicas_of(tensors)
    writers = Writers(tensors, peers.rank, words.all)
    with together(peers, "taking the model's state"):
        contents["model"] = model_contents(tensors, dtype, writers)
    if optimizer is not None:
        contents["optimizer"], state["optimizer"] = _optimizer(tensors, optimizer, writers, peers)
    contents["extra"] = Contents()
    with together(peers, "taking the modules' extra state"):
        modules = extra_states(model)
    state["extra"] = _by_rank("extra", extra, contents["extra"], peers)
    state["modules"] = _by_rank("modules", modules, contents["extra"], peers)
    with together(peers, "taking the random states") as words:
        words.mine = encode(capture_random_state(), "random", _no_tensor)
    state["random"] = words.all
    with together(peers, "planning the checkpoint's files") as words:
        plans = {base: _plan(base, one, max_shard_bytes) for base, one in contents.items()}
        words.mine = _digest([str(entry) for one in contents.values() for entry in one.entries])
    if len(set(words.all)) > 1:
        raise CheckpointError("the ranks hold different models",
                              expected="the same names, shapes and dtypes on every rank",
                              remedy="Build the same model with the same options on every rank.")
    texts = {plan.index[0]: plan.index[1] for plan in plans.values() if plan.index is not None}
    texts[STATE] = json.dumps(state)
    return Snapshot(tuple(file for plan in plans.values() for file in plan.files),
                    {base: plan.places() for base, plan in plans.items()}, contents, texts)


def _plan(base: str, contents: Contents, max_shard_bytes: int) -> FilePlan:
    if base != "model" and not contents.entries:
        return FilePlan(())
    return plan_files(base, contents.entries, contents.aliases, max_shard_bytes)


def _optimizer(tensors: list[ModelTensor], optimizer: torch.optim.Optimizer, writers: Writers, peers: Peers
               ) -> tuple[Contents, Described]:
    """Descriptions travel only where the ranks' differ."""
    what = "taking the optimizer's state"
    with together(peers, what) as words:
        held = OptimizerState(tensors, optimizer)
        words.mine = _digest(held.described)
    if len(set(words.all)) > 1:
        with together(peers, what) as words:
            words.mine = (held.described, held.rowless)
        with together(peers, what):
            require_same_steps(words.all)
            held.merge([described for described, _ in words.all])
    with together(peers, what) as words:
        contents = held.contents(writers)
    return contents, held.described


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _no_tensor(name: str, tensor: Tensor) -> None:
    raise CheckpointError("a random state cannot be a tensor", fqn=name)


def _by_rank(where: str, value: Any, contents: Contents, peers: Peers) -> dict[str, Any]:
    """``value`` as JSON, once if it is the same on all ranks, else of each; its tensors go to ``contents``."""
    tensors: dict[str, Tensor] = {}
    with together(peers, "taking the extra state") as words:
        encoded = encode(value, where, tensors.__setitem__)
        facts = {name: [str(t.dtype).removeprefix("torch."), list(t.shape), _content(t)]
                 for name, t in tensors.items()}
        words.mine = (encoded, facts)
    said = words.all
    same = all(one == said[0] for one in said)
    for rank, (_, others) in enumerate(said[:1] if same else said):
        for name, (dtype, shape, _) in others.items():
            mine = rank == peers.rank
            values = tensors[name] if mine else torch.empty(0)
            entry = Entry(f"rank{rank}.{name}", getattr(torch, dtype), tuple(shape))
            contents.add(entry, 0, values, mine=mine)
    by_rank = {str(rank): one[0] for rank, one in enumerate(said[:1] if same else said)}
    return {"same": same, "by_rank": by_rank}


def _content(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.cpu().contiguous())).hexdigest()
