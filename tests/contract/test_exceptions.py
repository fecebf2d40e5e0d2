"""C22: after an exception anywhere the next step works, and nothing stays gathered.

A failure is put into every function through which the engine is entered, and into forward and
backward of every unit; in each case the step after it gives the plain module's gradients.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.model_tensors import model_tensors
from shardwise.engine.collect import Collector
from shardwise.engine.gather import Gather
from shardwise.engine.reduce import Reducer
from shardwise.engine.session import Session
from shardwise.engine.unit import Unit
from tests.bed import ranks
from tests.bed.bomb import bomb
from tests.bed.fronts import FRONTS, full_gradients, shard, units
from tests.bed.parity import assert_same_tensors


class Failure(Exception):
    """On purpose."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.b0 = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.b1 = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b1(self.b0(self.inward(x))))


def _data(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _pair(front: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    plain = Net()
    twin = copy.deepcopy(plain)
    return plain, shard(twin, front, [twin.b0, twin.b1], "FULL_SHARD")


def _step(model: nn.Module, step: int) -> None:
    model(_data(step)).square().mean().backward()


def _fails_then_works(plain: nn.Module, model: Any, trouble: Any,
                      expected: type[BaseException] = Failure, where: str = "") -> None:
    """A step under ``trouble`` fails; the next one is right, and nothing of the first one is left."""
    with trouble, pytest.raises(expected):
        _step(model, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the last backward did not finish")
        with torch.no_grad():
            model(_data(2))
    for name, unit in units(model).items():
        assert (unit.gather.nbytes, unit.uses, unit.collector.nbytes) == (0, 0, 0), f"{name} after {where}"
        assert not unit.face.in_use, f"{name} after {where}"
    model.zero_grad()
    plain.zero_grad()
    for step in (3, 4):
        _step(plain, step)
        _step(model, step)
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_gradients(model, names), {n: p.grad for n, p in plain.named_parameters()},
                        "gradient", bitwise=True)
    model.zero_grad()
    plain.zero_grad()


@contextmanager
def _failing(owner: type, method: str, call: int) -> Iterator[None]:
    """The ``call``-th call of ``owner.method`` fails, after it has done its work if that is odd."""
    original: Callable[..., Any] = getattr(owner, method)
    count = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = original(*args, **kwargs) if count < call or call % 2 else None
        if count == call:
            raise Failure(f"in call {call} of {method}")
        return result

    with patch.object(owner, method, failing):
        yield


PLACES = [
    (Session, "enter_forward", 1), (Session, "enter_forward", 2), (Session, "enter_forward", 3),
    (Unit, "untouched", 2), (Unit, "unshard", 2), (Unit, "unshard", 3), (Unit, "wait", 2),
    (Unit, "wait", 3),
    (Gather, "start", 1), (Gather, "start", 4), (Gather, "finish", 2), (Gather, "finish", 4),
    (Session, "enter_backward", 1), (Session, "enter_backward", 2), (Session, "enter_backward", 3),
    (Session, "leave_backward", 1), (Session, "leave_backward", 2),
    (Collector, "open", 1), (Collector, "open", 2), (Reducer, "start", 1), (Reducer, "start", 2),
    (Reducer, "finish", 1), (Reducer, "finish", 2), (Unit, "finish_reduce", 2),
]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_a_failure_in_the_engine(front: str, rank: int) -> None:
    plain, model = _pair(front)
    _step(model, 0)
    model.zero_grad()
    for owner, method, call in PLACES:
        _fails_then_works(plain, model, _failing(owner, method, call), where=f"call {call} of {method}")


@contextmanager
def _hooked(register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> Iterator[None]:
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def _trap(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return bomb(output, Failure("in backward"))


def _raise(*_: Any) -> None:
    raise Failure("in a hook")


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_a_failure_in_forward_or_backward_of_any_unit(front: str, rank: int) -> None:
    plain, model = _pair(front)
    _step(model, 0)
    model.zero_grad()
    net = getattr(model, "module", model)
    for module in (net, net.inward, net.b0, net.b0[0], net.b1, net.b1[1], net.head):
        _fails_then_works(plain, model, _hooked(module.register_forward_pre_hook, _raise))
        _fails_then_works(plain, model, _hooked(module.register_forward_pre_hook, _raise, prepend=True))
        _fails_then_works(plain, model, _hooked(module.register_forward_hook, _raise))
        _fails_then_works(plain, model, _hooked(module.register_forward_hook, _trap))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_an_interrupt_runs_no_hooks(front: str, rank: int) -> None:
    """A KeyboardInterrupt unwinds forwards silently; the next call of the root finds out."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    plain, model = _pair(front)
    net = getattr(model, "module", model)
    for module in (net.inward, net.b0, net.b1[0], net.head):
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            _fails_then_works(plain, model, _hooked(register, interrupt), KeyboardInterrupt)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_what_follows_an_interrupt(front: str, rank: int) -> None:
    """Whoever catches one saves the model first: it is at rest, and a forward that runs is left alone."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    _, model = _pair(front)
    net = getattr(model, "module", model)
    own, state = list(model.parameters()), {}

    def interrupted(call: Callable[[], Any]) -> None:
        with _hooked(net.b0.register_forward_pre_hook, interrupt), pytest.raises(KeyboardInterrupt):
            model(_data(1))
        call()
        assert all(not unit.face.in_use for unit in units(model).values())

    def summon() -> None:
        with shardwise.summon_full_params(model):
            pass

    interrupted(lambda: state.update(model.state_dict()))
    interrupted(lambda: model.load_state_dict(state))
    interrupted(summon)
    interrupted(lambda: copy.deepcopy(model))
    interrupted(lambda: model_tensors(model))
    seen: list[bool] = []
    interrupted(lambda: seen.extend(a is b for a, b in zip(own, model.parameters(), strict=True)))
    assert all(seen)

    def look(*_: Any) -> None:
        list(model.parameters())
        seen.append(all(unit.face.in_use for unit in units(model).values() if not unit.fqn))

    seen.clear()
    with _hooked(net.b0.register_forward_pre_hook, look):
        model(_data(1)).sum().backward()
    assert seen == [True]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_a_failed_backward_is_declared(front: str, rank: int) -> None:
    """The gradients of a step that failed are void, and a RuntimeWarning says so, once."""
    _, model = _pair(front)
    net = getattr(model, "module", model)
    with _hooked(net.b0.register_forward_hook, _trap), pytest.raises(Failure):
        _step(model, 0)
    with pytest.warns(RuntimeWarning, match=r"the last backward did not finish.*zero_grad\(\)") as caught:
        _step(model, 1)
    assert len(caught) == 1


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_parameters_are_the_users_after_a_failed_backward(front: str, rank: int) -> None:
    """``zero_grad`` and the like right after the failure see the user's objects, not what was in use."""
    _, model = _pair(front)
    mine = {id(p) for p in model.parameters()}
    net = getattr(model, "module", model)
    with _hooked(net.b0.register_forward_hook, _trap), pytest.raises(Failure):
        _step(model, 0)
    with pytest.warns(RuntimeWarning, match="did not finish"):
        assert {id(p) for p in model.parameters()} == mine
    assert all(unit.gather.nbytes == 0 for unit in units(model).values())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_unsent_gradients_of_a_failed_step_are_dropped(front: str, rank: int) -> None:
    plain, model = _pair(front)
    for unit in units(model).values():
        unit.settings.sync_gradients = False
    _step(model, 0)
    net = getattr(model, "module", model)
    with _hooked(net.b0.register_forward_hook, _trap), pytest.raises(Failure):
        _step(model, 1)
    for unit in units(model).values():
        unit.settings.sync_gradients = True
    with pytest.warns(RuntimeWarning, match="did not finish"):
        _step(model, 2)
    _step(plain, 2)
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_gradients(model, names), {n: p.grad for n, p in plain.named_parameters()},
                        "gradient", bitwise=True)
