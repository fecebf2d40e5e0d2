"""Loading: each rank reads only the byte ranges that it holds, at any world size.

    1. match names, shapes, dtypes        nothing is changed yet
    2. check the checksums of the ranges  nothing is changed yet
    3. read them into the model and the optimizer

The ranks agree after each; so an error on one is an error on all, and the model is untouched
unless the disk fails between 2 and 3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.peers import Peers
from ..engine.unit import Unit
from ..errors import CheckpointError
from .adoption import adopt
from .extra_state import modules_to_set, set_extra_states
from .fit import DtypeMap, NameMap, fit_model
from .model_tensors import ModelTensor, local_rows, settle, undivided_tensors
from .optimizer_restore import OptimizerRestore
from .plain_values import decode
from .random_state import restore_random_state
from .ranged_io import Staging
from .saving import wait
from .snapshot import STATE
from .source import Located, Source
from .together import together

__all__ = ["load"]

_UNTOUCHED = "The model is as it was."
_HALF_DONE = "The model may be loaded in part: load a good checkpoint before you go on."


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
    wait()
    peers = Peers.of(process_group)
    what, staging = f"loading {path}", Staging()
    with ExitStack() as stack:
        with together(peers, what, _UNTOUCHED):
            source = stack.enter_context(Source(Path(path)))
            units = settle(model)
            stack.enter_context(_exact_buffers(units))
            tensors = undivided_tensors(model)
            found, aliases = _model_files(source)
            pairs = fit_model(tensors, found, aliases, strict=strict, name_map=name_map, dtype_map=dtype_map)
            _require_values(tensors, [tensor for tensor, _ in pairs])
            saved = _Saved(source, staging, peers)
            restore = saved.optimizer(tensors, optimizer, strict=strict) if optimizer is not None else None
            extra, modules = saved.value("extra"), saved.modules(model, strict=strict)
            if checksums:
                source.check_targets([target for _, target in pairs], staging)
                source.check_targets(restore.targets if restore is not None else [], staging)
        with together(peers, what, _HALF_DONE):
            _come_to_rest(units)
            source.fill([replace(target, values=memory_of(tensor)) for tensor, target in pairs], staging)
            if restore is not None:
                source.fill(restore.targets, staging)
                restore.apply()
            set_extra_states(modules)
            if optimizer is not None if random_state is None else random_state:
                saved.restore_random_state()
    return extra


def _model_files(source: Source) -> tuple[dict[str, Located], dict[str, str]]:
    found, aliases = source.tensors("model")
    if not found and not source.files("model"):
        raise CheckpointError(f"there are no safetensors files of a model in {source.folder}",
                              expected="model.safetensors or model.safetensors.index.json",
                              remedy="Give the folder that has them, or one file's path.")
    return found, aliases


def _require_values(tensors: Sequence[ModelTensor], loaded: Sequence[ModelTensor]) -> None:
    """Raise ``CheckpointError`` if a sharded parameter on the meta device would stay without values."""
    left = [tensor.fqn for tensor in tensors
            if tensor.storage is not None and tensor.storage.on_meta and tensor not in loaded]
    if left:
        raise CheckpointError("parameters on the meta device are not in the checkpoint", fqn=left[0],
                              got=f"{len(left)} of them ({', '.join(left[:4])})",
                              remedy="Call shardwise.materialise(model) before load.")


def _come_to_rest(units: Sequence[Unit]) -> None:
    """What is gathered is out of date; what is on the meta device gets memory."""
    for unit in units:
        unit.reshard()
        if any(storage.on_meta for storage in unit.storages):
            unit.leave_meta(None)


@contextmanager
def _exact_buffers(units: Sequence[Unit]) -> Generator[None]:
    """Inside, buffers are the registered ones and not those cast for computation."""
    cast = [unit for unit in units if unit.buffers.is_cast]
    for unit in cast:
        unit.buffers.for_checkpoint()
    try:
        yield
    finally:
        for unit in cast:
            unit.buffers.for_compute()


def memory_of(tensor: ModelTensor) -> Tensor:
    """Where a tensor's values go; what is not sharded and on the meta device gets memory on the default one."""
    if not tensor.values.is_meta:
        return tensor.values
    if tensor.storage is not None:
        return local_rows(tensor.storage, tensor.index)
    assert tensor.owner is not None
    held = getattr(*tensor.owner)
    fresh = torch.empty_like(held, device=torch.get_default_device())
    if isinstance(held, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=held.requires_grad)
    torch.utils.swap_tensors(held, fresh)  # the object stays, for the optimizer and for tied names
    return held.detach()


class _Saved:
    """What ``state.json`` holds, for this rank."""

    def __init__(self, source: Source, staging: Staging, peers: Peers) -> None:
        self._source, self._staging, self._rank, self._size = source, staging, peers.rank, peers.size
        text = source.text(STATE)
        self._state: dict[str, Any] = json.loads(text) if text is not None else {}

    def optimizer(self, tensors: list[ModelTensor], optimizer: torch.optim.Optimizer, *, strict: bool
                  ) -> OptimizerRestore:
        """What to read for the optimizer."""
        if "optimizer" not in self._state:
            raise CheckpointError(f"there is no optimizer state in {self._source.folder}",
                                  remedy="Load the model without the optimizer.")
        adopt(optimizer)
        found, _ = self._source.tensors("optimizer")
        return OptimizerRestore(tensors, optimizer, self._state["optimizer"], found, strict=strict)

    def modules(self, model: nn.Module, *, strict: bool) -> list[tuple[nn.Module, Any]]:
        """Modules with their extra state; ``strict`` where a run wrote the files, not others or a conversion."""
        return modules_to_set(model, self.value("modules") or {}, strict=strict and "modules" in self._state)

    def value(self, name: str) -> Any:
        """What the user added (``extra``) or modules keep (``modules``); this rank's where the ranks' differed."""
        if name not in self._state:
            return None
        by_rank = self._state[name]["by_rank"]
        rank = str(self._rank) if str(self._rank) in by_rank else "0"
        found, _ = self._source.tensors("extra")

        def fetch(name: str) -> Tensor:
            return self._source.whole(found[f"rank{rank}.{name}"], self._staging)

        return decode(by_rank[rank], fetch)

    def restore_random_state(self) -> None:
        """Where there are as many ranks as then; another number has no streams to go on with."""
        states = self._state.get("random", ())
        if len(states) == self._size:
            restore_random_state(decode(states[self._rank], _no_tensor))


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError("a random state cannot be a tensor", fqn=name)
