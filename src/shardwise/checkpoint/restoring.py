"""What a load does to model and optimizer, wherever the values come from: first a plan, then the values.

``Restore`` matches names, shapes and dtypes and raises before anything is changed; ``begin`` gives memory and says
what goes where; once that is filled, ``finish`` gives the rest: optimizer, modules' extra state, random states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
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
from .snapshot import STATE
from .source import Located, Target

__all__ = ["Readable", "Restore", "Saved", "Wishes", "at_rest"]


class Readable(Protocol):
    """A checkpoint, in files or in memory."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        ...

    def tensors(self, base: str) -> tuple[dict[str, Located], dict[str, str]]:
        """The tensors of ``base`` (model, optimizer, extra), and other names of them."""
        ...

    def text(self, name: str) -> str | None:
        """A small file's text; None if there is none."""
        ...


@dataclass(frozen=True)
class Wishes:
    """How to match; see ``load``."""

    strict: bool = True
    name_map: NameMap = None
    dtype_map: DtypeMap = None
    random_state: bool | None = None


class Saved:
    """What a checkpoint holds beside the model's tensors, for this rank.

    ``fetch`` gives a whole tensor of those that belong to ``extra`` and to the modules' extra state.
    """

    def __init__(self, source: Readable, fetch: Callable[[str], Tensor], peers: Peers) -> None:
        self._source, self._fetch, self._rank, self._size = source, fetch, peers.rank, peers.size
        text = source.text(STATE)
        self._state: dict[str, Any] = json.loads(text) if text is not None else {}

    def optimizer(self, tensors: list[ModelTensor], optimizer: torch.optim.Optimizer, *, strict: bool
                  ) -> OptimizerRestore:
        """What to read for the optimizer."""
        if "optimizer" not in self._state:
            raise CheckpointError(f"there is no optimizer state in {self._source.place}",
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
        rank, by_rank = self._rank_of(name), self._state[name]["by_rank"]
        return decode(by_rank[rank], lambda place: self._fetch(f"rank{rank}.{place}"))

    def tensors_of(self, name: str, found: Mapping[str, Located]) -> dict[str, Located]:
        """Those of ``found`` that ``value(name)`` will fetch."""
        if name not in self._state:
            return {}
        front = f"rank{self._rank_of(name)}.{name}"
        return {key: at for key, at in found.items() if key == front or key.startswith(f"{front}.")}

    def _rank_of(self, name: str) -> str:
        rank = str(self._rank)
        return rank if rank in self._state[name]["by_rank"] else "0"

    def restore_random_state(self) -> None:
        """Where there are as many ranks as then; another number has no streams to go on with."""
        states = self._state.get("random", ())
        if len(states) == self._size:
            restore_random_state(decode(states[self._rank], _no_tensor))


class Restore:
    """One load into ``model``, whose ``units`` are at rest. Raises ``CheckpointError``; nothing is changed then."""

    def __init__(self, units: Sequence[Unit], model: nn.Module, optimizer: torch.optim.Optimizer | None,
                 source: Readable, saved: Saved, wishes: Wishes) -> None:
        self._units, self._saved, strict = units, saved, wishes.strict
        tensors = undivided_tensors(model)
        self._pairs = fit_model(tensors, *source.tensors("model"), strict=strict, name_map=wishes.name_map,
                                dtype_map=wishes.dtype_map)
        _require_values(tensors, [tensor for tensor, _ in self._pairs])
        self._optimizer = saved.optimizer(tensors, optimizer, strict=strict) if optimizer is not None else None
        self.extra, self._modules = saved.value("extra"), saved.modules(model, strict=strict)
        self._random = optimizer is not None if wishes.random_state is None else wishes.random_state

    @property
    def targets(self) -> list[Target]:
        """All that will be read. The model's may have no memory before ``begin``."""
        return [target for _, target in self._pairs] + self._optimizer_targets

    @property
    def _optimizer_targets(self) -> list[Target]:
        return self._optimizer.targets if self._optimizer is not None else []

    def begin(self) -> list[Target]:
        """The model is about to change: all that is to be filled."""
        _come_to_rest(self._units)
        return [replace(target, values=_memory_of(tensor)) for tensor, target in self._pairs] + self._optimizer_targets

    def finish(self) -> None:
        """The targets of ``begin`` are filled."""
        if self._optimizer is not None:
            self._optimizer.apply()
        set_extra_states(self._modules)
        if self._random:
            self._saved.restore_random_state()


@contextmanager
def at_rest(model: nn.Module) -> Generator[list[Unit]]:
    """The units of ``model``, settled. Inside, buffers are the registered ones and not those cast for computation."""
    units = settle(model)
    cast = [unit for unit in units if unit.buffers.is_cast]
    for unit in cast:
        unit.buffers.for_checkpoint()
    try:
        yield units
    finally:
        for unit in cast:
            unit.buffers.for_compute()


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


def _memory_of(tensor: ModelTensor) -> Tensor:
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


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError("a random state cannot be a tensor", fqn=name)
