"""What all ranks must agree on before data moves, and the errors when they do not.

Each rank describes the collective that it is about to run as a ``Call`` (five integers, so
that it travels in a tiny tensor or a shared control block). ``require_agreement`` compares the
calls of all ranks; every rank sees the same list, so every rank raises or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CommunicationError, DivergenceError, PeerError
from .errands import in_errand

__all__ = ["LOOK_THERE", "NO_UNIT", "REDUCIBLE", "Call", "DescribeTag", "Kind", "disagreement", "gather_call",
           "peer_error", "require_agreement", "require_fit", "require_reducible", "scatter_call", "tensor_call"]

LOOK_THERE = "Look at the output of that rank first; this rank only noticed. It may also have run fewer steps."
"""What to do about a lost peer."""

NO_UNIT = -2
"""The tag of a collective that is for no unit."""

DescribeTag = Callable[[int], str]
"""Translates a tag into the name of what it stands for (a unit)."""

_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}

REDUCIBLE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16,
                       torch.int64, torch.int32, torch.int8, torch.uint8})
"""The dtypes that can be combined, on every transport alike."""


class Kind(IntEnum):
    """The collective that a rank runs."""

    BARRIER = 0
    GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    BROADCAST = 4
    ALL_TO_ALL = 5


_LABEL = {
    Kind.BARRIER: "barrier",
    Kind.GATHER: "gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.BROADCAST: "broadcast",
    Kind.ALL_TO_ALL: "exchange",
}


class Call(NamedTuple):
    """One rank's part in one collective, as integers."""

    kind: int
    tag: int = 0
    numel: int = 0
    dtype: int = 0
    #: the source of a broadcast, the reduction of an all-reduce
    detail: int = 0

    def subject(self, describe: DescribeTag | None) -> str:
        """``gather of 'layers.0'``, or ``gather with tag 3`` without a translator."""
        label = _LABEL[Kind(self.kind)]
        if self.kind == Kind.BARRIER or self.tag == NO_UNIT:
            return label
        return f"{label} with tag {self.tag}" if describe is None else f"{label} of {describe(self.tag)!r}"

    def size(self) -> str:
        """``10 float32 elements``, and the detail where there is one."""
        name = str(_DTYPES[self.dtype]).removeprefix("torch.")
        return f"{self.numel} {name} elements" + (f", variant {self.detail}" if self.detail else "")


class Facts(NamedTuple):
    """The parts of an error about ranks that differ."""

    what: str
    got: str
    remedy: str


def tensor_call(kind: Kind, tensor: Tensor, tag: int, detail: int = 0) -> Call:
    """The call for a collective whose message is all of ``tensor``."""
    return Call(int(kind), tag, tensor.numel(), _CODE[tensor.dtype], detail)


def gather_call(out: Tensor, shard: Tensor, size: int, tag: int) -> Call:
    """The call for ``all_gather(out, shard)``; raises when the two do not fit."""
    require_fit("all_gather", out, shard, size)
    return tensor_call(Kind.GATHER, shard, tag)


def scatter_call(out: Tensor, full: Tensor, size: int, tag: int) -> Call:
    """The call for ``reduce_scatter(out, full)``; raises when the two do not fit."""
    require_fit("reduce_scatter", full, out, size)
    return tensor_call(Kind.REDUCE_SCATTER, out, tag)


def require_fit(what: str, full: Tensor, part: Tensor, size: int) -> None:
    """Raise ``CommunicationError`` unless ``full`` is ``size`` times ``part``, both in one piece."""
    if full.dtype is not part.dtype:
        raise CommunicationError(f"{what} needs one dtype", expected=full.dtype, got=part.dtype)
    if full.numel() != part.numel() * size:
        raise CommunicationError(
            f"{what} needs a full buffer of {size} equal shards",
            expected=f"{part.numel() * size} elements", got=f"{full.numel()} elements")
    if not (full.is_contiguous() and part.is_contiguous()):
        raise CommunicationError(f"{what} needs contiguous buffers", remedy="Pass 1-D buffers.")


def require_reducible(what: str, tensor: Tensor) -> None:
    """Raise unless every transport can combine this dtype."""
    if tensor.dtype not in REDUCIBLE:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
        raise CommunicationError(f"{what} cannot combine this dtype", expected=f"one of {known}",
                                 got=tensor.dtype, remedy="Reduce in float32 or bfloat16.")


def require_agreement(calls: Sequence[Call], members: Sequence[int], describe: DescribeTag | None,
                      words: str = "", errands: Sequence[int] | None = None) -> None:
    """Raise ``DivergenceError`` on every rank unless all ranks run the same call; ``words``: what may explain it."""
    facts = disagreement(calls, members, describe, errands)
    if facts is not None:
        raise DivergenceError(facts.what, got=facts.got + words, remedy=facts.remedy)


def disagreement(calls: Sequence[Call | None], members: Sequence[int], describe: DescribeTag | None,
                 errands: Sequence[int] | None = None) -> Facts | None:
    """What ``calls`` disagree on; None of a rank that has not come to it yet, or forgot it.

    ``errands``: the call of the library that each belongs to, for the text.
    """
    first = next((call for call in calls if call is not None), None)
    if first is None or all(call is None or call == first for call in calls):
        return None
    errands = errands or [0] * len(calls)
    pairs = list(zip(members, calls, strict=True))
    if any(call is not None and call[:2] != first[:2] for call in calls):
        units = not any(errands)
        return Facts(
            "ranks run different units, so their shards would be mixed" if units
            else "ranks run different calls, so what they exchange would be mixed",
            ", ".join(f"rank {rank} runs {call.subject(describe)}{in_errand(number)}" if call is not None
                      else f"rank {rank} is not at it" for (rank, call), number in zip(pairs, errands, strict=True)),
            f"Every rank must {'run the same units' if units else 'make the same calls'} in the same order; look for "
            "control flow that depends on the data or on the rank.")
    return Facts(
        f"ranks disagree on the size or dtype of the shard in {first.subject(describe)}",
        ", ".join(f"rank {rank} has {call.size()}{in_errand(number)}"
                  for (rank, call), number in zip(pairs, errands, strict=True) if call is not None),
        "Build the same model with the same options on every rank.")


def peer_error(text: str, call: Call, members: Sequence[int], describe: DescribeTag | None, words: str = "",
               errand: int | None = None) -> PeerError:
    """A peer died or does not answer while ``call`` runs; ``words``: what it said at last.

    ``errand``: what ``call`` belongs to (None: what this thread is in).
    """
    ranks = ", ".join(map(str, members))
    return PeerError(f"{text} during {call.subject(describe)}{in_errand(errand)} in the group of ranks {ranks}{words}",
                     remedy=LOOK_THERE)
