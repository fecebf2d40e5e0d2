"""A checkpoint's folder appears whole or not at all.

    .tmp-NAME   being written; nobody reads it, the next save removes it
    NAME        the checkpoint
    .old-NAME   the one before, between the two renames that replace NAME; then removed

After a crash between the renames ``NAME`` is missing and ``.old-NAME`` is the last good one: readers
take it (``present``), and the next save puts it back first (``tidy``).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError, ConfigurationError
from .manifest import MANIFEST

__all__ = ["commit", "create_file", "discard", "prepare", "present", "prune", "require_numbered",
           "sync_folder", "write_text"]


def aside(path: Path) -> Path:
    """Where the checkpoint ``path`` is written."""
    return path.with_name(f".tmp-{path.name}")


def replaced(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces waits for its removal."""
    return path.with_name(f".old-{path.name}")


def present(path: Path) -> Path:
    """The folder to read for ``path``."""
    return replaced(path) if not path.exists() and replaced(path).exists() else path


def prepare(path: Path) -> Path:
    """Clear what a crash left, and make the empty folder to write into."""
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
        raise CheckpointError(f"there is something else than a checkpoint of ours at {path}",
                              expected="such a checkpoint, an empty folder, or nothing",
                              remedy="Choose another path; what is there would have been removed.")
    path.parent.mkdir(parents=True, exist_ok=True)
    discard(path)
    aside(path).mkdir()
    return aside(path)


def discard(path: Path) -> None:
    """Leave nothing but the last good checkpoint, under its name."""
    if not path.exists() and replaced(path).exists():
        replaced(path).rename(path)
    for folder in (aside(path), replaced(path)):
        if folder.exists():
            shutil.rmtree(folder)


def commit(path: Path) -> None:
    """Put the folder that was written in the place of ``path``."""
    sync_folder(aside(path))
    if path.exists():
        path.rename(replaced(path))
    aside(path).rename(path)
    sync_folder(path.parent)
    if replaced(path).exists():
        shutil.rmtree(replaced(path))


def create_file(path: Path, header: bytes, nbytes: int) -> None:
    """A file of its whole size, with its header; takes the space on the disk at once where it can."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is not None:
            allocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        os.pwrite(fd, header, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """A small file, on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's list of files to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------- old ones
def require_numbered(path: Path, keep: int | None) -> None:
    """Raise ``ConfigurationError`` unless ``keep`` can be told apart by the number in the name."""
    if keep is None:
        return
    if keep < 1:
        raise ConfigurationError("keep must leave at least the checkpoint itself", expected="1 or more",
                                 got=keep)
    if not re.search(r"\d", path.name):
        raise ConfigurationError(
            "keep needs a number in the checkpoint's name, to know which ones belong together",
            expected="a name like step-1000", got=path.name)


def prune(path: Path, keep: int) -> None:
    """Remove the oldest checkpoints beside ``path`` whose names differ only in their numbers."""
    pattern = re.sub(r"\d+", "#", path.name)
    beside = [folder for folder in path.parent.iterdir() if (folder / MANIFEST).is_file()
              and re.sub(r"\d+", "#", folder.name) == pattern and folder != path]
    beside.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime_ns, reverse=True)
    for folder in beside[keep - 1 :]:
        doomed = replaced(folder)
        folder.rename(doomed)  # so that a crash leaves no half of it under its name
        shutil.rmtree(doomed)
