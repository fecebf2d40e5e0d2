"""U99: a run goes on at another number of ranks without a file, from the memory of its ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import FullyShardedDataParallel, ShardingStrategy, checkpoint, fully_shard
from shardwise.checkpoint import streams
from shardwise.comm.peers import Peers
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, assert_alike, first_ranks, odd, over, train
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import OddTransformer, TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors
from tests.contract.test_files_other_ranks import WAYS, after_a_step, common, shapes
from tests.contract.test_state_dict_dcp import Shapes

COUNTS = [(4, 2), (2, 4), (4, 3), (1, 3), (3, 3)]


@ranks(4, timeout=240)
def test_u99_shapes_counts_fronts_strategies() -> None:
    """U99: model and optimizer are bit for bit what files give to the same ranks."""
    any_case()


@settings(max_examples=5, phases=[Phase.generate], derandomize=True, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))
@given(shapes=shapes, counts=st.sampled_from(COUNTS), saved=st.sampled_from(WAYS), loaded=st.sampled_from(WAYS))
def any_case(shapes: list[tuple[int, ...]], counts: tuple[int, int], saved: tuple[str, str],
             loaded: tuple[str, str]) -> None:
    """Every rank draws the same examples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = common(Path(tempfile.mkdtemp()) if rank == 0 else None)
    before, after = (first_ranks(count, world) for count in counts)
    held = None
    if rank < counts[0]:
        model, optimizer = after_a_step(shapes, saved, before)
        checkpoint.save(folder / "files", model, optimizer, process_group=before)
        held = checkpoint.save_to_memory(model, optimizer, holders=range(min(counts)), process_group=before)
    dist.barrier()
    if rank < counts[1]:
        runs = []
        for _ in range(2):
            model = shard(Shapes(shapes, 9.0), loaded[0], strategy=loaded[1], **over(loaded[0], after))
            runs.append((model, torch.optim.Adagrad(model.parameters(), lr=7.0)))
        checkpoint.load(folder / "files", *runs[0], process_group=after)
        checkpoint.load_from_memory(held, *runs[1], process_group=after)
        assert_alike(*runs)
    dist.barrier()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, nesterov=True)


@ranks(4)
@pytest.mark.parametrize(("fronts", "counts", "make"), [
    (("orig", "fully_shard"), (4, 2), adamw), (("fully_shard", "flat"), (2, 4), momentum),
    (("flat", "orig"), (4, 3), momentum), (("fully_shard", "fully_shard"), (1, 4), adamw)])
def test_u99_a_run_goes_on_at_other_ranks(fronts: tuple[str, str], counts: tuple[int, int], make: Any, rank: int,
                                          tmp_path: Path) -> None:
    """U99: tied and frozen parts, all dtypes, buffers, two groups: the losses are those of a run through files."""
    path, held = common(tmp_path), None
    before, after = (first_ranks(count, 4) for count in counts)
    if rank < counts[0]:
        model = odd(fronts[0], **over(fronts[0], before))
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        train(model, optimizer, rank, range(3))
        for _ in range(3):
            scheduler.step()
        extra = {"scheduler": scheduler.state_dict(), "mine": rank, "noise": torch.arange(5) + rank}
        checkpoint.save(path / "files", model, optimizer, extra, process_group=before)
        held = checkpoint.save_to_memory(model, optimizer, extra, holders=range(min(counts)), process_group=before)
        train(model, optimizer, rank, range(3, 4))  # what is held does not change with the model
        assert (held.nbytes == 0) == (rank >= min(counts))
    dist.barrier()
    if rank < counts[1]:
        found = []
        for source in (path / "files", held):
            model = odd(fronts[1], blank=True, **over(fronts[1], after))
            optimizer = make(model)
            load: Any = checkpoint.load if isinstance(source, Path) else checkpoint.load_from_memory
            extra = load(source, model, optimizer, process_group=after)
            mine = rank if rank < counts[0] else 0
            assert extra["mine"] == mine and extra["noise"].tolist() == [mine + i for i in range(5)]
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            scheduler.load_state_dict(extra["scheduler"])
            found.append((model, optimizer, train(model, optimizer, rank, range(3, 6)), scheduler.get_last_lr()))
        assert_alike(found[0][:2], found[1][:2])
        assert found[0][2:] == found[1][2:]
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_u99_into_a_model_on_the_meta_device(front: str, rank: int) -> None:
    """U99, U55: the whole model is never anywhere; and a checkpoint loads as often as it is wanted."""
    model = shard(TinyMLP(), front)
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, points(rank, 0)).backward()
    optimizer.step()
    held = checkpoint.save_to_memory(model, optimizer)
    with torch.device("meta"):
        fresh = TinyMLP()
    fully_shard(fresh)
    for _ in range(2):
        again = torch.optim.Adam(fresh.parameters())
        checkpoint.load_from_memory(held, fresh, again)
        assert torch.equal(fresh.inward.weight.full_tensor(), whole_of(model, "inward.weight"))


