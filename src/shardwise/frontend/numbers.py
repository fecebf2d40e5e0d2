"""Optional checks of numbers: what first stopped being finite, and whether replicas are still equal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives, Reduction
from ..comm.errands import Errand
from ..comm.words import exchange
from ..engine.build import units_below
from ..engine.traverse import tensors_in
from ..engine.unit import Unit
from ..errors import LifecycleError, NumbersError
from ..torch_private import no_gradients
from .report import told

__all__ = ["Numbers", "check_numbers", "compare_replicas", "deterministic"]

_NONE = 2**62


class Numbers:
    """What this rank has seen, and the agreement on it. Made by ``check_numbers``."""

    def __init__(self, groups: list[Collectives], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._found: list[tuple[str, str | None]] = []  # what was not finite here, the first one first

    def note(self, what: str, fqn: str | None, value: Tensor) -> None:
        """Remember ``value``, should it not be finite."""
        if not self._found and value.is_floating_point() and not bool(torch.isfinite(value.detach()).all()):
            kind = "NaN" if bool(value.detach().isnan().any()) else "infinite"
            self._found.append((f"{what} is {kind}", fqn))

    def loss(self, value: Tensor) -> None:
        """Check the loss of this rank. A collective; raises ``NumbersError`` on all ranks or on none."""
        self.note("the loss", None, value)
        self.agree()

    @Errand("check_numbers")
    def agree(self) -> None:
        """Raise ``NumbersError`` on every rank if any rank has seen anything. A collective."""
        rank = self._groups[0].members[self._groups[0].rank] if self._groups else 0
        first = rank if self._found else _NONE
        if self._groups:
            table = torch.tensor([first], dtype=torch.int64, device=self._device)
            for comm in self._groups:
                comm.all_reduce(table, Reduction.MIN, tag=3).wait()
            first = int(table.item())
        if first == _NONE:
            return
        found, self._found = self._found, []
        said = exchange(self._groups, found, self._device) if self._groups else {rank: found}
        what, fqn = said[first][0]
        others = [str(other) for other, seen in said.items() if seen and other != first]
        raise NumbersError(what, fqn=fqn, rank=first, got=f"the like on rank {', '.join(others)}" if others else None,
                           remedy="It is the first such value of the pass on that rank; look at what went into it.")


@contextmanager
def check_numbers(model: nn.Module) -> Iterator[Numbers]:
    """Inside, every forward and backward of ``model`` raises at the first value that is not finite.

    ``NumbersError`` names the module whose output, or the parameter whose gradient, was NaN or
    infinite first, and the rank, before gradients of ranks are mixed. It is raised on every rank:
    for outputs at the end of the root's forward, for gradients when their unit is reduced (so under
    ``no_sync`` at the first reduction after it). ``numbers.loss(loss)`` checks a loss on all ranks.

    For a search: each tensor is read once more and the host waits for it, and each unit costs
    one small collective more.
    """
    named = units_below(model)
    if not named:
        raise LifecycleError("the model has no sharded units", unit=type(model).__name__,
                             remedy="Apply fully_shard or FullyShardedDataParallel first.")
    root = named[0][1]
    device = next((u.storages[0].compute_device for _, u in named if u.storages), torch.device("cpu"))
    numbers = Numbers([comm for comm in root.groups.nontrivial if comm.real], device)
    with ExitStack() as stack:
        for name, unit in named:
            _check_gradients(stack, numbers, name, unit)
        _check_outputs(stack, numbers, root)
        yield numbers


def _check_gradients(stack: ExitStack, numbers: Numbers, name: str, unit: Unit) -> None:
    for storage in unit.storages:
        for entry, leaf in zip(storage.owned, storage.leaves, strict=True):
            if leaf.requires_grad:
                fqn = f"{name}.{entry.fqn}" if name else entry.fqn
                handle = leaf.register_hook(lambda g, fqn=fqn: numbers.note("the gradient", fqn, g))
                stack.callback(handle.remove)
    stack.enter_context(told(unit, lambda event, _: numbers.agree() if event == "reduce" else None))


def _check_outputs(stack: ExitStack, numbers: Numbers, root: Unit) -> None:
    for top in root.modules:
        for name, module in top.named_modules():
            def note(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                for tensor in tensors_in(output):
                    numbers.note(f"the output of module {name or '(root)'!r}", None, tensor)

            stack.callback(module.register_forward_hook(note).remove)
    stack.callback(root.modules[-1].register_forward_hook(lambda *_: numbers.agree()).remove)


# ---------------------------------------------------------------------- replicas
@Errand("compare_replicas")
def compare_replicas(model: nn.Module) -> int:
    """Compare the parameters of replicas, bit by bit, through a hash; every k steps, say. A collective.

    Replicas are there with ``NO_SHARD`` and hybrid strategies. Gives the number of parameters that
    were compared, 0 where nothing is replicated. Raises ``NumbersError``, on every rank of the
    replicas that differ, with the first parameter and its ranks.
    """
    compared = 0
    for name, unit in units_below(model):
        comm = unit.groups.replicate
        if comm is None or comm.size == 1 or not comm.real:
            continue
        names, hashes = _hashes(name, unit)
        compared += len(names)
        table = torch.stack([hashes, -hashes]).view(-1)
        comm.all_reduce(table, Reduction.MIN, tag=3).wait()
        least, most = table.view(2, -1)
        if bool((least != -most).any()):
            _raise_for(names, exchange([comm], hashes.tolist(), hashes.device))
    return compared


def _hashes(name: str, unit: Unit) -> tuple[list[str], Tensor]:
    names: list[str] = []
    hashes: list[Tensor] = []
    with no_gradients():
        for storage in unit.storages:
            for index, entry in enumerate(storage.owned):
                span = storage.layout.span(index, storage.rank)
                names.append(f"{name}.{entry.fqn}" if name else entry.fqn)
                hashes.append(_hash(storage.shard[span.shard_offset : span.shard_offset + span.numel]))
    return names, torch.stack(hashes)


def _hash(values: Tensor) -> Tensor:
    """62 bits of all bits of ``values``: multiplied by odd numbers that depend on the place, and added up."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64)
    words = values.detach().contiguous().view(width).to(torch.int64)
    places = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    mixed = (words + 1) * (places * 0x5DEECE66D + 0xB504F333 | 1)
    return (mixed ^ (mixed >> 31)).sum() & (_NONE - 1)


def _raise_for(names: list[str], hashes: dict[int, list[int]]) -> None:
    ranks = list(hashes)
    for place, fqn in enumerate(names):
        odd = [str(rank) for rank in ranks if hashes[rank][place] != hashes[ranks[0]][place]]
        if odd:
            raise NumbersError(
                "replicas of a parameter differ", fqn=fqn, got=f"other bits on rank {', '.join(odd)} than on "
                f"rank {ranks[0]}", remedy="Look for edits, or an optimizer, that not all ranks ran alike.")


# ---------------------------------------------------------------------- the same bits every time
@contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Inside, steps of ``model`` give the same bits in every run on the same number of ranks.

    Gradients of ranks are added in rank order, whatever the transport (on NCCL and gloo by an
    exchange and a local sum, which moves as much for a reduce-scatter and more for an all-reduce), and
    torch uses deterministic kernels, or raises where an operation has none. On CUDA set
    ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the first use of the device; it is set here if it is not.
    """
    comms = {comm: comm.rank_order for _, unit in units_below(model) for comm in unit.groups.nontrivial}
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for comm in comms:
        comm.rank_order = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        for comm, order in comms.items():
            comm.rank_order = order
