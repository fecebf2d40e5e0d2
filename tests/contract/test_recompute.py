"""Activation checkpointing changes no bit: U90, A41, and clean names (A10).

Both kinds, inside a unit, around a unit and around several, with activations offloaded, in fp32
and under mixed precision, on every front end. The reference is the same sharded model without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwise import MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, full_gradients, shard, units
from tests.bed.parity import assert_same_tensors


class Block(nn.Module):
    """``inner``: how its own middle part runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 8))
        self.inner: Callable[..., Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + (self.middle(x) if self.inner is None else self.inner(self.middle, x))


class Net(nn.Module):
    """``outer``: how blocks run; ``span``: how all of them run together; ``order``: which run."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.outer: Callable[..., Any] | None = None
        self.span: Callable[..., Any] | None = None
        self.order = (0, 1, 2)

    def _all(self, x: Tensor) -> Tensor:
        for block in (self.blocks[number] for number in self.order):
            x = block(x) if self.outer is None else self.outer(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        return self.head(self._all(h) if self.span is None else self.span(self._all, h))


def _reentrant(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def _plain(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def _to_the_end(function: Callable[..., Any], x: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(function, x, use_reentrant=False)


KINDS = {"reentrant": _reentrant, "non-reentrant": _plain, "without early stop": _to_the_end}


def _sharded(front: str, mixed: bool, prepare: Callable[[Net], None] = lambda net: None) -> Any:
    torch.manual_seed(3)
    net = Net()
    prepare(net)
    options: dict[str, Any] = {}
    if mixed and front == "fully_shard":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif mixed:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    return shard(net, front, list(net.blocks), "FULL_SHARD", **options)


def _losses_and_gradients(model: Any, context: Any = None) -> tuple[list[float], dict[str, Tensor | None]]:
    losses = []
    for step in range(2):
        torch.manual_seed(step)  # dropout
        with context() if context is not None else nullcontext():
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            value = model(x).float().square().mean()
        value.backward()
        losses.append(value.item())
    for name, unit in units(model).items():
        assert (unit.gather.nbytes, unit.uses, unit.collector.nbytes) == (0, 0, 0), name
    return losses, full_gradients(model, [name for name, _ in Net().named_parameters()])


def _same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert_same_tensors(one[1], other[1], "gradient", bitwise=True)


@ranks(2)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # nested, reentrant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("front", FRONTS)
def test_U90_A41_wherever_it_is_applied(front: str, kind: str, rank: int) -> None:
    for mixed in (False, True):
        expected = _losses_and_gradients(_sharded(front, mixed))
        for place in ("inner", "outer", "span", "inner and outer", "outer and span"):
            model = _sharded(front, mixed)
            net = getattr(model, "module", model)
            if "inner" in place:
                for block in net.blocks:
                    getattr(block, "module", block).inner = KINDS[kind]
            net.outer = KINDS[kind] if "outer" in place else None
            net.span = KINDS[kind] if "span" in place else None
            _same(_losses_and_gradients(model), expected)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("front", FRONTS)
def test_U90_A41_a_block_that_runs_three_times(front: str, kind: str, rank: int) -> None:
    """Each recompute may have a backward of its own, which brings a gradient to the same leaves."""

    def share(net: Net) -> None:
        net.order = (0, 0, 0)

    model = _sharded(front, False, share)
    getattr(model, "module", model).outer = KINDS[kind]
    _, gradients = _losses_and_gradients(model)
    _, expected = _losses_and_gradients(_sharded(front, False, share))
    assert_same_tensors(gradients, expected, "gradient")  # added up in another order


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U90_activations_on_the_host(front: str, rank: int) -> None:
    expected = _losses_and_gradients(_sharded(front, True))
    _same(_losses_and_gradients(_sharded(front, True), torch.autograd.graph.save_on_cpu), expected)
    model = _sharded(front, True)
    getattr(model, "module", model).outer = _plain
    _same(_losses_and_gradients(model, torch.autograd.graph.save_on_cpu), expected)


@ranks(2)
@pytest.mark.parametrize("impl", list(CheckpointImpl))
@pytest.mark.parametrize("front", FRONTS)
def test_A10_U90_checkpoint_wrappers_leave_no_trace(front: str, impl: CheckpointImpl, rank: int) -> None:
    def before(net: Net) -> None:
        for block in net.blocks:
            block.middle = checkpoint_wrapper(block.middle, checkpoint_impl=impl)

    def offloading(net: Net) -> None:
        for block in net.blocks:
            block.middle = offload_wrapper(checkpoint_wrapper(block.middle, checkpoint_impl=impl))

    expected = _losses_and_gradients(_sharded(front, False))
    clean = list(_sharded(front, False).state_dict())
    for prepare in (before, offloading):
        model = _sharded(front, False, prepare)
        assert list(model.state_dict()) == clean
        if front != "flat":
            assert [name for name, _ in model.named_parameters()] == clean
        _same(_losses_and_gradients(model), expected)
        model.load_state_dict(model.state_dict())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A10_U90_wrapped_after_sharding(front: str, rank: int) -> None:
    expected = _losses_and_gradients(_sharded(front, False))
    model = _sharded(front, False)
    clean = list(model.state_dict())
    apply_activation_checkpointing(
        getattr(model, "module", model), check_fn=lambda module: type(module).__name__.endswith("Block"))
    assert list(model.state_dict()) == clean
    if front != "flat":
        assert [name for name, _ in model.named_parameters()] == clean
    _same(_losses_and_gradients(model), expected)


@ranks(2)
def test_U90_recompute_gathers_nothing_twice(rank: int) -> None:
    """Around a unit, without reentrance: forward and backward gather each unit once, as without it."""
    counts = []
    for function in (None, _plain, _to_the_end):
        with counted() as traffic:
            model = _sharded("fully_shard", False)
            model.outer = function
            _losses_and_gradients(model)
            traffic.clear()
            model(torch.ones(4, 5)).sum().backward()
            counts.append((traffic.count("all_gather"), traffic.count("reduce_scatter")))
    assert counts == [counts[0]] * 3
