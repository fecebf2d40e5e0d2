"""When units are gathered: every prefetch mode, with accumulation, on static and dynamic graphs.

Rows A34, A35, U43, U44, U45, U46, B19. The transport is told to overlap, so that implicit prefetch
does something; then at most two units are gathered beyond those in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import BackwardPrefetch, fully_shard
from shardwise.engine.session import Session
from tests.bed import ranks
from tests.bed.fronts import counted, full_gradients, shard, units, unsynced
from tests.bed.parity import assert_same_tensors
from tests.bed.recording import recorded

MODES: dict[str, dict[str, Any]] = {
    "pre": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "none": {"backward_prefetch": None},
    "pre and forward": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "forward_prefetch": True},
    "post and forward": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
    "unlimited": {"forward_prefetch": True, "limit_all_gathers": False},
}


class Stack(nn.Module):
    """Six blocks, run in the order that ``order`` says: a dynamic graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(6, 2)
        self.order: Sequence[int] = range(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


STATIC = [range(6)] * 3
DYNAMIC = [range(6), (0, 2, 3, 5), (5, 4, 3, 2, 1, 0), (1, 1, 4), range(6), (), (0, 1, 5, 2)]


class Gathered:
    """What was gathered and freed, in order, and ``most``: units gathered and not in use at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.units = list(units(model).values())
        self.most = 0
        self.events: list[tuple[str, str]] = []
        for unit in self.units:
            unit.observer = lambda event, nbytes, unit=unit: self.events.append((event, unit.fqn))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count after each step of the session, root apart: it stays from forward to backward."""
        with ExitStack() as stack:
            for name in ("enter_forward", "leave_forward", "enter_backward", "leave_backward"):
                stack.enter_context(patch.object(Session, name, self._counted(getattr(Session, name))))
            yield

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(session: Session, *args: Any, **kwargs: Any) -> Any:
            result = original(session, *args, **kwargs)
            idle = [u for u in self.units if u.gather.nbytes and u.uses == 0 and u is not session.root]
            self.most = max(self.most, len(idle))
            return result

        return step

    def gathers(self) -> list[str]:
        return [name for event, name in self.events if event == "gather"]


@contextmanager
def _overlapping(*, on_streams: bool = False) -> Iterator[None]:
    with counted(overlaps=True):
        if on_streams:
            with recorded():
                yield
        else:
            yield


def _pair(front: str, **arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    plain = Stack()
    twin: Any = copy.deepcopy(plain)
    return plain, shard(twin, front, list(twin.blocks), "FULL_SHARD", **arguments)


def _data(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _compare(plain: nn.Module, model: nn.Module) -> None:
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", bitwise=True)


def _run(front: str, mode: str, orders: Sequence[Sequence[int]], accumulation: str) -> int:
    """Steps of the plain and the sharded model; how many idle units were gathered at most."""
    plain, model = _pair(front, **MODES[mode])
    counter = Gathered(model)
    net = getattr(model, "module", model)
    for step, order in enumerate(orders):
        plain.order = net.order = order
        for micro in range(1 if accumulation == "none" else 2):
            plain(_data(10 * step + micro)).square().mean().backward()
            quiet = accumulation == "no_sync" and micro == 0
            with unsynced(model, front, quiet=quiet), counter.counting():
                model(_data(10 * step + micro)).square().mean().backward()
        _compare(plain, model)
        plain.zero_grad()
        model.zero_grad()
    return counter.most


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streams", [False, True])
def test_A34_A35_every_mode_with_accumulation_on_every_graph(streams: bool, mode: str, rank: int) -> None:
    for graph, accumulation in product((STATIC, DYNAMIC), ("none", "each", "no_sync")):
        with _overlapping(on_streams=streams):
            most = _run("orig", mode, graph, accumulation)
        assert most <= (4 if mode == "unlimited" else 2), (accumulation, most)
        assert most > 0 or (mode == "none" and not streams)


@ranks(2)
def test_U44_backward_gathers_the_unit_before_ahead_of_need(rank: int) -> None:
    expected = {
        "pre": ["gather 5", "gather 4", "free 5", "gather 3", "free 4"],
        "post": ["gather 5", "free 5", "gather 4", "free 4", "gather 3"],
        "none": ["gather 5", "free 5", "gather 4", "free 4", "gather 3"],
    }
    for mode, wanted in expected.items():
        with _overlapping():
            _, model = _pair("orig", **MODES[mode])
            value = model(_data(0)).sum()
            counter = Gathered(model)
            value.backward()
        seen = [f"{event} {name[-1]}" for event, name in counter.events if event != "reduce" and name]
        assert seen[:5] == wanted, mode
        assert len(counter.gathers()) == 6, mode


@ranks(2)
def test_U43_forward_follows_the_last_order(rank: int) -> None:
    with _overlapping():
        _, model = _pair("orig", **MODES["pre and forward"])
        model(_data(0)).sum().backward()
        counter = Gathered(model)
        model(_data(0))
        seen = [f"{event} {name[-1:]}" for event, name in counter.events]
    assert seen[:6] == ["gather ", "gather 0", "gather 1", "free 0", "gather 2", "free 1"]


@ranks(2)
def test_A34_a_unit_that_was_expected_in_vain_goes_at_once(rank: int) -> None:
    with _overlapping():
        _, model = _pair("orig", **MODES["pre and forward"])
        with torch.no_grad():
            model(_data(0))
            counter = Gathered(model)
            model.module.order = (0, 3, 4)
            model(_data(0))
    seen = [f"{event} {name[-1:]}" for event, name in counter.events]
    assert seen == ["gather ", "gather 0", "gather 1", "free 0", "gather 3", "free 1", "free 3",
                    "gather 4", "free 4", "free "]
    assert all(unit.gather.nbytes == 0 for unit in counter.units)


@ranks(2)
def test_a_transport_that_cannot_overlap_is_not_asked_to(rank: int) -> None:
    """Prefetch would only hold memory longer: nothing is gathered ahead, in any mode."""
    for mode in MODES:
        with counted(overlaps=False):
            assert _run("orig", mode, STATIC, "none") == 0, mode


@ranks(2)
def test_U45_prefetch_lists(rank: int) -> None:
    with counted(overlaps=True):
        torch.manual_seed(3)
        model = Stack()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        b: Any = model.blocks
        for index in range(5):
            b[index].set_modules_to_forward_prefetch(list(b[index + 1 : index + 3]))
            b[index + 1].set_modules_to_backward_prefetch([b[index]])
        plain = Stack()
        plain.load_state_dict({n: p for n, p in zip(model.state_dict(), _wholes(model), strict=True)})
        counter = Gathered(model)
        model(_data(0)).square().mean().backward()
        plain(_data(0)).square().mean().backward()
        _compare(plain, model)
    forward = [name[-1:] for name in counter.gathers()][:7]
    assert forward == ["", "0", "1", "2", "3", "4", "5"]
    first = counter.events.index(("free", "blocks.0"))
    assert {name for event, name in counter.events[:first] if event == "gather"} == {
        "", "blocks.0", "blocks.1", "blocks.2"}


def _wholes(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[operator]


@ranks(2)
def test_a_unit_that_backward_does_not_reach_is_not_gathered_for_it(rank: int) -> None:
    with _overlapping():
        _, model = _pair("orig", **MODES["pre"])
        with torch.no_grad():
            h = model.module.blocks[1](torch.ones(2, 6))
        value = model.module.blocks[3](h).sum()
        counter = Gathered(model)
        value.backward()
    assert "blocks.1" not in counter.gathers()
