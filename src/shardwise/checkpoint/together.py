"""All ranks succeed or all raise: one error text on every rank."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..comm.peers import Peers
from ..errors import CheckpointError, CommunicationError, ShardwiseError

__all__ = ["HALF_DONE", "UNTOUCHED", "Words", "between", "together"]

_SHOWN = 3

#: remedies of a load
UNTOUCHED = "The model is as it was."
HALF_DONE = "The model may be loaded in part: load a good checkpoint before you go on."


class Words:
    """``mine``: what this rank tells the others at the end of a block; ``all``: what each rank told."""

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: list[Any] = []


@contextmanager
def together(peers: Peers, doing: str, remedy: str | None = None) -> Generator[Words]:
    """Run a block on every rank. If it fails on any, every rank raises one ``CheckpointError``.

    The text says what was being done, on which ranks it failed, and why. The block must not
    communicate; what it puts into ``Words.mine`` is exchanged at its end. A collective.
    A rank that is gone is a ``CheckpointError`` too.
    """
    mine: Exception | None = None
    words = Words()
    try:
        yield words
    except Exception as error:
        mine = error
    try:
        said = peers.gather((None if mine is None else _text(mine), words.mine))
    except ShardwiseError as lost:
        raise CheckpointError(f"{doing} failed", rank=peers.rank, got=_text(mine or lost),
                              remedy=remedy) from lost
    words.all = [word for _, word in said]
    failed = {rank: text for rank, (text, _) in enumerate(said) if text is not None}
    if failed:
        raise CheckpointError(f"{doing} failed", got=_by_text(failed, peers.size), remedy=remedy) from mine


@contextmanager
def between(peers: Peers, doing: str, remedy: str | None = None) -> Generator[None]:
    """A block that communicates by itself: a rank that is gone is a ``CheckpointError`` there too."""
    try:
        yield
    except CommunicationError as lost:
        raise CheckpointError(f"{doing} failed", rank=peers.rank, got=_text(lost), remedy=remedy) from lost


def _text(error: BaseException) -> str:
    text = str(error).removeprefix("shardwise: ").removesuffix(".")
    return text if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {text}"


def _by_text(failed: dict[int, str], size: int) -> str:
    """Each different text once, with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    if size == 1:
        return next(iter(by_text))
    parts = [f"on rank {', '.join(map(str, ranks))}: {text}"
             for text, ranks in list(by_text.items())[:_SHOWN]]
    more = len(by_text) - _SHOWN
    return "; ".join(parts) + (f"; and {more} other errors" if more > 0 else "")
