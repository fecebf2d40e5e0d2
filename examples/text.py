"""Real text without a download: the source files of this machine's Python standard library.

A token is a byte, so the vocabulary is 256. One file in sixteen is held out, chosen by a hash of its
name. A batch is a pure function of (seed, step): whoever knows the step number knows the data, so a
resumed run goes on with exactly the batches that it would have seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["VOCABULARY", "Corpus", "decode", "encode", "is_held_out", "read_corpus"]

VOCABULARY = 256
HELD_OUT_ONE_IN = 16
LEAST_BYTES = 1_000_000
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out`` are 1-D tensors of bytes; ``digest`` names their content."""

    root: Path
    files: int
    train: Tensor
    held_out: Tensor
    digest: str

    def batch(self, seed: int, step: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of one training step: two [rows, context] tensors of ids."""
        return _windows(self.train, seed * 1_000_003 + step, rows, context)

    def held_out_batch(self, index: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Like ``batch``, from the files that training never sees; the same for every seed."""
        return _windows(self.held_out, index, rows, context)


def read_corpus(root: Path | None = None) -> Corpus:
    """Read every source file below ``root`` (default: the standard library) in the order of names."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if SKIPPED.isdisjoint(name.split("/"))]
    for name in names:
        parts[is_held_out(name)].append((root / name).read_bytes().replace(b"\r\n", b"\n"))
    train, held_out = b"\n".join(parts[False]), b"\n".join(parts[True])
    if min(len(train), HELD_OUT_ONE_IN * len(held_out)) < LEAST_BYTES:
        raise ValueError(
            f"the demo learns from Python's own source files, but {root} holds only "
            f"{len(train) + len(held_out):,} bytes of them in {len(names)} files. Point --text at a "
            f"folder with at least {LEAST_BYTES:,} bytes of .py files."
        )
    digest = hashlib.blake2b(train + b"\0" + held_out, digest_size=8).hexdigest()
    return Corpus(root, len(names), _ids(train), _ids(held_out), digest)


def is_held_out(name: str) -> bool:
    """Decide by the file's name alone, so that adding or removing other files moves nothing."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def encode(text: str) -> Tensor:
    return _ids(text.encode()).long()


def decode(ids: Tensor) -> str:
    return bytes(ids.tolist()).decode(errors="replace")


def _ids(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _windows(data: Tensor, seed: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (rows, 1), generator=dice)
    window = data[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]
