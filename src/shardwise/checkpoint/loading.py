"""Loading: each rank reads only the byte ranges that it holds, at any world size.

    1. match names, shapes, dtypes        nothing is changed yet
    2. check the checksums of the ranges  nothing is changed yet
    3. read them into the model and the optimizer

The ranks agree after each; so an error on one is an error on all, and the model is untouched
unless the disk fails between 2 and 3.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.errands import Errand
from ..comm.peers import Peers
from .arguments import require_path_and_model
from .fit import DtypeMap, NameMap
from .ranged_io import Staging
from .restoring import Restore, Saved, Wishes, at_rest
from .saving import wait
from .source import Source, nothing_to_read
from .together import HALF_DONE, UNTOUCHED, together

__all__ = ["load"]


@Errand("checkpoint.load")
def load(  # noqa: PLR0913 - each argument is a choice of its own
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    name_map: NameMap = None,
    dtype_map: DtypeMap = None,
    random_state: bool | None = None,
    checksums: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint, or any folder or file of safetensors, into a model. Every rank calls it.

    Args:
        path: what ``save`` wrote, a ``save_pretrained`` folder, or one safetensors file.
        model: sharded or not, at any world size; parameters on the meta device get memory where they compute.
        optimizer: gets its state and the options of its groups.
        strict: the names must be the same; False loads what fits.
        name_map: from names in the model to names in the files.
        dtype_map: conversions that are allowed, file dtype to model dtype.
        random_state: restore the random states; None: if an optimizer is given. Only with as many
            ranks as saved them, else they stay as they are.
        checksums: compare those of every block before anything is read into the model. False saves that
            pass where the files were verified; sizes, headers, names and shapes are checked all the same.
        process_group: the ranks that hold the model; None: all.

    Returns:
        what was given to ``save`` as ``extra``; None for files of others.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any of them.
    """
    require_path_and_model("checkpoint.load", path, model)
    wait()
    peers = Peers.of(process_group)
    what, staging = f"loading {path}", Staging()
    with ExitStack() as stack:
        with together(peers, what, UNTOUCHED):
            source = stack.enter_context(Source(Path(path)))
            _require_model(source)
            units = stack.enter_context(at_rest(model))
            extra, _ = source.tensors("extra")
            saved = Saved(source, lambda name: source.whole(extra[name], staging), peers)
            restore = Restore(units, model, optimizer, source, saved,
                              Wishes(strict, name_map, dtype_map, random_state))
            if checksums:
                source.check_targets(restore.targets, staging)
        with together(peers, what, HALF_DONE):
            source.fill(restore.begin(), staging)
            restore.finish()
    return restore.extra


def _require_model(source: Source) -> None:
    if not source.files("model"):
        raise nothing_to_read(source.folder, "model.safetensors or model.safetensors.index.json")
