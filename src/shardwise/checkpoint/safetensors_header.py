"""The safetensors format: 8 bytes of header length, a JSON header, and the tensors behind it.

The data is row-major, without gaps; offsets count from the end of the header. The library of that name
writes whole files from one process, so ranks that write ranges of one file need the header by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

__all__ = ["Entry", "Header", "dtype_name", "encode_header", "read_header"]

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

#: a header is JSON of at most this many bytes; what claims to be longer is no safetensors file
_LONGEST_HEADER = 100_000_000
_ALIGNMENT = 8  # of the data's first byte, so that readers may map it


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; ``start`` is its first byte behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a file says of itself: its tensors, its free text, and where the data begins."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def file_bytes(self) -> int:
        return self.data_start + max((entry.start + entry.nbytes for entry in self.entries), default=0)


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The format's name of ``dtype``. Raises ``CheckpointError`` for one that it does not have."""
    if dtype not in _NAMES:
        raise CheckpointError("safetensors has no such dtype", fqn=tensor, got=dtype,
                              expected="one of " + ", ".join(_NAMES.values()),
                              remedy="Convert the tensor, or register it as two real ones.")
    return _NAMES[dtype]


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes in front of the data, padded with spaces to its alignment."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        table[entry.name] = {
            "dtype": dtype_name(entry.dtype, entry.name), "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.nbytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """The header of a file, checked against its size. Raises ``CheckpointError``."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise _damaged(path, "a safetensors header", f"{size} bytes that do not begin with one")
            table = json.loads(file.read(length))
        header = _parse(table, 8 + length)
    except FileNotFoundError as error:
        raise CheckpointError(f"a file of the checkpoint is missing: {path}",
                              remedy="Copy the whole folder, or save again.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "a safetensors header", f"{type(error).__name__}: {error}") from error
    if header.file_bytes != size:
        raise _damaged(path, f"{header.file_bytes} bytes", f"{size} bytes")
    return header


def _parse(table: dict[str, Any], data_start: int) -> Header:
    """Raises any of Python's errors for what makes no sense, and ``CheckpointError`` for a wrong size."""
    metadata = dict((table.pop("__metadata__", None) or {}).items())
    if not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("the header's metadata is no text", expected="text by name", got=metadata)
    entries: list[Entry] = []
    for name, facts in table.items():
        start, stop = _sizes(facts["data_offsets"], name)
        entry = Entry(name, _DTYPES[facts["dtype"]], tuple(_sizes(facts["shape"], name)), start)
        if stop - start != entry.nbytes:
            raise CheckpointError("a tensor's bytes do not fit its shape", fqn=name, expected=entry.nbytes,
                                  got=stop - start)
        entries.append(entry)
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise CheckpointError("the tensors of a file do not lie behind each other", fqn=entry.name,
                                  expected=f"one at byte {end}", got=entry.start)
        end += entry.nbytes
    return Header(tuple(entries), metadata, data_start)


def _sizes(numbers: Any, tensor: str) -> list[int]:
    found: list[Any] = list(numbers)
    if not all(type(number) is int and 0 <= number < 2**63 for number in found):
        raise CheckpointError("a tensor's shape or place is none", fqn=tensor, got=found,
                              expected="numbers of at least 0")
    return found


def _damaged(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"a file of the checkpoint is damaged: {path}", expected=expected, got=got,
                           remedy="It was cut or altered after it was written; take another checkpoint.")
