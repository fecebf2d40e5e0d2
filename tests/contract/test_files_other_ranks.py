"""Files read back by more and by fewer ranks: any shapes, front ends and strategies; and a run that goes on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DistributedSampler

from shardwise import checkpoint
from tests.bed import ranks
from tests.bed.checkpoints import first_ranks, odd, over, values
from tests.bed.fronts import FRONTS, WRAPPERS, shard
from tests.bed.models import batch, loss
from tests.bed.parity import assert_same_tensors
from tests.contract.test_state_dict_dcp import Shapes

COUNTS = [(2, 1), (2, 3), (2, 4), (4, 2)]
WAYS = [(front, "DEFAULT") for front in FRONTS] + [
    (front, strategy) for front in WRAPPERS for strategy in ("SHARD_GRAD_OP", "NO_SHARD")]

shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4)


def common(path: Path | None) -> Path:
    """Rank 0's path, on every rank."""
    box = [path]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def after_a_step(shapes: list[tuple[int, ...]], way: tuple[str, str], group: Any
                 ) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model over the ranks of ``group``, sharded in that ``way``, and its optimizer with state."""
    model = shard(Shapes(shapes, 1.0), way[0], strategy=way[1], **over(way[0], group))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    model(torch.ones(2)).backward()
    optimizer.step()
    return model, optimizer


@ranks(4, timeout=240)
def test_shapes_counts_fronts_strategies() -> None:
    """U75, U68, A27: model and optimizer, byte for byte the same files whoever writes them."""
    any_case()


@settings(max_examples=8, derandomize=True, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))
@given(shapes=shapes, counts=st.sampled_from(COUNTS), saved=st.sampled_from(WAYS), loaded=st.sampled_from(WAYS))
def any_case(shapes: list[tuple[int, ...]], counts: tuple[int, int], saved: tuple[str, str],
             loaded: tuple[str, str]) -> None:
    """Every rank draws the same examples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = common(Path(tempfile.mkdtemp()) if rank == 0 else None)
    groups = [first_ranks(count, world) for count in counts]
    if rank < counts[0]:
        model, optimizer = after_a_step(shapes, saved, groups[0])
        checkpoint.save(folder / "first", model, optimizer, process_group=groups[0])
    dist.barrier()
    if rank < counts[1]:
        model = shard(Shapes(shapes, 9.0), loaded[0], strategy=loaded[1], **over(loaded[0], groups[1]))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=7.0)
        checkpoint.load(folder / "first", model, optimizer, process_group=groups[1])
        checkpoint.save(folder / "second", model, optimizer, process_group=groups[1])
    dist.barrier()
    for name in ("model", "optimizer"):
        first, second = (load_file(folder / f / f"{name}.safetensors") for f in ("first", "second"))
        assert_same_tensors(second, first, bitwise=True)
    bare = Shapes(shapes, 1.0)
    alone = torch.optim.Adagrad(bare.parameters(), lr=0.5)
    bare(torch.ones(2)).backward()
    alone.step()
    assert_same_tensors(load_file(folder / "second" / "model.safetensors"), bare.state_dict(), bitwise=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


class Run:
    """A model with all that a training script keeps."""

    def __init__(self, front: str, group: dist.ProcessGroup, *, blank: bool = False) -> None:
        self.model, self.group = odd(front, blank=blank, **over(front, group)), group
        # not Adam: it makes a step of the rounding where a gradient is zero, as in front of a norm
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.sampler = DistributedSampler(list(range(40)), 1, 0, seed=5)
        self.position = 0

    def steps(self, count: int) -> list[float]:
        """The same data on all ranks, so that the losses do not depend on how many there are."""
        losses = []
        for _ in range(count):
            value = loss(self.model, batch(0, list(self.sampler)[self.position]))
            self.optimizer.zero_grad()
            self.scaler.scale(value).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.position += 1
            losses.append(value.item())
        return losses

    def save(self, path: Path) -> None:
        extra = {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(),
                 "position": self.position}
        checkpoint.save(path, self.model, self.optimizer, extra, process_group=self.group)

    def load(self, path: Path) -> None:
        extra: Any = checkpoint.load(path, self.model, self.optimizer, process_group=self.group)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        self.position = extra["position"]


@ranks(4, timeout=240)
@pytest.mark.parametrize("front", FRONTS)
def test_a_run_goes_on_at_other_ranks(front: str, rank: int, tmp_path: Path) -> None:
    """C25, U75: bit-equal at the same number of ranks, equal in value at 1, 3 and 4."""
    groups = {count: first_ranks(count, 4) for count in (1, 2, 3, 4)}
    path = common(tmp_path)
    losses = [[]]
    if rank < 2:
        run = Run(front, groups[2])
        run.steps(3)
        run.save(path / "saved")
        losses = [run.steps(4)]
        torch.save(values(run.model), path / f"values-{rank}")
    dist.broadcast_object_list(losses)
    for count in (1, 2, 3, 4):
        dist.barrier()
        if rank < count:
            again = Run(front, groups[count], blank=True)
            again.load(path / "saved")
            found = again.steps(4)
            assert found == (losses[0] if count == 2 else pytest.approx(losses[0], rel=1e-5))
            assert_same_tensors(values(again.model), torch.load(path / "values-0"),
                                **({"bitwise": True} if count == 2 else {"rtol": 1e-4, "atol": 1e-5}))
            assert again.scaler.get_scale() == 256.0 and again.scheduler.last_epoch == 7
