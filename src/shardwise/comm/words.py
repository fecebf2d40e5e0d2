"""Words over the transport of tensors: what every rank has to say, where a failure is being explained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from .collectives import Collectives

__all__ = ["exchange"]


def exchange(groups: Sequence[Collectives], word: Any, device: torch.device) -> dict[int, Any]:
    """What each rank says (anything that JSON can carry), by global rank; the same on every rank.

    ``groups``: one, or the two of a mesh, whose ranks are reached one group after the other.
    """
    said: dict[str, Any] = {str(groups[0].members[groups[0].rank]): word}
    for group in groups:
        parts = _gather(group, json.dumps(said).encode(), device)
        said = {rank: one for part in parts for rank, one in json.loads(part).items()}
    return {int(rank): said[rank] for rank in sorted(said, key=int)}


def _gather(group: Collectives, mine: bytes, device: torch.device) -> list[str]:
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=device)).wait()
    longest = int(lengths.max())
    word = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
    words = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    group.all_gather(words, word).wait()
    return [bytes(row.tolist()).decode() for row in words.view(group.size, longest).cpu()]
