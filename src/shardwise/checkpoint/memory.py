"""A checkpoint in host memory, spread over ranks: to go on with more or fewer of them, or after one is lost.

    save_to_memory     the ranks that hold the model send each part to its holders
    load_from_memory   the ranks that get the model fetch their rows from the holders

Both move ranges of elements in rounds of bounded size (``streams``); no rank ever has a whole model.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.errands import Errand
from ..comm.peers import Peers
from ..errors import CheckpointError
from .arguments import adopt_alike
from .memory_parts import MemoryCheckpoint, Parts, Table
from .memory_source import LOADING, MemorySource
from .restoring import Restore, Saved, Wishes, at_rest
from .saving import wait
from .snapshot import STATE, Snapshot, take_snapshot
from .streams import Range, Row, exchange_ranges, exchange_rows
from .together import HALF_DONE, UNTOUCHED, between, together

__all__ = ["load_from_memory", "save_to_memory"]

_SAVING = "saving a checkpoint to memory"


@Errand("checkpoint.save_to_memory")
def save_to_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    holders: Sequence[int] | None = None,
    copies: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> MemoryCheckpoint:
    """Copy the state of a run into the host memory of some ranks, evenly. Every rank calls it.

    What is held does not change with the model. A rank that is no holder may leave when the call returns.

    Args:
        model: sharded or not.
        optimizer: its state and the options of its groups.
        extra: as in ``save``: the state dict of a scheduler, a step, and so on.
        holders: the ranks (of the default group) that will hold it; each has ``copies / len(holders)`` of
            its bytes in host memory. None: all.
        copies: on how many holders each part lies. With 2, any one holder may be lost, with 3 any two. Copies
            lie as far apart as ``holders`` allows, so with ranks in order of hosts, on several of these.
        process_group: the ranks that hold the model; None: all. Of replicas (hybrid sharding, ``NO_SHARD``)
            those of one are enough: that is how survivors of a loss go on.

    Returns:
        this rank's share, for ``load_from_memory``; without bytes on ranks that are no holders.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any of them.
    """
    wait()
    peers = Peers.of(process_group)
    adopt_alike(peers, optimizer, _SAVING)
    with together(peers, _SAVING) as words:
        words.mine = (_places(holders, copies, peers), copies, uuid.uuid4().hex)
    places, _, key = words.all[0]
    if any(said[:2] != (places, copies) for said in words.all):
        raise CheckpointError(f"{_SAVING} failed", got="other holders or copies on other ranks",
                              expected="the same arguments on every rank")
    snapshot = take_snapshot(model, optimizer, extra, peers, dtype=None, max_shard_bytes=sys.maxsize)
    parts = Parts(len(places))
    table = Table(key, snapshot.texts[STATE], {base: one.entries for base, one in snapshot.contents.items()},
                  snapshot.contents["model"].aliases, parts)
    apart = parts.count // copies
    homes = [[places[(part + apart * copy) % parts.count] for copy in range(copies)] for part in range(parts.count)]
    return _sent_home(table, snapshot, homes, peers)


def _places(holders: Sequence[int] | None, copies: int, peers: Peers) -> list[int]:
    """The ranks of the group that are ``holders``, in order."""
    members = peers.members
    chosen = members if holders is None else sorted(holders)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(members):
        raise CheckpointError("holders of a checkpoint in memory must be ranks of the process group, each once",
                              expected=f"some of {list(members)}", got=list(holders or ()))
    if not isinstance(copies, int) or not 1 <= copies <= len(chosen):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError("a holder cannot have a part twice", expected=f"copies of 1 to {len(chosen)}", got=copies)
    return [members.index(rank) for rank in chosen]


def _sent_home(table: Table, snapshot: Snapshot, homes: Sequence[Sequence[int]], peers: Peers) -> MemoryCheckpoint:
    """Send this rank's pieces to the ranks ``homes[part]``; what arrives here (a collective)."""
    rows: list[list[Row]] = [[] for _ in range(peers.size)]
    sent: list[list[Range]] = [[] for _ in range(peers.size)]
    with together(peers, _SAVING):
        for base, contents in snapshot.contents.items():
            for piece in contents.pieces:
                if piece.values.is_meta:
                    raise CheckpointError("a parameter on the meta device has no values", fqn=piece.name,
                                          remedy="Call shardwise.materialise(model) before.")
                number = table.numbers[base, piece.name]
                for part, start, stop in table.cut(number, piece.start, piece.start + piece.values.numel()):
                    for rank in homes[part]:
                        rows[rank].append((number, start, stop))
                        sent[rank].append(Range(piece.values, start - piece.start, stop - piece.start))
    arriving = exchange_rows(peers, rows, doing=_SAVING)
    with together(peers, _SAVING):
        held = {part: table.memory(part) for part, ranks in enumerate(homes) if peers.rank in ranks}
        checkpoint = MemoryCheckpoint(table, held)
        checkpoint.require_whole(arriving)
        received = [checkpoint.ranges(rows) for rows in arriving]
    exchange_ranges(peers, sent, received, table.dtypes, doing=_SAVING)
    with between(peers, _SAVING):
        peers.gather(None)  # who leaves now knows that all holders have all of it
    return checkpoint


@Errand("checkpoint.load_from_memory")
def load_from_memory(
    checkpoint: MemoryCheckpoint | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    random_state: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load what ``save_to_memory`` holds, at any world size, sharded in any way. Every rank calls it.

    Args:
        checkpoint: this rank's share; None on ranks that have none, new ones say.
        model: sharded or not; parameters on the meta device get memory where they compute.
        optimizer: gets its state and the options of its groups.
        strict: the names must be the same; False loads what fits.
        random_state: as in ``load``.
        process_group: the ranks that get the model, with enough holders among them that every part is there;
            None: all.

    Returns:
        what was given to ``save_to_memory`` as ``extra``, as ``load`` returns it.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any of them.
    """
    wait()
    peers = Peers.of(process_group)
    source = MemorySource.of(checkpoint, peers)
    fetched = source.extra_tensors()
    with ExitStack() as stack:
        with together(peers, LOADING, UNTOUCHED):
            units = stack.enter_context(at_rest(model))
            restore = Restore(units, model, optimizer, source, Saved(source, fetched.__getitem__, peers),
                              Wishes(strict=strict, random_state=random_state))
        with together(peers, LOADING, HALF_DONE):
            targets = restore.begin()
        source.fill(targets)
        with together(peers, LOADING, HALF_DONE):
            restore.finish()
    return restore.extra
