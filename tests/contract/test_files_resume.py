"""A run that stops and goes on is the run that did not stop; a save in the background is the save."""

from __future__ import annotations

import copy
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise import MixedPrecision, MixedPrecisionPolicy, checkpoint
from shardwise.errors import CheckpointError, ConfigurationError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, odd, train, values
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, points
from tests.bed.parity import assert_same_tensors


class Noisy(TinyMLP):
    """Dropout, so that random states matter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


class Factored(torch.optim.Optimizer):
    """Scales by row and column means, counts in plain numbers, and keeps nothing for vectors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.as_subclass(Tensor)
            if parameter.dim() > 1:
                state = self.state[parameter]
                state["count"], state["nothing"] = state.get("count", 0) + 1, None
                for key, dim in (("rows", 0), ("columns", -1)):
                    state[key] = 0.9 * state.get(key, 0.0) + gradient.abs().mean(dim)
                gradient = gradient / (1 + state["rows"].sum() + state["columns"].sum() * state["count"])
            parameter.sub_(gradient, alpha=0.1)


def steps(model: nn.Module, optimizer: Any, scheduler: Any, rank: int, which: range) -> list[float]:
    losses = []
    for step in which:
        x, y = points(rank, step)
        x = x + random.random() * torch.rand(()) * np.random.rand()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_resumed_run_is_bit_equal(front: str, low: bool, rank: int, tmp_path: Path) -> None:
    """U78, C25: parameters, optimizer, scheduler, random states of each rank, sampler position."""
    arguments: dict[str, Any] = {}
    if low:
        arguments = ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if front == "fully_shard"
                     else {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)})

    def build(seed: int) -> tuple[nn.Module, Any, Any]:
        model = shard(Noisy(seed=seed), front, **arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    torch.manual_seed(10 + rank)
    random.seed(20 + rank)
    np.random.seed(30 + rank)
    model, optimizer, scheduler = build(0)
    steps(model, optimizer, scheduler, rank, range(3))
    extra = {"scheduler": scheduler.state_dict(), "position": (3, rank), "weights": torch.arange(5) + rank}
    checkpoint.save(tmp_path / "saved", model, optimizer, extra)
    expected = steps(model, optimizer, scheduler, rank, range(3, 7))
    other, second, scheduler = build(1)
    found = checkpoint.load(tmp_path / "saved", other, second)
    assert found["position"] == (3, rank)
    assert torch.equal(found["weights"], torch.arange(5) + rank)
    scheduler.load_state_dict(found["scheduler"])
    assert steps(other, second, scheduler, rank, range(3, 7)) == expected
    assert_same_tensors(other.named_parameters(), model.named_parameters(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Factored"])
def test_any_optimizer(kind: str, rank: int, tmp_path: Path) -> None:
    """U76, A27, C25: state shaped like the parameter, 0-d, of other shapes, or none; some left out."""
    make = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "Factored": Factored,
            "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1)}[kind]
    models = [odd("orig"), odd("orig", blank=True)]
    first, second = (make([p for p in m.parameters() if p.requires_grad and p.numel()]) for m in models)
    train(models[0], first, rank, range(2))
    checkpoint.save(tmp_path / "saved", models[0], first)
    checkpoint.load(tmp_path / "saved", models[1], second)
    for old, new in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        ours = {key: value for key, value in first.state[old].items() if isinstance(value, Tensor)}
        theirs = {key: value for key, value in second.state[new].items() if isinstance(value, Tensor)}
        if ours:
            assert_same_tensors(theirs, ours, bitwise=True)
    assert train(models[1], second, rank, range(2, 4)) == train(models[0], first, rank, range(2, 4))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_background_save_is_of_its_moment(front: str, rank: int, tmp_path: Path) -> None:
    """U78: training goes on and changes the weights; the files hold the moment of the call."""
    model = odd(front)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    checkpoint.save(tmp_path / "now", model, optimizer)
    checkpoint.save(tmp_path / "later", model, optimizer, wait=False)
    train(model, optimizer, rank, range(1, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.wait()
    for name in ("model", "optimizer"):
        ours, theirs = (load_file(tmp_path / folder / f"{name}.safetensors") for folder in ("later", "now"))
        assert_same_tensors(ours, theirs, bitwise=True)


@ranks(2)
def test_background_error_is_raised_at_the_next_call(rank: int, tmp_path: Path) -> None:
    """U78: by ``wait`` or by the next save, on every rank, once."""
    model, real = odd("orig"), os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    os.pwrite = full
    try:
        checkpoint.save(tmp_path / "saved", model, wait=False)
        with pytest.raises(CheckpointError, match=r"on rank 1: OSError: \[Errno 28\] No space left"):
            checkpoint.wait()
        checkpoint.wait()
        assert not (tmp_path / "saved").exists()
        checkpoint.save(tmp_path / "saved", model, wait=False)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(tmp_path / "other", model)
    finally:
        os.pwrite = real
    checkpoint.save(tmp_path / "saved", model)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["saved"]


def test_keep(tmp_path: Path) -> None:
    """The newest ``keep`` of the names that differ in their numbers only; nothing else is touched."""
    model = TinyMLP()
    for name in ("step-9", "step-10", "best", "other-1"):
        checkpoint.save(tmp_path / name, model)
    checkpoint.save(tmp_path / "step-2", model, keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["best", "other-1", "step-10", "step-2"]
    checkpoint.save(tmp_path / "step-10", model, keep=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["best", "other-1", "step-10"]
    with pytest.raises(ConfigurationError, match="a name like step-1000, got best"):
        checkpoint.save(tmp_path / "best", model, keep=2)
    with pytest.raises(ConfigurationError, match="keep must leave"):
        checkpoint.save(tmp_path / "step-1", model, keep=0)


def test_extra_values_come_back_with_their_types(tmp_path: Path) -> None:
    """What schedulers, scalers and samplers put into their state dicts."""
    from collections import Counter, OrderedDict

    extra = {
        "plain": [1, 2.5, None, True, "text", float("inf"), -0.0], "pair": (1, (2, 3)), "set": {1, 2},
        "milestones": Counter({2: 1, 30: 2}), "ordered": OrderedDict(b=1, a=2), 5: {"$dict": 1},
        "bytes": b"\x00\xff", "dtype": torch.bfloat16, "device": torch.device("cpu"), "complex": 1 + 2j,
        "array": np.arange(6).reshape(2, 3), "number": np.float32(1 / 3),
        "tensor": torch.rand(2, 3, dtype=torch.float64), "scalar": torch.tensor(7), "nan": float("nan"),
    }
    model = TinyMLP()
    checkpoint.save(tmp_path / "saved", model, extra=copy.deepcopy(extra))
    found = checkpoint.load(tmp_path / "saved", model)
    for key in ("array", "number"):
        assert np.array_equal(found[key], extra[key]) and found[key].dtype == extra[key].dtype
    for key in ("tensor", "scalar"):
        assert torch.equal(found[key], extra[key]) and found[key].dtype == extra[key].dtype
    assert np.isnan(found["nan"])
    for key in extra.keys() - {"array", "number", "tensor", "scalar", "nan"}:
        assert found[key] == extra[key] and type(found[key]) is type(extra[key]), key
    with pytest.raises(CheckpointError, match=r"cannot be saved \(parameter 'extra.hook'\).*got function"):
        checkpoint.save(tmp_path / "saved", model, extra={"hook": test_keep})
    assert torch.equal(checkpoint.load(tmp_path / "saved", model)["tensor"], extra["tensor"])


@ranks(2)
def test_values_do_not_need_the_optimizer(rank: int, tmp_path: Path) -> None:
    """Random states stay as they are when only weights are loaded."""
    model = odd("orig")
    checkpoint.save(tmp_path / "saved", model)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    checkpoint.load(tmp_path / "saved", model)
    assert torch.equal(torch.rand(2), expected)
    assert values(model)
