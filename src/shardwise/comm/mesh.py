"""From process groups and device meshes to the transports of a unit.

A mesh has one dim (the shard group) or two (replicate outside, shard inside: hybrid).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigurationError, OptionTypeError
from .choose import collectives_for
from .collectives import Collectives
from .simulated import SimulatedCollectives

__all__ = ["GroupPair", "default_group", "groups_of_mesh", "require_process_group", "transports"]

GroupPair = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""(shard group, replicate group); None stands for this rank alone."""


def require_process_group() -> None:
    """Raise ``ConfigurationError`` unless torch.distributed is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "no process group: sharding needs to know the ranks",
            expected="an initialised default process group", got="none",
            remedy="Call torch.distributed.init_process_group() first and start the script with torchrun.",
        )


def default_group() -> dist.ProcessGroup:
    """The group of all ranks. Raises ``ConfigurationError`` if there is none."""
    require_process_group()
    group = dist.group.WORLD
    assert group is not None
    return group


def groups_of_mesh(mesh: DeviceMesh, *, hybrid: bool) -> GroupPair:
    """The groups of a mesh of one dim, or of two (replicate, shard) if ``hybrid``."""
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionTypeError("mesh has the wrong type", expected="a DeviceMesh", got=type(mesh).__name__)
    dims = mesh.ndim
    if dims == 1:
        return mesh.get_group(), None
    if dims == 2 and hybrid:
        if mesh.mesh_dim_names is None:
            raise ConfigurationError(
                "a mesh of two dims needs names, to tell replicate from shard", expected="mesh_dim_names",
                got=None, remedy="Use init_device_mesh(..., mesh_dim_names=('replicate', 'shard')).",
            )
        return mesh.get_group(1), mesh.get_group(0)
    raise ConfigurationError(
        "the mesh has a number of dims that cannot be sharded over", expected="1, or 2 for hybrid sharding",
        got=dims, remedy="Slice the mesh: mesh['shard'] or mesh['replicate', 'shard'].",
    )


def transports(
    pair: GroupPair, device: torch.device, *, shared_memory: bool | None = None
) -> tuple[Collectives, Collectives | None]:
    """The transports of the shard group and of the replicate group (None: no replicas)."""
    shard, replicate = pair
    sharding = (
        collectives_for(shard, device, shared_memory=shared_memory) if shard is not None
        else cast("Collectives", SimulatedCollectives(0, 1))
    )
    copies = (
        collectives_for(replicate, device, shared_memory=shared_memory) if replicate is not None else None
    )
    return sharding, copies
