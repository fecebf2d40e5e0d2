"""``torch.func`` and a sharded model: what does not replace parameters works, functional_call says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.distributed as dist
from torch import Tensor, func, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise
from shardwise.errors import LifecycleError, WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard, units
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch itself, at its first jvp


def _dual(model: nn.Module, x: Tensor) -> Any:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(model(forward_mode.make_dual(x, x))).tangent


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jacrev": lambda model, x: func.jacrev(model)(x),
    "jacfwd": lambda model, x: func.jacfwd(model)(x),
    "jvp": lambda model, x: func.jvp(model, (x,), (x,))[1],
    "vjp": lambda model, x: func.vjp(model, x)[1](torch.ones_like(model(x)))[0],
    "grad": lambda model, x: func.grad(lambda y: model(y).sum())(x),
    "vmap": lambda model, x: func.vmap(model)(x),
    "vmap in inference": lambda model, x: torch.no_grad()(lambda: func.vmap(model)(x))(),
    "per sample": lambda model, x: func.vmap(func.jacrev(model))(x),
    "hessian": lambda model, x: func.hessian(lambda y: model(y).square().sum())(x),
    "forward mode": _dual,
}


def _twins(front: str, place: tuple[int, int], run: Any = loss, strategy: str = "FULL_SHARD") -> Twins:
    def of_points(model: Any, rank: int, step: int) -> Tensor:
        return run(model, points(rank, step)[0])

    return Twins(TinyMLP, front, place, inner=lambda model: [model.middle], run=of_points, strategy=strategy)


@ranks(2)
@fronts
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_C16_transforms_over_inputs(rank: int, world: int, front: str, strategy: str) -> None:
    """The values of an unsharded model, and the next step is an ordinary one."""
    twins = _twins(front, (rank, world), lambda model, x: model(x).square().mean(), strategy)
    for step, (name, call) in enumerate(CALLS.items()):
        x = points(rank, step)[0]
        ours, theirs = call(twins.model, x), call(twins.plain, x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        twins.train(1, rtol=1e-4, atol=1e-6)
    assert all(unit.gather.nbytes == 0 and unit.uses == 0 for unit in units(twins.model).values())


TRAINED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vmap": lambda model, x: func.vmap(model)(x).square().mean(),
    "jvp": lambda model, x: func.jvp(model, (x,), (x,))[1].square().mean(),
    "penalty": lambda model, x: model(x).mean() + func.vmap(func.grad(lambda y: model(y).sum()))(x).square().mean(),
    "divergence": lambda model, x: func.vmap(func.jacrev(model))(x).square().sum(),
    "second derivatives": lambda model, x: func.vmap(func.hessian(lambda y: model(y).sum()))(x).square().sum(),
}


@ranks(2)
@fronts
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("name", TRAINED)
def test_C16_transforms_in_a_loss(rank: int, world: int, front: str, strategy: str, name: str) -> None:
    """Equations in derivatives: the parameters are trained by what the transform gives."""
    twins = _twins(front, (rank, world), TRAINED[name], strategy)
    twins.train(3, rtol=1e-4, atol=1e-6)
    assert all(unit.gather.nbytes == 0 and unit.uses == 0 for unit in units(twins.model).values())


def _model(front: str) -> Any:
    torch.manual_seed(3)
    return shard(TinyMLP(), front)


@ranks(2)
@fronts
@pytest.mark.parametrize("kind", ["tensors", "parameters", "gradients of its own"])
def test_C16_functional_call_with_other_parameters(rank: int, world: int, front: str, kind: str) -> None:
    """On every rank, before anything is sent; the next step is an ordinary one."""
    model, x = _model(front), points(rank, 0)[0]
    plain = dict(TinyMLP().named_parameters())
    given = {"tensors": {name: p.detach() for name, p in plain.items()}, "parameters": plain,
             "gradients of its own": dict(model.named_parameters())}[kind]
    before = full_parameters(model, list(plain))
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(LifecycleError) as refused:
            if kind == "gradients of its own":
                func.grad(lambda values: func.functional_call(model, values, (x,)).sum())(given)
            else:
                func.functional_call(model, given, (x,))
    for part in ("torch.func.functional_call with other parameters", "unit '(root)'", f"rank {rank}", "parameter '",
                 "expected the module's own parameters, got another", "copy.deepcopy(model) inside summon_full_params"):
        assert part in str(refused.value)
    model(x).sum().backward()
    after = full_parameters(model, list(plain))
    assert all(torch.equal(after[name], before[name]) for name in plain)
    dist.barrier()


@ranks(2)
@fronts
def test_C16_functional_call_that_works(rank: int, world: int, front: str) -> None:
    """With its own parameters or other buffers, and with anything on the unsharded copy that the error names."""
    model, x = _model(front), points(rank, 0)[0]
    own = dict(model.named_parameters())
    torch.testing.assert_close(func.functional_call(model, own, (x,)), model(x))
    with shardwise.summon_full_params(model):
        copied: Any = copy.deepcopy(model)
    values = {name: torch.zeros_like(p) for name, p in copied.named_parameters()}
    assert not func.functional_call(copied, values, (x,)).any()
    gradients = func.grad(lambda some: func.functional_call(copied, some, (x,)).sum())(dict(copied.named_parameters()))
    assert gradients.keys() == values.keys()


@ranks(2)
@fronts
def test_C16_functional_call_inside_a_summon(rank: int, world: int, front: str) -> None:
    model, x = _model(front), points(rank, 0)[0]
    values = {name: torch.zeros_like(p) for name, p in TinyMLP().named_parameters()}
    with (shardwise.summon_full_params(model), torch.no_grad(),
          pytest.raises(LifecycleError, match=r"torch\.func\.functional_call with other parameters")):
        func.functional_call(model, values, (x,))
    model(x).sum().backward()


@ranks(2)
@fronts
def test_C16_tracing_is_refused(rank: int, world: int, front: str) -> None:
    """Before anything is gathered: the graph would use memory that is freed."""
    model, x = _model(front), points(rank, 0)[0]
    for trace in (lambda: func.linearize(model, x), lambda: make_fx(model)(x)):
        with pytest.raises(LifecycleError, match=r"a sharded model cannot be traced \(make_fx, .*linearize") as refused:
            trace()
        for part in ("freed", "unit '", "copy.deepcopy(model) inside summon_full_params"):
            assert part in str(refused.value)
    model(x).sum().backward()


@ranks(2)
def test_U36_a_flat_parameter_replaced(rank: int, world: int) -> None:
    """It was not noticed before."""
    model, x = _model("flat"), points(rank, 0)[0]
    name, flat = next(iter(model.named_parameters()))
    model.module._parameters[name] = nn.Parameter(flat.detach().clone())
    with pytest.raises(WritebackError) as refused:
        model(x)
    for part in ("Cannot writeback: a flat parameter was replaced", f"parameter {name!r}", f"rank {rank}",
                 "expected the object that was registered there, got another Parameter", "Change it in place"):
        assert part in str(refused.value)
    model.module._parameters[name] = flat
    model(x).sum().backward()
    dist.barrier()
