"""Reading a checkpoint that lies in the memory of some ranks: all of them ask, and the holders answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.peers import Peers
from ..errors import CheckpointError
from .memory_parts import MEMORY, MemoryCheckpoint, Table
from .restoring import Saved
from .snapshot import STATE
from .source import Located, Target
from .streams import Range, Row, exchange_ranges, exchange_rows
from .together import UNTOUCHED, together

__all__ = ["LOADING", "MemorySource"]

LOADING = f"loading {MEMORY}"


class MemorySource:
    """A checkpoint in memory that some of the ranks hold, to be read by all of them."""

    place = MEMORY

    def __init__(self, peers: Peers, table: Table, checkpoint: MemoryCheckpoint | None, homes: list[list[int]]) -> None:
        self._peers, self._table, self._homes = peers, table, homes
        self._mine = checkpoint or MemoryCheckpoint(table, {})

    @classmethod
    def of(cls, checkpoint: MemoryCheckpoint | None, peers: Peers) -> MemorySource:
        """A collective. Raises ``CheckpointError`` if parts are missing, or of different checkpoints."""
        with together(peers, LOADING, UNTOUCHED) as words:
            if checkpoint is not None and not isinstance(checkpoint, MemoryCheckpoint):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise CheckpointError("this is no checkpoint in memory", got=type(checkpoint).__name__,
                                      expected="what save_to_memory returned, or None")
            if checkpoint is not None and checkpoint.held:
                words.mine = (checkpoint.table.key, checkpoint.table.parts.count, list(checkpoint.held))
        said = {rank: word for rank, word in enumerate(words.all) if word is not None}
        if len({word[:2] for word in said.values()}) != 1:
            raise CheckpointError(
                f"{LOADING} failed", got="shares of several checkpoints" if said else "None on every rank",
                expected="what one call of save_to_memory returned, on the ranks that hold it", remedy=UNTOUCHED)
        source, (_, count, _) = next(iter(said.items()))
        homes = [[rank for rank, word in said.items() if part in word[2]] for part in range(count)]
        lost = [part for part, ranks in enumerate(homes) if not ranks]
        if lost:
            raise CheckpointError(
                f"{LOADING} failed", expected=f"its {count} parts", got=f"none of these ranks has part {lost[0]}"
                + (f" ({len(lost)} are missing)" if len(lost) > 1 else ""),
                remedy="Call it on all holders, or save with copies=2. " + UNTOUCHED)
        table = checkpoint.table if checkpoint is not None else None
        if len(said) < peers.size:  # newcomers need to know what there is
            table = peers.tell(table, source)
        assert table is not None
        return cls(peers, table, checkpoint, homes)

    def tensors(self, base: str) -> tuple[dict[str, Located], dict[str, str]]:
        """As ``Source`` has it; the file is the base."""
        found = {entry.name: Located(base, 0, entry) for entry in self._table.entries.get(base, ())}
        return found, dict(self._table.aliases) if base == "model" else {}

    def text(self, name: str) -> str | None:
        """There is only the one of ``state.json``."""
        return self._table.state if name == STATE else None

    def extra_tensors(self) -> dict[str, Tensor]:
        """This rank's tensors of ``extra`` and of the modules' extra state (a collective)."""
        found, _ = self.tensors("extra")
        saved = Saved(self, lambda name: torch.empty(0), self._peers)
        wanted = saved.tensors_of("extra", found) | saved.tensors_of("modules", found)
        fetched = {name: torch.empty(at.entry.shape, dtype=at.entry.dtype) for name, at in wanted.items()}
        self.fill([Target(at, 0, fetched[name]) for name, at in wanted.items()])
        return fetched

    def fill(self, targets: Sequence[Target]) -> None:
        """Fetch every target from a rank that holds it (a collective)."""
        peers, table = self._peers, self._table
        rows: list[list[Row]] = [[] for _ in range(peers.size)]
        received: list[list[Range]] = [[] for _ in range(peers.size)]
        for target in targets:
            number = table.numbers[target.located.file, target.located.entry.name]
            for part, start, stop in table.cut(number, target.start, target.start + target.values.numel()):
                ranks = self._homes[part]
                rank = peers.rank if peers.rank in ranks else ranks[peers.rank % len(ranks)]
                rows[rank].append((number, start, stop))
                received[rank].append(Range(target.values, start - target.start, stop - target.start))
        asked = exchange_rows(peers, rows, doing=LOADING)
        exchange_ranges(peers, [self._mine.ranges(one) for one in asked], received, table.dtypes, doing=LOADING)
