"""Planning a unit's reduction anew, while gradients of the plan before may wait: unsent, or for the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..torch_private import no_gradients
from .targets import Target

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["forget", "forget_replaced", "holds_gradients", "replan", "waits_for_replicas"]


def holds_gradients(unit: Unit) -> bool:
    """Are there gradients that were not sent, or not to the replicas?"""
    return unit.collector.holding or unit.reducer.partial is not None


def waits_for_replicas(unit: Unit) -> bool:
    """Are there sums that are to meet those of the replicas now, whether this pass adds to them or not?"""
    return unit.reducer.partial is not None and unit.settings.all_reduce


def replan(unit: Unit) -> bool:
    """Plan for the leaves and the trained parameters of now. False: something waits; plan again once it has gone."""
    collector, partial = unit.collector, unit.reducer.partial
    with no_gradients():
        unit.arrivals.bind()  # by the plan before
    if not holds_gradients(unit):
        collector.rebuild()
        return True
    before = collector.targets
    collector.take_in_leaves()
    if partial is not None and collector.targets is not before:
        unit.reducer.partial = _moved(partial, before, unit)
    return False


def _moved(partial: tuple[Tensor, list[bool]], before: Sequence[Target], unit: Unit) -> tuple[Tensor, list[bool]]:
    """What waits for the replicas, where the unit's new plan has it; nothing where it has more."""
    (chunk, used), plan, targets = partial, unit.collector.plan, unit.collector.targets
    assert plan is not None
    places = {(id(target.storage), target.index): target for target in before}
    total, flags = chunk.new_zeros(plan.chunk_numel), [False] * len(targets)
    with no_gradients():
        for target in targets:
            earlier = places.get((id(target.storage), target.index))
            if earlier is not None:
                total[target.kept] = chunk[earlier.kept]
                flags[target.number] = used[earlier.number]
    return total, flags


def forget(unit: Unit, targets: Sequence[Target]) -> None:
    """Lose what waits of ``targets``."""
    unit.collector.forget(targets)
    if unit.reducer.partial is not None:
        chunk, used = unit.reducer.partial
        for target in targets:
            chunk[target.kept] = 0
            used[target.number] = False


def forget_replaced(unit: Unit, before: Sequence[Sequence[nn.Parameter]]) -> None:
    """A parameter that took the place of one of ``before`` has nothing of what waits for that one."""
    if holds_gradients(unit):
        known = {id(storage): parameters for storage, parameters in zip(unit.storages, before, strict=True)}
        forget(unit, [target for target in unit.collector.targets
                      if known[id(target.storage)][target.index] is not target.storage.parameters[target.index]])
