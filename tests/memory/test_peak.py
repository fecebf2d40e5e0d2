"""Peak memory by bytes: shards, at most two gathered units, and one reduce buffer.

One process plays rank 0, first of 2 and then of 1,024 ranks. Every buffer has its real size; the
bytes are counted after each move of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import memory_of
from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.collect import Collector
from shardwise.engine.reduce import Groups
from shardwise.engine.session import Session
from shardwise.engine.unit import Settings, Unit
from shardwise.plan.options import Precision

WIDTH, VOCABULARY, BLOCKS = 64, 512, 6


class Simulated(SimulatedCollectives):
    """Like shared memory, it does its work in the call, unless told otherwise."""

    overlaps = False


class Stack(nn.Module):
    """A root with an embedding and an untied head around equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass
class Peak:
    gathered: int = 0
    unsent: int = 0
    both: int = 0
    between: int = 0  #: unsent while no unit but the root holds any: what the root keeps through backward

    def look(self, model: nn.Module, root: Unit) -> None:
        held = memory_of(model)
        self.gathered = max(self.gathered, held.gathered)
        self.unsent = max(self.unsent, held.unsent)
        self.both = max(self.both, held.gathered + held.unsent)
        if root.uses and held.unsent > root.collector.nbytes:
            self.between = max(self.between, root.collector.nbytes)


def _build(world: int, precision: Precision, *, overlaps: bool = False) -> tuple[Stack, list[Unit]]:
    torch.manual_seed(0)
    model = Stack()
    groups = Groups(Simulated(0, world))
    groups.shard.overlaps = overlaps
    made = [build_unit([module], Choices(groups, torch.device("cpu"), precision, Settings()))
            for module in (*model.blocks, model)]
    return model, made


@contextmanager
def _watching(model: nn.Module, root: Unit) -> Iterator[Peak]:
    """Look after every move of the session and every copy of gradients."""
    peak = Peak()
    moves = [(Session, name) for name in ("enter_forward", "leave_forward", "enter_backward", "leave_backward",
                                          "send")] + [(Collector, "_flush"), (Collector, "_take")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in moves]

    def watched(original: Any) -> Any:
        def move(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            peak.look(model, root)
            return result
        return move

    with patch.multiple(Session, **{n: watched(f) for o, n, f in originals if o is Session}), \
            patch.multiple(Collector, **{n: watched(f) for o, n, f in originals if o is Collector}):
        yield peak


def _bytes(unit: Unit, dtype: torch.dtype) -> int:
    return sum(storage.layout.flat_numel for storage in unit.storages) * dtype.itemsize


@pytest.mark.parametrize("world", [2, 1024])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_two_gathered_units_and_one_reduce_buffer(world: int, compute: torch.dtype) -> None:
    """The root and one block are gathered at most, and the head's gradient waits as it came."""
    mixed = Precision(param=compute, reduce=torch.float32) if compute is not torch.float32 else Precision()
    model, made = _build(world, mixed)
    root, block = made[-1], made[0]
    tokens = torch.arange(12).view(2, 6)
    model(tokens).square().mean().backward()
    model.zero_grad()
    with _watching(model, root) as peak:
        model(tokens).square().mean().backward()
    assert peak.gathered == _bytes(root, compute) + _bytes(block, compute)
    head = VOCABULARY * WIDTH * compute.itemsize
    assert peak.between == head, "the root keeps more than the head's gradient through backward"
    assert peak.unsent <= max(_bytes(root, torch.float32) + 2 * head, _bytes(block, torch.float32) + head)
    held = memory_of(model)
    assert (held.gathered, held.unsent) == (0, 0)
    assert held.shards == held.gradients == sum(_bytes(unit, torch.float32) for unit in made) // world


def test_prefetch_costs_one_more_unit() -> None:
    """Where collectives overlap with computation, the next block is there as well, and one reduction runs."""
    model, made = _build(2, Precision(), overlaps=True)
    root, block = _bytes(made[-1], torch.float32), _bytes(made[0], torch.float32)
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2):
        with _watching(model, made[-1]) as peak:
            model(tokens).square().mean().backward()
        assert peak.gathered == root + 2 * block
        assert peak.unsent <= root + block + 2 * VOCABULARY * WIDTH * 4


def test_the_count_sees_a_root_that_opens_its_buffer_early() -> None:
    """The same count with an impatient root is larger: the test above can fail."""
    model, made = _build(2, Precision())
    root = made[-1]
    tokens = torch.arange(12).view(2, 6)
    model(tokens).square().mean().backward()
    root.collector.patient = False
    with patch.object(Collector, "LARGE", 1), _watching(model, root) as peak:
        root.collector.rebuild()
        model(tokens).square().mean().backward()
    assert peak.between == _bytes(root, torch.float32) > VOCABULARY * WIDTH * 4
