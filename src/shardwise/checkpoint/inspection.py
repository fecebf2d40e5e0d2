"""What a checkpoint holds, and whether it is still what was written; without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checksums import text_checksum
from .manifest import Manifest
from .ranged_io import Staging
from .safetensors_header import dtype_name
from .source import Located, Source, nothing_to_read

__all__ = ["Inspection", "TensorFacts", "Verification", "inspect", "verify"]

_BASES = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a checkpoint. ``checksum``: of its blocks' checksums, None where there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    checksum: str | None


@dataclass(frozen=True)
class Inspection:
    """``facts``: who wrote the checkpoint, where that is known; ``aliases``: other names of tied tensors."""

    facts: dict[str, Any]
    tensors: tuple[TensorFacts, ...]
    aliases: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"bytes": self.nbytes}


@dataclass(frozen=True)
class Verification:
    """``faults``: one text for each damaged file."""

    nbytes: int
    has_checksums: bool
    faults: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """All tensors of a checkpoint folder or a safetensors file. Raises ``CheckpointError``."""
    with Source(path) as source:
        tensors: list[TensorFacts] = []
        aliases: dict[str, str] = {}
        for base in _BASES:
            found, others = source.tensors(base)
            tensors += [_facts(name, located, source.manifest) for name, located in found.items()]
            aliases |= others
        if not tensors and not source.files("model"):
            raise nothing_to_read(source.folder)
        manifest = source.manifest
        facts: dict[str, Any] = {"path": str(path)}
        if manifest is not None:
            facts |= {"written by ranks": manifest.world_size, **manifest.facts}
        return Inspection(facts, tuple(tensors), aliases)


def _facts(name: str, located: Located, manifest: Manifest | None) -> TensorFacts:
    entry = located.entry
    seal = None
    if manifest is not None and located.file in manifest.files:
        blocks = manifest.covering(located.file, located.first, located.first + entry.nbytes)
        seal = text_checksum("".join(block.checksum for block in blocks).encode())[:8]
    return TensorFacts(name, dtype_name(entry.dtype, name), entry.shape, entry.nbytes, located.file, seal)


def verify(path: Path, *, started: Callable[[int], object] = bool,
           progress: Callable[[int], object] = bool) -> Verification:
    """Read every file of a checkpoint and compare. Raises ``CheckpointError`` where none can be read."""
    with Source(path) as source:
        manifest, staging = source.manifest, Staging()
        if manifest is None:
            files = [file for base in _BASES for file in source.files(base)]
            if not files:
                raise nothing_to_read(source.folder)
            for base in _BASES:
                source.tensors(base)
            return Verification(sum((source.folder / f).stat().st_size for f in files), False, ())
        total, faults = sum(manifest.file_bytes(file) for file in manifest.files), list[str]()
        started(total)
        for file in manifest.files:
            try:
                source.check_whole(file, staging)
            except CheckpointError as error:
                faults.append(str(error).removeprefix("shardwise: "))
            progress(manifest.file_bytes(file))
        return Verification(total, True, tuple(faults))
