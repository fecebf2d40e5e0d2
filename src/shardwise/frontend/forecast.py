"""What sharding a model will cost, said before a machine is booked.

Nothing is sharded and no process group is needed: the units are planned as they would be on each of
``ranks`` ranks, by the same functions, and what the engine does with them in a step is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from ..engine.build import kinds_of
from ..engine.hooks import unit_of
from ..engine.precision import kept_modules
from ..errors import ConfigurationError, LifecycleError
from ..plan.execution import ExecutionGroups
from ..plan.layout import FlatLayout, ParameterSpec, plan_layout, row_granule
from ..plan.options import MixedPrecision, MixedPrecisionPolicy, Precision
from ..plan.ownership import Ownership, collect
from ..plan.policies import WrapPolicy, select_modules
from ..plan.reduction import plan_reduction
from ..storage.tensor_parallel import local_part

__all__ = ["Forecast", "UnitForecast", "forecast"]


@dataclass(frozen=True)
class UnitForecast:
    """One unit, on each rank. All sizes are in bytes, padding included."""

    name: str
    shard: int  #: parameters at rest, stored dtype
    gathered: int  #: parameters in use, compute dtype
    gradients: int  #: ``.grad`` of this rank's rows
    sent: int  #: the buffer of gradients that is reduced, dtype of the wire
    optimizer: int  #: state of the optimizer
    gathers: int  #: in one step
    reductions: int  #: in one step


@dataclass(frozen=True)
class Forecast:
    """One step of a model on ``ranks`` × ``replicas`` ranks; ``print`` it for a table.

    Sizes are in bytes on each rank; activations and what frameworks take for themselves come on top.
    Every unit is taken to run once in forward and to be reached by backward.
    """

    ranks: int  #: that share parameters
    replicas: int
    units: tuple[UnitForecast, ...]  #: the root last

    def _sum(self, name: str) -> int:
        return sum(getattr(unit, name) for unit in self.units)

    @property
    def at_rest(self) -> int:
        """Parameters and optimizer state."""
        return self._sum("shard") + self._sum("optimizer")

    @property
    def gathered_peak(self) -> int:
        """At most: the root where it stays gathered, and the two largest other units (one ahead of need)."""
        *inner, root = (unit.gathered for unit in self.units)
        if not any(unit.gathers for unit in self.units):
            return 0
        if all(unit.gathers < 2 for unit in self.units):  # all stay until backward
            return sum(inner) + root
        return root + sum(sorted(inner, reverse=True)[:2])

    @property
    def peak(self) -> int:
        """At most: at rest, gradients, what is gathered, and two buffers of gradients on their way."""
        sent = sorted((unit.sent for unit in self.units), reverse=True)
        return self.at_rest + self._sum("gradients") + self.gathered_peak + sum(sent[:2])

    @property
    def gathers(self) -> int:
        """All-gathers in one step."""
        return self._sum("gathers")

    @property
    def reductions(self) -> int:
        """Reduce-scatters in one step; all-reduces over replicas are as many where there are some."""
        return self._sum("reductions")

    @property
    def gather_traffic(self) -> float:
        """Bytes that one rank receives in the all-gathers of a step."""
        return sum(unit.gathers * unit.gathered for unit in self.units) * (self.ranks - 1) / self.ranks

    @property
    def reduce_traffic(self) -> float:
        """The same in the reduce-scatters."""
        return sum(unit.reductions * unit.sent for unit in self.units) * (self.ranks - 1) / self.ranks

    @property
    def replica_traffic(self) -> float:
        """The same in the all-reduces over replicas."""
        chunks = sum(unit.sent for unit in self.units) / self.ranks
        return 2 * chunks * (self.replicas - 1) / self.replicas

    def __str__(self) -> str:
        lines = [f"{unit.name}: {unit.shard:,} B at rest, {unit.gathered:,} B in use, {unit.gradients:,} B of "
                 f"gradients, {unit.gathers} gathers, {unit.reductions} reductions" for unit in self.units]
        return "\n".join([
            *lines,
            f"on each of {self.ranks} ranks" + (f" × {self.replicas} replicas" if self.replicas > 1 else "") + ":",
            f"  at rest    {self._sum('shard'):,} B of parameters, {self._sum('optimizer'):,} B of optimizer state",
            f"  in a step  {self._sum('gradients'):,} B of gradients, at most {self.gathered_peak:,} B gathered",
            f"  peak       {self.peak:,} B, without activations",
            f"  traffic    {self.gathers} gathers, {self.gather_traffic:,.0f} B; {self.reductions} reductions, "
            f"{self.reduce_traffic + self.replica_traffic:,.0f} B",
        ])


def forecast(
    model: nn.Module,
    ranks: int,
    *,
    units: WrapPolicy | ExecutionGroups | None = None,
    replicas: int = 1,
    mp_policy: MixedPrecisionPolicy | MixedPrecision | None = None,
    reshard_after_forward: bool | None = None,
    optimizer_tensors: int = 2,
) -> Forecast:
    """Bytes on each rank and collectives of a step, if ``model`` were sharded over ``ranks`` ranks.

    Args:
        model: not sharded; may be on the meta device.
        ranks: of the shard group; the same model on ``replicas`` such groups for hybrid sharding.
        units: a policy of ``shardwise.wrap``, or execution groups; default: the model as one unit.
        mp_policy, reshard_after_forward: as for ``fully_shard``.
        optimizer_tensors: tensors of state for each trained parameter, in its stored dtype (AdamW: 2).

    Raises:
        LifecycleError: the model is sharded already (``plan_of`` says how).
        ConfigurationError: a number of ranks below one.
    """
    if any(unit_of(module) is not None for module in model.modules()):
        raise LifecycleError("the model is sharded already", unit=type(model).__name__,
                             remedy="Call plan_of(model), or forecast before sharding.")
    if ranks < 1 or replicas < 1:
        raise ConfigurationError("a group has at least one rank", expected="1 or more", got=(ranks, replicas))
    precision = (Precision.of_wrapper(mp_policy) if isinstance(mp_policy, MixedPrecision)
                 else Precision.of_policy(mp_policy))
    groups = [*_chosen(model, units), [model]]
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, int] = {}
    planned: list[UnitForecast] = []
    for number, modules in enumerate(groups):
        others = {m for earlier in groups[:number] for m in earlier}
        several = len(modules) > 1
        ownership = collect([(str(i) if several else "", m) for i, m in enumerate(modules)],
                            stop=lambda m, others=others: m in others, ignored=set(), owner=owners.get)
        owners |= {entry.parameter: number for entry in ownership.owned}
        # gathered again for backward; the root is not freed in between, unless that is asked for
        again = reshard_after_forward if number == len(groups) - 1 else reshard_after_forward is not False
        name = "+".join(names[m] for m in modules) or "(root)"
        planned.append(_unit(name, ownership, precision, ranks, 2 if again else 1, optimizer_tensors))
    return Forecast(ranks, replicas, tuple(planned))


def _chosen(model: nn.Module, units: WrapPolicy | ExecutionGroups | None) -> Sequence[list[nn.Module]]:
    if units is None:
        return []
    if isinstance(units, ExecutionGroups):
        return units.modules_of(model)
    return [[module] for module in select_modules(model, units)]


def _unit(
    name: str, ownership: Ownership, precision: Precision, ranks: int, gathers: int, optimizer_tensors: int
) -> UnitForecast:
    kept = kept_modules((module for _, module in ownership.modules), precision)
    shard = gathered = optimizer = 0
    moves = False
    live: list[tuple[FlatLayout, torch.dtype, Precision]] = []
    for entries, is_kept in kinds_of(ownership.owned, kept):
        dtype, how = entries[0].parameter.dtype, precision.for_kept() if is_kept else precision
        compute = how.compute_dtype(dtype)
        shapes = [tuple(local_part(entry.parameter).shape) for entry in entries]
        specs = [ParameterSpec(e.fqn, shape, row_granule(shape)) for e, shape in zip(entries, shapes, strict=True)]
        layout = plan_layout(specs, ranks, compute.itemsize)
        shard += layout.shard_numel * dtype.itemsize
        aliased = ranks == 1 and compute is dtype
        gathered += 0 if aliased else layout.flat_numel * compute.itemsize
        moves |= ranks > 1
        if entries[0].parameter.requires_grad:
            optimizer += layout.shard_numel * dtype.itemsize * optimizer_tensors
            live.append((layout, dtype, how))
    gradients, sent = _gradients(live)
    return UnitForecast(name, shard, gathered, gradients, sent, optimizer,
                        gathers if moves else 0, int(bool(live) and ranks > 1))


def _gradients(live: Sequence[tuple[FlatLayout, torch.dtype, Precision]]) -> tuple[int, int]:
    """Bytes of ``.grad`` on a rank, and of the buffer that is reduced."""
    if not live:
        return 0, 0
    wire = reduce(torch.promote_types, [how.wire_dtype(stored) for _, stored, how in live])
    layouts = [layout for layout, _, _ in live]
    plan = plan_reduction(layouts, [[True] * len(one.parameters) for one in layouts], 0, wire.itemsize)
    finals = {how.final_dtype(stored, wire) for _, stored, how in live}
    return sum(plan.chunk_numel * final.itemsize for final in finals), plan.numel * wire.itemsize
