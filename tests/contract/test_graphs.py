"""Unusual autograd graphs give the gradients of the plain module, and leave nothing gathered.

All ranks have the same data, so that the mean over ranks is the plain gradient, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, shard, units
from tests.bed.parity import assert_same_tensors


class Block(nn.Module):
    """A unit; ``kind`` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), kind
        self.penalty: Tensor | None = None
        self.log: list[Any] = []

    def _plain(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor, penalties: list[Tensor] | None = None, *, again: bool = True) -> Any:
        if penalties is not None:
            penalties.append(self.second(x).square().mean())
        return getattr(self, f"_{self.kind}")(x)

    def _view(self, x: Tensor) -> Tensor:
        return self._plain(x).unsqueeze(0).squeeze(0)

    def _slice(self, x: Tensor) -> Tensor:
        y = self._plain(x)
        return torch.cat([y, y])[: y.shape[0]]

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._plain(x).unbind(0)

    def _unused(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._plain(x), self.first(x).sum()

    def _attribute(self, x: Tensor) -> Tensor:
        self.penalty = self.second(self.first(x)).square().mean()
        return self._plain(x)

    def _list(self, x: Tensor) -> Tensor:
        self.log[:] = [3, self.second(self.first(x)).square().mean()]
        return self._plain(x)

    def _object(self, x: Tensor) -> Any:
        return SimpleNamespace(hidden=self._plain(x), count=3)

    def _input_changed_first(self, x: Tensor) -> Tensor:
        return self._plain(x.mul_(1.5))

    def _input_changed_last(self, x: Tensor) -> Tensor:
        return x.add_(self._plain(x.clone()))

    def _input_view(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), self._plain(x)

    def _recursive(self, x: Tensor) -> Tensor:
        y = self._plain(x)
        if x.shape[0] > 1:
            y = torch.cat([y[:1], self(y[1:])])
        return y


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.b0, self.b1 = Block(kind), Block(kind)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b1(self.b0(self.inward(x))))


