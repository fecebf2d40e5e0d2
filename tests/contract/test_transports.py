"""What every transport promises, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import rendezvous
from shardwise.comm.choose import close_all
from shardwise.comm.collectives import Collectives, Reduction
from shardwise.comm.hierarchical import HierarchicalCollectives
from shardwise.comm.matched import MatchedCollectives
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.shared_memory import SharedMemoryCollectives
from shardwise.errors import CommunicationError, DivergenceError
from tests.bed import ranks


def _hierarchical(group: dist.ProcessGroup) -> Collectives:
    """Ranks that believe they are on two hosts, one of them alone where they are two."""
    members = dist.get_process_group_ranks(group)
    half = max(1, dist.get_world_size() // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_name", lambda: f"host {dist.get_rank() // half}")
        return HierarchicalCollectives(group, len({rank // half for rank in members}))


_MAKE: dict[str, Callable[[dist.ProcessGroup], Collectives]] = {
    "process group": ProcessGroupCollectives,
    "matched": MatchedCollectives,
    "shared memory": SharedMemoryCollectives,
    "hierarchical": _hierarchical,
}
_CPU = torch.device("cpu")
_MOVED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.int16, torch.complex64, torch.float8_e4m3fn]
_SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
_LARGE = 70_003  # more bytes than any transport treats as small, and no multiple of a world size

every_transport = pytest.mark.parametrize("transport", list(_MAKE))
wherever_it_lies = pytest.mark.parametrize("allocated", [False, True], ids=["private", "allocated"])


@contextmanager
def _made(transport: str) -> Iterator[Collectives]:
    assert dist.group.WORLD is not None
    collectives = _MAKE[transport](dist.group.WORLD)
    yield collectives
    collectives.close()
    close_all()  # those that other tests of this process have kept share the connections that are closed now


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What rank ``rank`` contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 60, (numel,), generator=generator).to(dtype)


def _placed(collectives: Collectives, values: Tensor, allocated: bool) -> Tensor:
    if not allocated:
        return values.clone()
    return collectives.allocate(values.numel(), values.dtype, _CPU).copy_(values)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@ranks(2, 4)
@every_transport
@wherever_it_lies
def test_gather(rank: int, world: int, transport: str, allocated: bool) -> None:
    """U55: what a transport allocated is read where it lies."""
    with _made(transport) as collectives:
        for dtype in _MOVED:
            for numel in (0, 1, 7, 4096, _LARGE):
                shard = _placed(collectives, _values(rank, numel, dtype), allocated)
                out = torch.empty(numel * world, dtype=dtype)
                collectives.all_gather(out, shard, tag=3).wait()
                assert _same(out, torch.cat([_values(peer, numel, dtype) for peer in range(world)])), dtype


@ranks(2, 4)
@every_transport
@wherever_it_lies
def test_gather_in_place(rank: int, world: int, transport: str, allocated: bool) -> None:
    with _made(transport) as collectives:
        for dtype in _MOVED:
            for numel in (0, 1, 7, _LARGE):
                out = _placed(collectives, torch.zeros(numel * world, dtype=dtype), allocated)
                own = out[rank * numel : (rank + 1) * numel].copy_(_values(rank, numel, dtype))
                collectives.all_gather(out, own).wait()
                assert _same(out, torch.cat([_values(peer, numel, dtype) for peer in range(world)])), dtype


@ranks(2, 4)
@every_transport
@wherever_it_lies
def test_reduce_scatter_sums_in_rank_order(rank: int, world: int, transport: str, allocated: bool) -> None:
    with _made(transport) as collectives:
        for dtype in _SUMMED:
            for numel in (0, 1, 7, 4096, _LARGE):
                full = _placed(collectives, _values(rank, numel * world, dtype), allocated)
                out = torch.empty(numel, dtype=dtype)
                collectives.reduce_scatter(out, full).wait()
                slots = [_values(peer, numel * world, dtype)[rank * numel : (rank + 1) * numel]
                         for peer in range(world)]
                assert _same(out, reduce(torch.add, slots)), dtype


@ranks(2, 4)
@every_transport
@wherever_it_lies
@pytest.mark.parametrize("reduction", list(Reduction))
def test_all_reduce(rank: int, world: int, transport: str, allocated: bool, reduction: Reduction) -> None:
    with _made(transport) as collectives:
        for dtype in _SUMMED:
            for numel in (0, 1, 2, 7, _LARGE):
                # small integers, so that the order of a sum does not matter
                parts = [_values(peer, numel, torch.uint8).to(dtype) for peer in range(world)]
                tensor = _placed(collectives, parts[rank], allocated)
                collectives.all_reduce(tensor, reduction).wait()
                combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction.value]
                assert _same(tensor, reduce(combine, parts)), dtype


@ranks(2, 4)
@every_transport
@wherever_it_lies
def test_broadcast(rank: int, world: int, transport: str, allocated: bool) -> None:
    with _made(transport) as collectives:
        for source in range(world):
            for dtype in _MOVED:
                tensor = _placed(collectives, _values(rank, 7, dtype), allocated)
                collectives.broadcast(tensor, source).wait()
                assert _same(tensor, _values(source, 7, dtype)), dtype


@ranks(2, 4)
@every_transport
@wherever_it_lies
def test_an_input_may_change_as_soon_as_the_result_is_there(
    rank: int, world: int, transport: str, allocated: bool
) -> None:
    with _made(transport) as collectives:
        shard = _placed(collectives, torch.zeros(999), allocated)
        full = _placed(collectives, torch.zeros(999 * world), allocated)
        out, total = torch.empty(999 * world), torch.empty(999)
        for step in range(40):
            shard.fill_(100 * step + rank)
            collectives.all_gather(out, shard).wait()
            shard.fill_(-1)
            full.copy_(out)
            collectives.reduce_scatter(total, full).wait()
            full.fill_(-1)
            assert out.view(world, 999)[:, -1].tolist() == [100 * step + peer for peer in range(world)]
            assert total.tolist() == [world * (100 * step + rank)] * 999


@ranks(4)
@pytest.mark.parametrize("transport", ["process group", "matched", "shared memory"])
def test_groups_over_parts_of_the_world(rank: int, world: int, transport: str) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = _MAKE[transport](rows[rank // 2]), _MAKE[transport](columns[rank % 2])
    assert row.members == ((0, 1) if rank < 2 else (2, 3))
    assert (column.rank, column.size) == (rank // 2, 2)
    out = torch.empty(2)
    for step in range(10):
        row.all_gather(out, torch.tensor([float(step + rank)])).wait()
        column.all_reduce(out).wait()
        assert out.tolist() == [2 * step + 2, 2 * step + 4]
    for collectives in (row, column):
        collectives.close()
    for group in (*rows, *columns):
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)


@ranks(2, 4)
@every_transport
def test_ranks_with_other_tags_hear_of_it_and_can_go_on(rank: int, world: int, transport: str) -> None:
    with _made(transport) as collectives:
        collectives.describe_tag = "layers.{}".format
        out = torch.zeros(3 * world)
        with pytest.raises(DivergenceError, match=r"ranks run different units.* shards") as caught:
            collectives.all_gather(out, torch.ones(3), tag=rank).wait()
        for peer in range(world):
            assert f"rank {peer} runs gather of 'layers.{peer}'" in str(caught.value)
        out[3 * rank : 3 * rank + 3] = 0  # this rank's own may be there
        assert not out.any()
        collectives.all_gather(out, torch.ones(3), tag=5).wait()
        assert out.all()


@ranks(2)
@every_transport
def test_ranks_in_other_collectives_hear_of_it(rank: int, world: int, transport: str) -> None:
    told = "rank 0 runs gather with tag 4, rank 1 runs all-reduce with tag 4"
    with _made(transport) as collectives, pytest.raises(DivergenceError, match=told):
        if rank == 0:
            collectives.all_gather(torch.empty(2), torch.ones(1), tag=4).wait()
        else:
            collectives.all_reduce(torch.ones(2), tag=4).wait()


@ranks(2)
@every_transport
def test_ranks_with_other_sizes_or_dtypes_hear_of_it(rank: int, world: int, transport: str) -> None:
    with _made(transport) as collectives:
        numel = 3 + rank
        with pytest.raises(DivergenceError, match=r"rank 0 has 3 float32 .*, rank 1 has 4 float32"):
            collectives.all_gather(torch.empty(2 * numel), torch.ones(numel)).wait()
        dtype = [torch.float32, torch.int32][rank]
        with pytest.raises(DivergenceError, match=r"rank 0 has 3 float32 .*, rank 1 has 3 int32"):
            collectives.reduce_scatter(torch.empty(3, dtype=dtype), torch.ones(6, dtype=dtype)).wait()
        with pytest.raises(DivergenceError, match=r"rank 0 has 1 float32 elements, rank 1 .*, variant 1"):
            collectives.broadcast(torch.ones(1), rank).wait()
        collectives.barrier()


@ranks(2)
@every_transport
def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent(
    rank: int, world: int, transport: str
) -> None:
    with _made(transport) as collectives:
        with pytest.raises(CommunicationError, match="expected 4 elements, got 5 elements"):
            collectives.all_gather(torch.empty(5), torch.empty(2))
        with pytest.raises(CommunicationError, match=r"one dtype: expected torch\.float32, got torch\.int64"):
            collectives.reduce_scatter(torch.empty(2, dtype=torch.int64), torch.empty(4))
        with pytest.raises(CommunicationError, match="contiguous"):
            collectives.all_gather(torch.empty(8)[::2], torch.empty(2))
        with pytest.raises(CommunicationError, match=r"all_reduce cannot combine .* got torch\.bool"):
            collectives.all_reduce(torch.ones(2, dtype=torch.bool))
        collectives.barrier()


@ranks(1)
@every_transport
def test_a_group_of_one(rank: int, world: int, transport: str) -> None:
    with _made(transport) as collectives:
        out, shard = torch.zeros(5), torch.arange(5.0)
        collectives.all_gather(out, shard).wait()
        assert torch.equal(out, shard)
        collectives.reduce_scatter(out, shard + 1).wait()
        assert torch.equal(out, shard + 1)
        collectives.all_reduce(out).wait()
        collectives.broadcast(out, 0).wait()
        collectives.barrier()
        assert torch.equal(out, shard + 1)
