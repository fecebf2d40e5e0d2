"""Whole matrices for optimizers that need them, each on one rank, in one batched exchange.

    rows     every rank has some rows of each matrix (a gradient, a momentum)
    there    one all-to-all: the rows of each matrix go to its *owner*, which has it whole then
    compute  every owner works on its own matrices only
    back     one all-to-all: every rank has its rows of each result

So Muon, Shampoo and their like send two collectives a step, whatever number of matrices there
are, and each matrix is worked on once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..comm.errands import Errand
from ..errors import ConfigurationError, ShardwiseError
from ..plan.layout import row_granule
from ..storage.flat_storage import FlatStorage
from ..storage.sharded_parameter import home_of

__all__ = ["OwnerExchange"]


def _work(shape: Sequence[int]) -> float:
    """Of an orthogonalisation: the larger dim times the smaller one squared."""
    rows, columns = (shape[0] if shape else 1), row_granule(shape)
    return float(max(rows, columns)) * min(rows, columns) ** 2


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A sharded parameter: its whole shape, the elements on each rank of its group, and who owns it."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    owner: int


class OwnerExchange:
    """Brings whole matrices to their owners, and rows of the results back.

    Args:
        parameters: any parameters of a model; those that are not sharded stay where they are, and every
            rank works on them. All ranks give the same ones in the same order.
        cost: what working on a tensor of this shape costs, in any unit; work is spread evenly over the
            ranks. Default: that of an orthogonalisation.

    Raises:
        ConfigurationError: for a flat parameter (use ``use_orig_params=True``), and for a parameter that
            tensor parallelism has split as well.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], cost: Callable[[tuple[int, ...]], float] = _work
    ) -> None:
        self.parameters: list[nn.Parameter] = list(parameters)
        self._groups: dict[Collectives, dict[nn.Parameter, _Matrix]] = {}
        sharded: dict[Collectives, list[tuple[nn.Parameter, FlatStorage, int]]] = {}
        for parameter in self.parameters:
            home = home_of(parameter)
            if home is not None:
                _check(*home)
                if home[0].world_size > 1:
                    sharded.setdefault(home[0].comm, []).append((parameter, *home))
        for comm, members in sharded.items():
            self._groups[comm] = _owned(comm, members, cost)

    def owner_of(self, parameter: nn.Parameter) -> int | None:
        """The rank, within its shard group, that owns ``parameter``; None: every rank has it whole."""
        return next((group[parameter].owner for group in self._groups.values() if parameter in group), None)

    @Errand("OwnerExchange.gather")
    def gather(self, rows: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Whole tensors of the parameters that this rank owns, and of those that are not sharded.

        ``rows``: of each parameter a tensor shaped like what the parameter shows now, all of one dtype;
        parameters may be left out, on all ranks alike. One all-to-all for each group of ranks.
        """
        whole = {p: value for p, value in rows.items() if self.owner_of(p) is None}
        for comm, group in self._groups.items():
            there = [(p, m) for p, m in group.items() if p in rows]
            by_owner = [[(p, m) for p, m in there if m.owner == rank] for rank in range(comm.size)]
            full = _flat([rows[p] for owned in by_owner for p, _ in owned], there)
            sent = [sum(m.parts[comm.rank] for _, m in owned) for owned in by_owner]
            mine = by_owner[comm.rank]
            received = [sum(m.parts[rank] for _, m in mine) for rank in range(comm.size)]
            if not there:
                continue
            out = torch.empty(sum(received), dtype=full.dtype, device=full.device)
            comm.all_to_all(out, full, received, sent).wait()
            slots = [slot.split([m.parts[rank] for _, m in mine]) for rank, slot in enumerate(out.split(received))]
            whole |= {p: torch.cat([slot[number] for slot in slots]).view(m.shape)
                      for number, (p, m) in enumerate(mine)}
        return {p: whole[p] for p in self.parameters if p in whole}

    @Errand("OwnerExchange.scatter")
    def scatter(self, whole: Mapping[nn.Parameter, Tensor], like: Mapping[nn.Parameter, Tensor]
                ) -> dict[nn.Parameter, Tensor]:
        """This rank's rows of what every owner has: the counterpart of ``gather``.

        ``whole``: of each parameter that ``gather`` gave here a tensor of its shape; ``like``: the rows
        that were gathered. The results have the shape, dtype and device of those.
        """
        rows = {p: whole[p] for p in like if self.owner_of(p) is None}
        for comm, group in self._groups.items():
            there = [(p, m) for p, m in group.items() if p in like]
            by_owner = [[(p, m) for p, m in there if m.owner == rank] for rank in range(comm.size)]
            if not there:
                continue
            mine = by_owner[comm.rank]
            pieces = [_checked(p, whole[p], m).reshape(-1).split(list(m.parts)) for p, m in mine]
            sent = [sum(m.parts[rank] for _, m in mine) for rank in range(comm.size)]
            received = [sum(m.parts[comm.rank] for _, m in owned) for owned in by_owner]
            first = like[there[0][0]]
            full = torch.cat([first.new_empty(0), *(piece[rank].to(first.dtype) for rank in range(comm.size)
                                                    for piece in pieces)])
            out = torch.empty(sum(received), dtype=first.dtype, device=first.device)
            comm.all_to_all(out, full, received, sent).wait()
            order = [(p, m) for owned in by_owner for p, m in owned]
            for (p, _), part in zip(order, out.split([m.parts[comm.rank] for _, m in order]), strict=True):
                rows[p] = part.view(like[p].shape)
        return {p: rows[p] for p in like}

    @torch.no_grad()
    def apply(self, rows: Mapping[nn.Parameter, Tensor], function: Callable[[nn.Parameter, Tensor], Tensor]
              ) -> dict[nn.Parameter, Tensor]:
        """``function(parameter, whole)`` on each whole tensor, once; this rank's rows of the results.

        It gives a tensor of the same shape. Two all-to-alls for each group of ranks.
        """
        whole = self.gather(rows)
        return self.scatter({p: function(p, value) for p, value in whole.items()}, rows)


def _check(storage: FlatStorage, index: int) -> None:
    if index < 0 or storage.hidden:
        raise ConfigurationError(
            "a flat parameter has no matrices to exchange", unit=storage.unit, rank=storage.rank,
            expected="original parameters", got="use_orig_params=False", remedy="Pass use_orig_params=True.",
        )
    if storage.owned[index].parallel is not None:
        raise ConfigurationError(
            "tensor parallelism has split the parameter too, so no rank of the group can have it whole",
            fqn=storage.layout.parameters[index].fqn, unit=storage.unit,
            remedy="Leave it out, and update it by its rows.",
        )


def _owned(
    comm: Collectives, members: Sequence[tuple[nn.Parameter, FlatStorage, int]],
    cost: Callable[[tuple[int, ...]], float],
) -> dict[nn.Parameter, _Matrix]:
    """The dearest first, each to the rank with the least work so far, or the one that has most of it already."""
    specs = {p: (storage.layout.parameters[index].shape,
                 tuple(storage.layout.span(index, rank).numel for rank in range(comm.size)))
             for p, storage, index in members}
    load = [0.0] * comm.size
    owners: dict[nn.Parameter, int] = {}
    for p in sorted(specs, key=lambda p: -cost(specs[p][0])):  # stable: alike on all ranks
        shape, parts = specs[p]
        owners[p] = min(range(comm.size), key=lambda rank, parts=parts: (load[rank], -parts[rank]))
        load[owners[p]] += cost(shape)
    return {p: _Matrix(*specs[p], owners[p]) for p, _, _ in members}


def _flat(rows: Sequence[Tensor], there: Sequence[tuple[nn.Parameter, _Matrix]]) -> Tensor:
    """All rows one behind the other."""
    dtypes = {value.dtype for value in rows}
    if len(dtypes) > 1:
        raise ShardwiseError("rows of one exchange have one dtype", expected="one dtype",
                             got=", ".join(sorted(map(str, dtypes))), remedy="Cast them, or exchange each dtype apart.")
    return torch.cat([value.detach().as_subclass(Tensor).reshape(-1) for value in rows]) if there else torch.empty(0)


def _checked(parameter: nn.Parameter, whole: Tensor, matrix: _Matrix) -> Tensor:
    if tuple(whole.shape) != matrix.shape:
        home = home_of(parameter)
        raise ShardwiseError(
            "the result for a whole matrix has another shape",
            expected=f"{matrix.shape}, {prod(matrix.shape)} elements", got=tuple(whole.shape),
            fqn=home[0].layout.parameters[home[1]].fqn if home is not None else None,
        )
    return whole
