"""Folders of ``torch.distributed.checkpoint``, read without running anything that they name.

Their metadata and their values that are no tensors are pickles. Here both are read by unpicklers that
know the classes of the format and nothing else.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CheckpointError
from .foreign import Table
from .safetensors_header import Entry
from .torch_file import reason

__all__ = ["open_dcp", "write_dcp"]

_STORAGE = (filesystem.__name__, "_StorageInfo")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise CheckpointError("the checkpoint's metadata is damaged", expected="a layout of tensors", got=name)
    return found


_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size, ("torch", "device"): torch.device, ("collections", "OrderedDict"): OrderedDict,
    ("torch.serialization", "_get_layout"): _layout, _STORAGE: getattr(filesystem, _STORAGE[1]),
    **{("pathlib", name): pathlib.PurePosixPath for name in ("PosixPath", "WindowsPath", "PurePosixPath")},
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        found = getattr(metadata, name, None) if module == metadata.__name__ else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError("the checkpoint's metadata names something that is none of the format's",
                              got=f"{module}.{name}", remedy="It was not read, since it could run code.")


class _Reader(filesystem.FileSystemReader):
    """Reads the metadata once, and carefully."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        try:
            with (path / ".metadata").open("rb") as file:
                self.found = cast("metadata.Metadata", _Unpickler(file).load())
            self.found.storage_meta = self.found.storage_meta or metadata.StorageMeta()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the metadata is damaged: {path / '.metadata'}", expected="what DCP wrote",
                                  got=f"{type(error).__name__}: {error}") from error

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self.found


class _Planner(DefaultLoadPlanner):
    """Values that are no tensors: plain ones only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded: Any = torch.load(value, map_location="cpu", weights_only=True)
        cast("dict[str, Any]", self.state_dict)[read_item.dest_index.fqn] = loaded


@contextmanager
def _alone() -> Generator[None]:
    """Inside, DCP does not warn that it works in one process: that is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is")
        yield


@contextmanager
def open_dcp(path: Path) -> Generator[Table]:
    """What is in the folder. Raises ``CheckpointError``, also for what could run code."""
    reader = _Reader(path)
    described = reader.found.state_dict_metadata
    tensors = {name: Entry(name, facts.properties.dtype, tuple(facts.size)) for name, facts in described.items()
               if isinstance(facts, metadata.TensorStorageMetadata)}

    def read(name: str) -> Any:
        entry = tensors.get(name)
        state: dict[str, Any] = {name: torch.empty(entry.shape, dtype=entry.dtype) if entry else None}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _alone():
                load(state, storage_reader=reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
            text = "; ".join(reason(failure[0]) for failure in failures.values())
            raise CheckpointError(f"cannot read {name!r} in {path}", expected="tensors and plain values", got=text,
                                  remedy="Other objects are not read, since they could run code.") from error
        return state[name]

    yield Table(tensors, [name for name in described if name not in tensors], read)


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """A folder with the tensors and values of ``state``."""
    with _alone():
        save(state, storage_writer=filesystem.FileSystemWriter(str(path)), no_dist=True)
