"""torch.compile with shardwise: U91. Same numbers, and nothing is compiled anew after step two.

The engine's hooks are never traced: whatever is compiled, they run between the graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import full_parameters, shard
from tests.bed.parity import assert_same_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Compiled:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)


@contextmanager
def _fresh() -> Iterator[Compiled]:
    torch._dynamo.reset()
    try:
        yield Compiled()
    finally:
        torch._dynamo.reset()


def _model(front: str, backend: Compiled, place: str) -> tuple[Any, Any]:
    """The sharded model, and what to call."""
    torch.manual_seed(3)
    net: Any = Net()
    if place == "before":
        net.a.compile(backend=backend)
        net.b.compile(backend=backend)
    model = shard(net, front, [net.a, net.b], "FULL_SHARD")
    inner = getattr(model, "module", model)
    if place == "blocks":
        for name in ("a", "b"):
            getattr(inner, name).compile(backend=backend)
    return model, torch.compile(model, backend=backend) if place == "model" else model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@ranks(2, timeout=300)
@pytest.mark.parametrize("place", ["before", "blocks", "model"])
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_U91_same_numbers_and_no_new_graphs(front: str, place: str, rank: int) -> None:
    torch.manual_seed(3)
    plain = Net()
    expected = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    data = [torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    for x in data:
        expected(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with _fresh() as backend:
        model, run = _model(front, backend, place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for x in data:
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(backend.graphs))
        assert counts[1] > 0, "nothing was compiled"
        assert counts[1:] == [counts[1]] * 3
        for graph in backend.graphs:
            assert "shardwise" not in graph.code.replace("shardwise_parameters", "")
    wanted = {name: p.detach() for name, p in expected.named_parameters()}
    assert_same_tensors(full_parameters(model, list(wanted)), wanted, "parameter", rtol=1e-5, atol=1e-6)


def test_U91_hooks_are_passed_over_by_the_compiler() -> None:
    """What the engine does at a unit's border leaves no graph of its own, however it is called."""
    from shardwise.torch_private import never_traced, passed_through

    def deep(x: Tensor) -> Tensor:
        return x + 1

    def hook(x: Tensor) -> Tensor:
        return deep(x) * 2

    def through(x: Tensor) -> Tensor:
        return deep(x) * 2

    never_traced(hook)
    passed_through(through)
    for function, expected in ((hook, 0), (through, 1)):
        with _fresh() as backend:
            result = torch.compile(function, backend=backend)(torch.ones(3))
            assert result.tolist() == [4.0] * 3
            assert len(backend.graphs) == expected
