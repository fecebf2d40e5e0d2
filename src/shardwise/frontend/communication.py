"""What a sharded module can do about its communication, under the names that torch's ``FSDPModule`` has.

Where the engine has no such choice, a method says why: it accepts what is so anyway, and raises
``ConfigurationError`` for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..comm.collectives import Collectives
from ..comm.separate import separate_from
from ..engine.build import session_of, start_session, units_below
from ..engine.hooks import unit_of
from ..engine.replan import holds_gradients
from ..engine.session import Session
from ..engine.unit import Unit
from ..errors import ConfigurationError, LifecycleError, OptionTypeError
from ..plan.lifecycle import Pass

__all__ = ["CommunicationMethods", "share_comm_ctx"]


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _session(module: Any) -> Session:
    unit = _unit(module)
    return session_of(unit) or start_session(unit)


def _below(module: Any, recurse: bool) -> Iterator[Unit]:
    if recurse:
        yield from (unit for _, unit in units_below(module))
    else:
        yield _unit(module)


class CommunicationMethods:
    """Part of ``FSDPModule``."""

    def set_custom_all_gather(self, comm: Collectives) -> None:
        """Gather this unit's parameters with ``comm``, a ``shardwise.comm`` transport over the same ranks."""
        unit = _unit(self)
        _check_transport(comm, unit)
        unit.gather.comm = comm

    def set_custom_reduce_scatter(self, comm: Collectives) -> None:
        """Reduce this unit's gradients with ``comm``, a ``shardwise.comm`` transport over the same ranks."""
        unit = _unit(self)
        _check_transport(comm, unit)
        unit.reducer.groups = replace(unit.reducer.groups, shard=comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatter a process group of its own, beside that of the gathers. A collective."""
        for unit in _below(self, recurse):
            shard = unit.groups.shard
            if enable and unit.storages:
                shard = separate_from(shard, unit.storages[0].compute_device)
            unit.reducer.groups = replace(unit.reducer.groups, shard=shard)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not need this unit's parameters (an embedding's), so they are not gathered.

        An operation that needs them all the same would read memory that is not there.
        """
        _unit(self).settings.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: Any) -> None:
        """Let gathers wait for ``event`` too. They wait for all that precedes a forward anyway."""
        _session(self).lanes.gather.wait(event)

    def reset_iter_state(self) -> None:
        """Throw away an iteration that an exception left unfinished, with its unsent gradients.

        Needed only to free its memory early: the next forward does the same. On the root.
        """
        unit, session = _unit(self), _session(self)
        if session.root is not unit:
            raise LifecycleError("reset_iter_state must be called on the root", unit=unit.name,
                                 remedy="Call it on the outermost sharded module.")
        if session.pass_ is not Pass.REST or any(map(holds_gradients, session.units)):
            session.recover()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Transports are only ever asked for sums, and division is apart: nothing changes."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Parameters that a rank did not use are always sent, as zeros: nothing changes."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """One reduction is on its way at a time: only 1 is accepted."""
        if max_input_buffers != 1:
            raise ConfigurationError(
                "set_reduce_scatter_max_input_buffers: one reduction is on its way at a time",
                unit=_unit(self).name, expected=1, got=max_input_buffers,
                remedy="Leave it out.",
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Buffers come from the transport's ``allocate``; there is no other allocator to turn on."""
        if enable:
            raise ConfigurationError(
                "set_allocate_memory_from_process_group_for_comm: a transport hands out its own memory",
                unit=_unit(self).name, expected=False, got=True,
                remedy="Give a transport with an allocate() of its own to set_custom_all_gather.",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not offered: raises ``ConfigurationError``."""
        raise ConfigurationError(
            "set_symm_mem_for_comm: gathers into symmetric memory are not offered", unit=_unit(self).name,
            got=backend, remedy="Give a transport that does so to set_custom_all_gather.",
        )


def _check_transport(comm: Any, unit: Unit) -> None:
    if not isinstance(comm, Collectives):
        raise OptionTypeError("a custom transport has the wrong type", unit=unit.name,
                              expected="a shardwise.comm.collectives.Collectives", got=type(comm).__name__,
                              remedy="Derive it from Collectives.")
    shard = unit.groups.shard
    if (comm.rank, comm.size) != (shard.rank, shard.size):
        raise ConfigurationError(
            "a custom transport is over other ranks than the unit", unit=unit.name,
            expected=f"rank {shard.rank} of {shard.size}", got=f"rank {comm.rank} of {comm.size}",
            remedy="Make it over the unit's shard group.",
        )


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Let several roots (stages of a pipeline) share streams and buffers: on one device they always do.

    Raises ``LifecycleError`` for a module that is not sharded, ``ConfigurationError`` for units on
    several devices.
    """
    lanes: set[Any] = set()
    for module in modules:
        unit = unit_of(module)
        if unit is None:
            raise LifecycleError("share_comm_ctx takes sharded modules", unit=type(module).__name__,
                                 remedy="Apply fully_shard to it first.")
        lanes.add(id(unit.lanes))
    if len(lanes) > 1:
        raise ConfigurationError("share_comm_ctx: the modules compute on several devices",
                                 expected="one device", got=len(lanes),
                                 remedy="Share among the stages of one device.")
