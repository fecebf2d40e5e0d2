"""The end of a backward's reductions. Parameters that some ranks did not use: all ranks agree on who
has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.collectives import Reduction
from ..torch_private import no_gradients
from .bind import Arrivals
from .step import Step
from .unit import Unit

__all__ = ["agree_on_unused", "end_reductions"]


def end_reductions(step: Step) -> None:
    """Wait for all reductions of a backward, and bind them, on every rank alike."""
    with no_gradients():
        for unit in step.reducing:
            unit.finish_reduce()
        free = Arrivals.are_free([unit.arrivals for unit in step.reduced])
        for unit in step.reduced:
            unit.arrivals.bind(free=free)
    agree_on_unused(list(step.reduced))


def agree_on_unused(units: Sequence[Unit]) -> None:
    """A parameter that any rank used has a gradient on every rank, others have none."""
    by_groups: dict[Any, list[Unit]] = {}
    for unit in units:
        by_groups.setdefault(tuple(unit.groups.nontrivial), []).append(unit)
    for groups, members in by_groups.items():
        if not groups or not groups[0].real:
            continue
        flags = [unit.flags for unit in members]
        device = members[0].collector.live[0].compute_device
        table = torch.tensor([used for row in flags for used in row], dtype=torch.int32).to(device)
        for comm in groups:
            comm.all_reduce(table, Reduction.MAX, tag=3).wait()
        if all(all(row) for row in flags):
            continue
        anywhere, start = [bool(value) for value in table.tolist()], 0
        with no_gradients():
            for unit, row in zip(members, flags, strict=True):
                unit.bind_unused(anywhere[start : start + len(row)])
                start += len(row)
