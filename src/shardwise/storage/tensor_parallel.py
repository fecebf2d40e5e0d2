"""Parameters that tensor parallelism has split over another mesh: they are sharded by their local part.

    given    the user's parameter is a ``DTensor``; this rank has one part of it (split or copied)
    at rest  the same object shows this rank's rows of that part, as an ordinary tensor
    in use   the leaf is a ``DTensor`` again, of the same mesh and placements, over the gathered part

So optimizers see ordinary tensors, and ``parallelize_module`` keeps doing its work in forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..comm.collectives import Collectives, Handle, Reduction
from ..errors import ConfigurationError
from ..plan.ownership import OwnedParameter
from ..torch_private import mark_foreach_supported, no_torch_function
from .sharded_parameter import ShardedMethods

__all__ = ["ParallelPart", "TensorParallelParameter", "Together", "as_used", "local_part",
           "require_plain_memory", "take_local_part"]


@dataclass(frozen=True)
class ParallelPart:
    """What one rank has of a parameter that is split over the dims of ``mesh`` (those of tensor parallelism)."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  #: of the whole parameter

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the part begins in the whole, in each dim."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                ranks, here = self.mesh.size(dim), self.mesh.get_local_rank(dim)
                chunk = -(-sizes[placement.dim] // ranks)
                first = min(chunk * here, sizes[placement.dim])
                starts[placement.dim] += first
                sizes[placement.dim] = min(chunk, sizes[placement.dim] - first)
        return tuple(starts)

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The dims of the mesh over which ranks have different parts; over the others they have copies."""
        return tuple(dim for dim, placement in enumerate(self.placements) if not placement.is_replicate())

    def spread(self, local: Tensor) -> DTensor:
        """The ``DTensor`` of which this rank has ``local``; shares its memory. No traffic."""
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False,
                                  shape=torch.Size(self.shape), stride=strides)

    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor from every rank's part (a collective of the mesh)."""
        return self.spread(local).full_tensor()

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a ``whole`` tensor; a ``DTensor`` may be placed in any way (then a collective)."""
        if isinstance(whole, DTensor):
            return whole.redistribute(self.mesh, self.placements).to_local()
        part = whole
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                chunks = part.chunk(self.mesh.size(dim), placement.dim)
                here = self.mesh.get_local_rank(dim)
                part = chunks[here] if here < len(chunks) else part.narrow(placement.dim, 0, 0)
        return part

    def localise(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient of the ``DTensor``, placed as the parameter is."""
        if not isinstance(gradient, DTensor):
            return gradient
        if gradient.placements != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        return gradient.to_local()


class Together:
    """Several groups that reduce one after the other, as one group of all their ranks would."""

    def __init__(self, comms: Sequence[Collectives]) -> None:
        self._comms = list(comms)
        self.size = 1
        for comm in comms:
            self.size *= comm.size

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Handle:
        """Combine ``tensor`` of every rank of all groups in place."""
        *before, last = self._comms
        for comm in before:
            comm.all_reduce(tensor, reduction).wait()
        return last.all_reduce(tensor, reduction)


class TensorParallelParameter(ShardedMethods, Tensor):
    """The user's ``DTensor`` parameter while it is sharded: this rank's rows of this rank's part.

    Its slots are those of ``DTensor``, so that the very object can change its class.
    """

    __slots__ = ("_local_tensor", "_spec")
    __torch_function__ = no_torch_function


def take_local_part(entry: OwnedParameter, ranks: Iterable[int]) -> None:
    """Let a ``DTensor`` parameter be an ordinary one that shows its local part. Nothing for any other.

    ``ranks``: those that will share the local part among them. Raises ``ConfigurationError`` if some of
    them have other parts already, or the parameter is a sum that was not made yet.
    """
    parameter: Any = entry.parameter
    if not isinstance(parameter, DTensor):
        return
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    known = (Replicate, Shard)
    if any(type(placement) not in known for placement in placements) or parameter.to_local().is_meta:
        raise ConfigurationError(
            "this DTensor parameter cannot be sharded by its local part", fqn=entry.fqn,
            expected="a DTensor with memory, of placements Shard and Replicate",
            got=f"{placements} on {parameter.to_local().device}",
            remedy="Give the module memory first, and parallelise it with parallelize_module.",
        )
    shared = set(ranks).intersection(mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        raise ConfigurationError(
            "the parameter is split over ranks that would shard it once more", fqn=entry.fqn,
            expected="a mesh whose dim for sharding is another one than for tensor parallelism",
            got=f"ranks {sorted(shared)} in both",
            remedy="Pass mesh=mesh['dp'], without the dim of tensor parallelism.",
        )
    entry.parallel = ParallelPart(mesh, placements, tuple(parameter.shape))
    made = parameter.to_local().detach().as_subclass(TensorParallelParameter)
    made.requires_grad_(parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # pyright: ignore[reportAttributeAccessIssue]
    torch.utils.swap_tensors(parameter, made)


def require_plain_memory(entry: OwnedParameter, unit: str) -> None:
    """Raise ``ConfigurationError`` for a tensor made of other tensors, unless it is a ``DTensor``."""
    kind = type(entry.parameter)
    if getattr(kind, "__tensor_flatten__", None) is not None and not issubclass(kind, DTensor):
        raise ConfigurationError(
            "a parameter that is made of other tensors has no rows in one memory", fqn=entry.fqn, unit=unit,
            expected="an ordinary parameter, or a DTensor", got=kind.__name__,
            remedy="Shard the model before its parameters are converted, or leave this one whole on every rank "
                   "(ignored_states / ignored_params).",
        )


def as_used(entry: OwnedParameter, gathered: Tensor) -> Tensor:
    """What forward computes with: the gathered memory, or the ``DTensor`` that it is a part of."""
    return gathered if entry.parallel is None else cast("ParallelPart", entry.parallel).spread(gathered)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a ``DTensor`` that this rank has; any other tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


mark_foreach_supported(TensorParallelParameter)
