"""Files of ``torch.save``: tensors and plain containers, and nothing that could run code."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError
from .foreign import Table
from .safetensors_header import Entry

__all__ = ["load_inert", "open_torch", "reason"]


@contextmanager
def open_torch(path: Path) -> Generator[Table]:
    """What is in one file. Raises ``CheckpointError``."""
    with _clear_errors(path):
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    flat = dict(_flat("", loaded))
    tensors = {name: Entry(name, value.dtype, tuple(value.shape)) for name, value in flat.items()
               if isinstance(value, Tensor)}
    yield Table(tensors, [name for name in flat if name not in tensors], flat.__getitem__)


class Inert:
    """Stands for an object of a class that was not loaded: it keeps what it was made of, and does nothing."""

    def __init__(self, *made_of: Any, **_: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        self.made_of = (state,)


def load_inert(path: Path) -> dict[str, Any]:
    """A dict out of a file that holds objects of other programs too; ``Inert`` stands for each of these."""
    with _clear_errors(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins: Any = [(Inert, name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"not a file of a training run: {path}", expected="a dict",
                              got=type(loaded).__name__)
    return cast("dict[str, Any]", loaded)


@contextmanager
def _clear_errors(path: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"not a file of tensors that torch.save wrote: {path}",
                              got=reason(error),
                              remedy="Only tensors and plain containers are read, since others can run code.",
                              ) from error


def reason(error: BaseException) -> str:
    """The line of torch's text that says what was wrong."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "GLOBAL" in line), lines[0])


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in cast("list[Any]", value)):
        for number, item in enumerate(cast("list[Any]", value)):
            yield from _flat(f"{prefix}.{number}", item)
    else:
        yield prefix, value
