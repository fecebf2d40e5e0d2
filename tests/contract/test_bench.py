"""The benchmark's own measurements, on ranks: every contender trains alike, and costs are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.bench.contenders import Setup, Trainer, contenders_for
from shardwise.bench.measuring import Rounds, measure
from shardwise.bench.workload import built_in
from shardwise.errors import ConfigurationError
from tests.bed import ranks

WORKLOAD = built_in(width=32, layers=2, heads=2, context=8, vocabulary=32, batch=2)


@ranks(2)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_every_contender_trains_alike(rank: int, world: int, compute: torch.dtype | None) -> None:
    setup = Setup(WORKLOAD.kinds, torch.device("cpu"), compute)
    report = measure(WORKLOAD, contenders_for(["ddp", "wrapper", "fully_shard", "fsdp1", "fsdp2"]), setup,
                     Rounds(timed=2, warmup=1, accumulation=2))
    assert report.agrees, report.disagreement()
    assert report.rows[0].losses[0] > report.rows[0].losses[-1] - 1 and report.items == 2 * 2 * 8 * world
    assert all(row.calls > 100 and len(row.seconds) == 2 and row.peak_bytes > 0 for row in report.rows)


@ranks(2)
def test_bytes_are_those_of_the_formula(rank: int, world: int) -> None:
    """C: gathers twice and a reduction, P (N−1)/N each; DDP's all-reduce twice P (N−1)/N."""
    setup = Setup(WORKLOAD.kinds, torch.device("cpu"))
    report = measure(WORKLOAD, contenders_for(["ddp", "fully_shard", "fsdp2"]), setup, Rounds(timed=1, warmup=1))
    nbytes = 4 * sum(p.numel() for p in WORKLOAD.build().parameters())
    blocks = 4 * sum(p.numel() for b in WORKLOAD.build().modules() if isinstance(b, WORKLOAD.kinds)
                     for p in nn.Module.parameters(b))
    cost = {row.name: row for row in report.rows}
    assert cost["ddp"].wire_bytes == pytest.approx(nbytes, rel=0.01)
    expected = (nbytes + blocks + nbytes) / 2  # the root stays gathered between forward and backward
    assert cost["fully_shard"].wire_bytes == pytest.approx(expected, rel=0.02)
    assert cost["fsdp2"].wire_bytes == pytest.approx(expected, rel=0.02)
    assert cost["fully_shard"].peak_bytes < cost["ddp"].peak_bytes


class _Fails(Trainer):
    """An unsharded model, which nobody waits for, whose step raises on rank 1 from step ``at`` on."""

    def __init__(self, model: nn.Module, setup: Setup, at: int) -> None:
        super().__init__(model, setup)
        self.left = at

    def step(self, batches: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            raise NotImplementedError("not for this model\nand more of it")
        return super().step(batches)


def _refuses(model: nn.Module, setup: Setup) -> Trainer:
    raise ValueError


@ranks(2)
def test_who_raises_is_left_out_and_the_others_go_on(rank: int, world: int) -> None:
    failing = {"builds": _refuses, "steps": lambda m, s: _Fails(m, s, 0), "later": lambda m, s: _Fails(m, s, 2),
               "weighed": lambda m, s: _Fails(m, s, 4)}
    chosen = failing | contenders_for(["fully_shard", "fsdp2"])
    setup = Setup(WORKLOAD.kinds, torch.device("cpu"))
    report = measure(WORKLOAD, chosen, setup, Rounds(timed=2, warmup=1))
    assert [row.name for row in report.rows] == ["fully_shard", "fsdp2"] and report.agrees
    assert all(len(row.seconds) == 2 and row.calls for row in report.rows)
    said = "NotImplementedError: not for this model"
    assert [(one.name, one.error) for one in report.left_out] == [
        ("builds", "ValueError: no text"), ("steps", said), ("later", said), ("weighed", said)]
    assert "in step" in report.left_out[1].trace  # the traceback of rank 1, on both
    assert report.as_dict()["left_out"][1]["error"] == said
    with pytest.raises(ConfigurationError, match=r"(?s)no contender ran.*got builds: ValueError.*_refuses"):
        measure(WORKLOAD, {"builds": _refuses}, setup, Rounds(timed=1, warmup=1))
