"""One process as rank r of N."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.simulated import SimulatedCollectives
from shardwise.errors import CommunicationError, ConfigurationError


def test_it_says_who_it_is_and_that_nothing_arrives() -> None:
    group = SimulatedCollectives(3, 8)
    assert (group.rank, group.size, group.members, group.real) == (3, 8, tuple(range(8)), False)


def test_a_group_of_one_is_real() -> None:
    assert SimulatedCollectives(0, 1).real


def test_a_gather_fills_the_own_slot_only() -> None:
    out = torch.zeros(6)
    SimulatedCollectives(1, 3).all_gather(out, torch.tensor([1.0, 2.0])).wait()
    assert out.tolist() == [0, 0, 1, 2, 0, 0]


def test_a_gather_in_place_changes_nothing() -> None:
    out = torch.arange(6.0)
    SimulatedCollectives(1, 3).all_gather(out, out[2:4]).wait()
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_reduction_gives_the_own_contribution() -> None:
    out = torch.empty(2)
    SimulatedCollectives(2, 3).reduce_scatter(out, torch.arange(6.0)).wait()
    assert out.tolist() == [4, 5]


def test_reductions_and_broadcasts_in_place_keep_what_is_there() -> None:
    group, tensor = SimulatedCollectives(2, 3), torch.arange(4.0)
    group.all_reduce(tensor).wait()
    group.broadcast(tensor, 0).wait()
    group.barrier()
    assert tensor.tolist() == [0, 1, 2, 3]


def test_empty_buffers_are_no_special_case() -> None:
    group, empty = SimulatedCollectives(2, 3), torch.empty(0)
    group.all_gather(torch.empty(0), empty).wait()
    group.reduce_scatter(torch.empty(0), empty).wait()


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CommunicationError, match="3 equal shards: expected 6 elements, got 5 elements"):
        SimulatedCollectives(0, 3).all_gather(torch.empty(5), torch.empty(2))


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"got rank {rank} of {size}"):
        SimulatedCollectives(rank, size)