def whole_of(model: nn.Module, name: str) -> Tensor:
    with FullyShardedDataParallel.summon_full_params(model):
        return model.get_parameter(name).detach().clone()


@ranks(4)
def test_u99_memory_is_even_and_rounds_are_small(rank: int) -> None:
    """U99: a holder has its share of the bytes, and no message is longer than the buffer, whatever the sizes."""
    longest: list[int] = []
    send = Peers.all_to_all

    def watched(peers: Peers, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        if full.dtype is torch.uint8:
            longest.append(max(out.nbytes, full.nbytes))
        send(peers, out, full, received, sent)

    model = nn.Sequential(nn.Linear(120, 90), nn.Linear(90, 70))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 120)).sum().backward()
    optimizer.step()
    total = 3 * 4 * sum(p.global_shape.numel() for p in model.parameters())
    exchange = streams.exchange_ranges.__kwdefaults__
    with patch.object(Peers, "all_to_all", watched), patch.dict(exchange, {"limit": 4000}):
        held = checkpoint.save_to_memory(model, optimizer, holders=[1, 3])
        again = nn.Sequential(nn.Linear(120, 90), nn.Linear(90, 70))
        for layer in (*again, again):
            fully_shard(layer)
        new = torch.optim.Adam(again.parameters())
        checkpoint.load_from_memory(held, again, new)
    assert len(longest) > 20 and max(longest) <= 4000
    assert abs(held.nbytes - (total / 2 if rank in (1, 3) else 0)) <= 12 * 4
    assert_alike((model, optimizer), (again, new))


@ranks(4)
def test_u99_copies_survive_the_loss_of_a_holder(rank: int) -> None:
    """U99: with ``copies=2`` any one of the holders may be gone, and nothing of the model is needed."""
    model = shard(TinyMLP(), "fully_shard")
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, points(rank, 0)).backward()
    optimizer.step()
    values = [p.full_tensor().detach() for p in model.parameters()]
    moments = [torch.cat(_gathered(optimizer.state[p]["exp_avg"])) for p in model.parameters()]
    held = checkpoint.save_to_memory(model, optimizer, {"step": 7}, copies=2)
    for lost in (0, 2):
        group = dist.new_group([other for other in range(4) if other != lost])
        if rank != lost:
            again = shard(TinyMLP(seed=5), "fully_shard", **over("fully_shard", group))
            new = torch.optim.Adam(again.parameters())
            assert checkpoint.load_from_memory(held, again, new, process_group=group) == {"step": 7}
            for p, value, moment in zip(again.parameters(), values, moments, strict=True):
                assert torch.equal(p.full_tensor(), value)
                assert torch.equal(torch.cat(_gathered(new.state[p]["exp_avg"], group)), moment)
    assert "parts" in repr(held)


def _gathered(rows: Tensor, group: Any = None) -> list[Tensor]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, rows, group=group)
    return found


