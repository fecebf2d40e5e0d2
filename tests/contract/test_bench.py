"""The benchmark's own measurements, on ranks: every contender trains alike, and costs are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.bench.contenders import Setup, contenders_for
from shardwise.bench.measuring import Rounds, measure
from shardwise.bench.workload import built_in
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