def _data(step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _pair(front: str, kind: str = "plain", model: Callable[[str], nn.Module] = Net) -> tuple[Any, Any]:
    torch.manual_seed(3)
    plain = model(kind)
    twin: Any = copy.deepcopy(plain)
    return plain, shard(twin, front, [twin.b0, twin.b1], "FULL_SHARD")


def _check(front: str, kind: str, run: Callable[[Any], object], times: int = 2) -> None:
    plain, sharded = _pair(front, kind)
    for _ in range(times):  # gradients add up
        run(plain)
        run(sharded)
    _compare(plain, sharded)


def _compare(plain: nn.Module, sharded: nn.Module, *, bitwise: bool = True) -> None:
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = full_gradients(sharded, list(expected))
    for name, gradient in got.items():  # in a flat parameter, what is unused has zeros
        if gradient is not None and expected[name] is None and not gradient.any():
            expected[name] = gradient
    assert_same_tensors(got, expected, "gradient", bitwise=bitwise)
    for name, unit in units(sharded).items():
        assert (unit.gather.nbytes, unit.uses) == (0, 0), name
        assert not unit.face.in_use, name


def _inner(model: Any) -> Any:
    return getattr(model, "module", model)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_outputs_changed_in_place(front: str, rank: int) -> None:
    def run(model: Any) -> None:
        net = _inner(model)

        def forward(self: Any, x: Tensor) -> Tensor:
            h = self.inward(x)
            y = self.b0(h)
            y += h
            z = self.b1(y)
            z.mul_(0.5)
            return self.head(z)

        type(net).forward, before = forward, type(net).forward
        try:
            model(_data()).square().mean().backward()
        finally:
            type(net).forward = before

    for kind in ("plain", "view", "slice"):
        _check(front, kind, run)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_outputs_in_parts_unused_or_in_an_object(front: str, rank: int) -> None:
    class Parts(Net):
        def forward(self, x: Tensor) -> Tensor:
            h: Any = self.inward(x)
            for block in (self.b0, self.b1):
                h = block(h)
                if isinstance(h, SimpleNamespace):
                    h = h.hidden
                elif isinstance(h, tuple):
                    h = torch.stack(h[:3]) if h[0].shape == (6,) else h[-1] if h[0].dim() == 1 else h[0]
            return self.head(h)

    for kind in ("chunks", "unused", "object", "input_view"):
        plain, sharded = _pair(front, kind, Parts)
        for model in (plain, sharded, plain, sharded):
            model(_data()).square().mean().backward()
        _compare(plain, sharded)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_inputs_changed_in_place(front: str, rank: int) -> None:
    for kind in ("input_changed_first", "input_changed_last"):
        _check(front, kind, lambda model: model(_data()).square().mean().backward())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_loss_that_is_left_behind(front: str, rank: int) -> None:
    """Backward comes in through an attribute, a list, or an argument; also by itself alone."""

    def attribute(model: Any) -> None:
        y = model(_data())
        (y.mean() + _inner(model).b0.penalty + 2 * _inner(model).b1.penalty).backward()

    def alone(model: Any) -> None:
        model(_data())
        _inner(model).b1.penalty.backward()

    def listed(model: Any) -> None:
        y = model(_data())
        (y.mean() + _inner(model).b0.log[1] + _inner(model).b1.log[1]).backward()

    _check(front, "attribute", attribute)
    _check(front, "attribute", alone)
    _check(front, "list", listed)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_loss_that_is_left_in_an_argument(front: str, rank: int) -> None:
    class Collecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            losses: list[Tensor] = []
            h = self.b1(self.b0(self.inward(x), losses), penalties=losses)
            return sum(losses, self.head(h).mean())

    plain, sharded = _pair(front, "plain", Collecting)
    for model in (plain, sharded):
        model(_data()).backward()
    _compare(plain, sharded)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_graph_used_twice(front: str, rank: int) -> None:
    def run(model: Any) -> None:
        value = model(_data()).square().mean()
        value.backward(retain_graph=True)
        value.backward()

    _check(front, "plain", run)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_unit_before_its_root(front: str, rank: int) -> None:
    def run(model: Any) -> None:
        early = _inner(model).b0(torch.ones(3, 6))
        (model(_data()).square().mean() + early.mean()).backward()

    _check(front, "plain", run)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_root_inside_another_roots_forward(front: str, rank: int) -> None:
    plain_helper, helper = _pair(front)

    class Asking(Net):
        asked: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.asked[0](x)

    plain, sharded = _pair(front, "plain", Asking)
    _inner(plain).asked, _inner(sharded).asked = [plain_helper], [helper]
    for model in (plain, sharded, plain, sharded):
        model(_data()).square().mean().backward()
    _compare(plain, sharded)
    _compare(plain_helper, helper)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_different_numbers_of_forwards(front: str, rank: int) -> None:
    plain, sharded = _pair(front)
    for count in (1, 3, 0, 2):
        for model in (plain, sharded):
            values = [model(_data(step)).square().mean() for step in range(count)]
            if values:
                torch.stack(values).sum().backward()
    _compare(plain, sharded)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_other_passes_between_forward_and_backward(front: str, rank: int) -> None:
    def run(model: Any) -> None:
        value = model(_data()).square().mean()
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            model.eval()
            with context():
                model(_data(1))
            model.train()
        value.backward()

    _check(front, "plain", run)
    _check(front, "slice", run)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_unit_that_calls_itself(front: str, rank: int) -> None:
    _check(front, "recursive", lambda model: model(_data()).square().mean().backward())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_backward_inside_a_forward(front: str, rank: int) -> None:
    class Looking(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.inward(x)
            probe = torch.ones(2, 6, requires_grad=True)
            slope, = torch.autograd.grad(self.b0(probe).sum(), probe)
            return self.head(self.b1(self.b0(h) + slope.mean()))

    plain, sharded = _pair(front, "plain", Looking)
    for model in (plain, sharded, plain, sharded):
        model(_data()).square().mean().backward()
    _compare(plain, sharded)


class Recurrent(nn.Module):
    def __init__(self, _: str) -> None:
        super().__init__()
        self.b0 = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.b1 = nn.GRU(12, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.b1(self.b0(x[None])[0])[0]


class Attending(nn.Module):
    def __init__(self, _: str) -> None:
        super().__init__()
        self.b0 = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.b1 = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inward = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b0(self.inward(x)[None])
        return self.b1(h, h, h, need_weights=False)[0]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("model", [Recurrent, Attending])
def test_torchs_own_layers_with_fast_paths(front: str, model: type[nn.Module], rank: int) -> None:
    plain, sharded = _pair(front, "plain", model)
    for step in range(2):
        for one in (plain, sharded):
            one.train()
            one(_data(step)).square().mean().backward()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                expected = plain.eval()(_data(7))
                torch.testing.assert_close(sharded.eval()(_data(7)), expected, rtol=1e-6, atol=1e-6)
    _compare(plain, sharded, bitwise=False)  # attention's kernels ask how memory is aligned