@ranks(4)
@pytest.mark.parametrize("front", ["fully_shard", "flat"])
@pytest.mark.parametrize("survivors", [(0, 1), (1, 2), (0, 2, 3), (0, 2)], ids=str)
def test_u99_a_whole_replica_goes_on_alone(front: str, survivors: tuple[int, ...], rank: int, tmp_path: Path) -> None:
    """U99: of ranks 0, 1 and 2, 3, which are replicas, those that hold every row between them are enough."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    strategy = {} if front == "fully_shard" else {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    argument = {"mesh": mesh} if front == "fully_shard" else {"device_mesh": mesh}
    model = shard(TinyMLP(), front, **argument, **strategy)
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, points(rank, 0)).backward()
    optimizer.step()
    whole, path = whole_of(model, "middle.weight"), common(tmp_path)
    group = dist.new_group(list(survivors))
    if rank in survivors:
        if survivors == (0, 2):
            with pytest.raises(CheckpointError, match=r"no rank has some rows of \d+ tensors") as caught:
                checkpoint.save_to_memory(model, optimizer, process_group=group)
            assert "those of a whole replica" in str(caught.value)
            return
        checkpoint.save(path / "files", model, optimizer, process_group=group)
        held = checkpoint.save_to_memory(model, optimizer, process_group=group)
        runs = []
        for load, source in ((checkpoint.load_from_memory, held), (checkpoint.load, path / "files")):
            again = shard(TinyMLP(seed=3), "fully_shard", **over("fully_shard", group))
            runs.append((again, torch.optim.Adam(again.parameters())))
            load(source, *runs[-1], process_group=group)
            assert torch.equal(again.middle.weight.full_tensor(), whole)
        assert_alike(*runs)


@ranks(4)
def test_u99_survivors_that_stepped_differently_are_told(rank: int, tmp_path: Path) -> None:
    """U99: rank 0 got through the step in which rank 3 was lost, ranks 1 and 2 did not. In files it is the same."""
    path, group = common(tmp_path), dist.new_group([0, 1, 2])
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model = shard(TinyMLP(), "fully_shard", mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(2):
        loss(model, points(rank, number)).backward()
        if (rank, number) in ((0, 1), (rank, 0)):
            optimizer.step()
    if rank < 3:
        words = ("different numbers of optimizer steps", "expected 2.0 as on rank 0, got 1.0 on rank",
                 "Go on from the last checkpoint")
        refused(lambda: checkpoint.save_to_memory(model, optimizer, process_group=group), *words)
        refused(lambda: checkpoint.save(path / "torn", model, optimizer, process_group=group), *words)


@ranks(4)
def test_u99_two_models_are_not_taken_for_replicas(rank: int) -> None:
    """U99: ranks 0, 1 and 2, 3 hold different values under the same names; each pair by itself is fine."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    model = shard(TinyMLP(seed=rank // 2), "fully_shard", **over("fully_shard", mine))
    refused(lambda: checkpoint.save_to_memory(model), "several ranks have some rows", "'inward.weight'")
    held = checkpoint.save_to_memory(model, process_group=mine, holders=[2 * (rank // 2)])
    again = shard(TinyMLP(seed=7), "fully_shard", **over("fully_shard", mine))
    checkpoint.load_from_memory(held, again, process_group=mine)
    assert torch.equal(again.outward.weight.full_tensor(), model.outward.weight.full_tensor())


# ---------------------------------------------------------------------- wrong uses
def refused(call: Any, *words: str) -> None:
    """``call()`` raises a ``CheckpointError`` that has all of ``words``, on this rank."""
    with pytest.raises(CheckpointError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


@ranks(2)
def test_u99_wrong_uses_are_named_on_every_rank(rank: int) -> None:
    """U99: the same text on both ranks, and the model is as it was."""
    model = shard(TinyMLP(), "fully_shard")
    optimizer = torch.optim.Adam(model.parameters())
    save, load = checkpoint.save_to_memory, checkpoint.load_from_memory
    refused(lambda: save(model, holders=[rank]), "other holders or copies on other ranks", "the same arguments")
    refused(lambda: save(model, holders=[0, 2]), "expected some of [0, 1]", "got [0, 2]")
    refused(lambda: save(model, holders=[]), "holders of a checkpoint in memory", "got []")
    refused(lambda: save(model, holders=[1], copies=2), "cannot have a part twice", "copies of 1 to 1, got 2")
    held, other = save(model), save(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.inward.weight.zero_()
    refused(lambda: load(held, model, optimizer), "there is no optimizer state in the checkpoint in memory")
    refused(lambda: load(held if rank else other, model), "shares of several checkpoints", "The model is as it was")
    refused(lambda: load(None, model), "None on every rank")
    refused(lambda: load(None if rank else held, model), "none of these ranks has part 1", "copies=2")
    refused(lambda: load("runs/1", model), "no checkpoint in memory", "got str", "what save_to_memory returned")
    wrong = shard(nn.Sequential(nn.Linear(5, 7)), "fully_shard")
    refused(lambda: load(held, wrong), "does not fit the model", "missing ('0.weight', '0.bias')")
    wide = TinyMLP()
    wide.middle = nn.Linear(9, 3)
    refused(lambda: load(held, shard(wide, "fully_shard")), "another shape (parameter 'middle.weight')", "(3, 9)")
    half = TinyMLP(dtype=torch.bfloat16)
    refused(lambda: load(held, shard(half, "fully_shard")), "another dtype", "torch.bfloat16")
    assert not model.inward.weight.any()
    load(held, model)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    with torch.device("meta"):
        empty = TinyMLP()
    refused(lambda: save(shard(empty, "fully_shard")), "on the meta device has no values", "materialise")


@ranks(2)
def test_u99_an_unsharded_model_too(rank: int) -> None:
    """U99: what is not sharded is that of the first rank of the group, as in files; one rank alone works as well."""
    model = OddTransformer(blocks=1)
    alone = dist.new_group([1])
    held = checkpoint.save_to_memory(model)
    again = OddTransformer(blocks=1, seed=4)
    checkpoint.load_from_memory(held, again)
    assert_same_tensors(again.state_dict(), model.state_dict(), bitwise=True)
    if rank == 1:
        held = checkpoint.save_to_memory(model, holders=[1], process_group=alone)
        other = OddTransformer(blocks=1, seed=5)
        checkpoint.load_from_memory(held, other, process_group=alone)
        assert torch.equal(other.head.weight, model.head.weight)
