"""Which transport a group gets."""

from __future__ import annotations

import gc
import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import rendezvous
from shardwise.comm.choose import close_all, collectives_for
from shardwise.comm.hierarchical import HierarchicalCollectives
from shardwise.comm.matched import MatchedCollectives
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.shared_memory import SharedMemoryCollectives
from shardwise.errors import ConfigurationError
from tests.bed import ranks

_CPU = torch.device("cpu")


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@ranks(2)
def test_ranks_of_one_host_share_memory(rank: int, world: int) -> None:
    made = collectives_for(_world(), _CPU)
    assert isinstance(made, SharedMemoryCollectives)
    assert collectives_for(_world(), _CPU) is made
    close_all()


@ranks(2)
def test_the_caller_may_refuse_it(rank: int, world: int) -> None:
    made = collectives_for(_world(), _CPU, shared_memory=False)
    assert isinstance(made, MatchedCollectives)
    assert collectives_for(_world(), _CPU, shared_memory=False) is made
    assert isinstance(collectives_for(_world(), _CPU, shared_memory=True), SharedMemoryCollectives)
    close_all()


@ranks(1)
def test_one_rank_needs_no_transport(rank: int, world: int) -> None:
    assert isinstance(collectives_for(_world(), _CPU), MatchedCollectives)
    with pytest.raises(ConfigurationError, match=r"cannot carry this group \(it has one rank\)"):
        collectives_for(_world(), _CPU, shared_memory=True)
    close_all()


@ranks(2)
def test_another_device_goes_through_the_process_group(rank: int, world: int) -> None:
    assert isinstance(collectives_for(_world(), torch.device("meta")), ProcessGroupCollectives)
    close_all()


@ranks(2)
def test_what_one_group_allocates_another_reads_in_place(rank: int, world: int) -> None:
    other_group = dist.new_group([0, 1])
    one, other = collectives_for(_world(), _CPU), collectives_for(other_group, _CPU)
    assert one is not other
    assert isinstance(one, SharedMemoryCollectives)
    assert isinstance(other, SharedMemoryCollectives)
    assert one.arena is other.arena
    out = torch.empty(2)
    other.all_gather(out, one.allocate(1, torch.float32, _CPU).fill_(rank)).wait()
    assert out.tolist() == [0, 1]
    close_all()
    dist.destroy_process_group(other_group)


@ranks(2)
def test_a_transport_goes_with_its_group(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    made = weakref.ref(collectives_for(group, _CPU))
    assert made() is not None
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert made() is None
    close_all()


@ranks(2)
def test_a_system_that_has_none_falls_back_with_one_warning(rank: int, world: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            patch.setattr(os, "memfd_create", refuse)
        made = collectives_for(_world(), _CPU)
        assert collectives_for(_world(), _CPU) is made
        with pytest.raises(ConfigurationError, match=r"No space left .* shared_memory=None"):
            collectives_for(_world(), _CPU, shared_memory=True)
    assert isinstance(made, MatchedCollectives)
    assert len(caught) == (1 if rank == 0 else 0)
    if caught:
        text = str(caught[0].message)
        assert "could not be set up (rank 1: [Errno 28] No space left on device)" in text
        assert "The process group carries the data instead" in text
    close_all()


@ranks(2)
def test_a_failure_in_the_middle_is_everybodys(rank: int, world: int) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    descriptors = len(os.listdir("/proc/self/fd"))
    told = r"rank 0: .*Operation not permitted"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError, match=told):
        if rank == 0:
            patch.setattr(os, "pidfd_open", refuse)
        collectives_for(_world(), _CPU, shared_memory=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@ranks(2)
def test_ranks_of_several_hosts_use_the_process_group_without_a_warning(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(rendezvous, "host_name", lambda: f"host {rank}")
        assert isinstance(collectives_for(_world(), _CPU), MatchedCollectives)
        with pytest.raises(ConfigurationError, match="ranks 0 and 1 are on different hosts"):
            collectives_for(_world(), _CPU, shared_memory=True)
    close_all()


@ranks(4)
@pytest.mark.parametrize(("hosts", "hierarchical"), [("aabb", True), ("abab", False), ("aaab", False)])
def test_ranks_of_several_hosts_share_memory_inside_them(
    rank: int, world: int, hosts: str, hierarchical: bool
) -> None:
    close_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_name", lambda: hosts[rank])
        made = collectives_for(_world(), _CPU)
        assert isinstance(made, HierarchicalCollectives if hierarchical else MatchedCollectives)
        assert collectives_for(_world(), _CPU) is made
    out = torch.empty(4)
    made.all_gather(out, torch.tensor([float(rank)])).wait()
    assert out.tolist() == [0, 1, 2, 3]
    close_all()


@ranks(4)
def test_ranks_in_different_numbers_of_groups_meet(rank: int, world: int) -> None:
    """Some ranks have made a group that others are not in; and a group over some of the ranks has no hosts."""
    some = dist.new_group([0, 1, 2])
    if rank < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_name", lambda: "aabb"[rank])
        assert isinstance(collectives_for(_world(), _CPU), HierarchicalCollectives)
        if rank < 3:
            assert isinstance(collectives_for(some, _CPU), MatchedCollectives)
    close_all()


@ranks(4)
def test_one_host_without_shared_memory_is_enough_to_do_without(rank: int, world: int) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_name", lambda: "aabb"[rank])
        if rank == 3:
            patch.setattr(os, "pidfd_open", refuse)
        assert isinstance(collectives_for(_world(), _CPU), MatchedCollectives)
    close_all()


@ranks(2)
def test_a_destroyed_group_is_said_so(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    made = collectives_for(group, _CPU, shared_memory=False)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(Exception, match="process group was destroyed before gather with tag 1"):
        made.all_gather(torch.empty(2), torch.empty(1), tag=1)
