"""C2, U4: an optimizer made before a model was wrapped with flat parameters trains the originals behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import FullyShardedDataParallel, ShardedGradScaler
from shardwise.checkpoint import StateDictOptions, get_optimizer_state_dict
from tests.bed import ranks
from tests.bed.fronts import full_parameters, shard, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_parameters, assert_same_tensors

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for biases, another rate for some of them."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": vectors[:2], "weight_decay": 0.0, "lr": 3e-2},
            {"params": vectors[2:], "weight_decay": 0.0}]


MAKE: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(_groups(model), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(_groups(model), lr=1e-2),
}


class Runs:
    """The unsharded run on all ranks' data, and the flat one whose optimizer was made first."""

    def __init__(self, make: Make, rank: int, world: int, strategy: str = "DEFAULT") -> None:
        self.rank, self.world = rank, world
        self.plain, twin = TinyMLP(), TinyMLP()
        self.optimizers = make(self.plain), make(twin)
        self.model = shard(twin, "flat", [twin.middle], strategy)

    def backward(self, step: int) -> None:
        for one in range(self.world):
            (loss(self.plain, points(one, step)) / self.world).backward()
        loss(self.model, points(self.rank, step)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def check(self) -> None:
        names = [name for name, _ in self.plain.named_parameters()]
        assert_same_parameters(full_parameters(self.model, names), self.plain.named_parameters())


@ranks(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_C2_it_trains(name: str, set_to_none: bool, strategy: str, rank: int, world: int) -> None:
    runs = Runs(MAKE[name], rank, world, strategy)
    for step in range(4):
        runs.backward(step)
        runs.step()
        runs.zero(set_to_none=set_to_none)
    runs.check()


@ranks(2)
def test_C2_gradients_add_up_until_they_are_zeroed(rank: int, world: int) -> None:
    """Several backwards to a step, with and without communication, and a step that is not followed by zero_grad."""
    runs = Runs(MAKE["sgd"], rank, world)
    for step in range(3):
        runs.backward(10 * step)
        runs.backward(10 * step + 1)
        runs.step()
        if step != 1:
            runs.zero()
    for step in (40, 41):
        for one in range(world):
            (loss(runs.plain, points(one, step)) / world).backward()
        with unsynced(runs.model, "flat", quiet=step == 40):
            loss(runs.model, points(rank, step)).backward()
    runs.step()
    runs.check()


@ranks(2)
def test_C2_zeroing_one_of_two_optimizers(rank: int, world: int) -> None:
    """Each zeroes its own parameters alone, though they share one flat gradient."""
    plain, twin = TinyMLP(), TinyMLP()
    pairs = []
    for model in (plain, twin):
        half = list(model.parameters())
        pairs.append((torch.optim.SGD(half[::2], lr=0.1), torch.optim.SGD(half[1::2], lr=0.1)))
    sharded = shard(twin, "flat", [twin.middle])
    for step in range(4):
        for one in range(world):
            (loss(plain, points(one, step)) / world).backward()
        loss(sharded, points(rank, step)).backward()
        for first, second in pairs:
            first.step()
            second.step()
            first.zero_grad()
            if step % 2:
                second.zero_grad()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_parameters(full_parameters(sharded, names), plain.named_parameters())


@ranks(2)
def test_C2_a_step_after_zero_grad_changes_nothing(rank: int, world: int) -> None:
    runs = Runs(MAKE["sgd"], rank, world)
    for zero in (runs.zero, lambda: (runs.model.zero_grad(), runs.plain.zero_grad())):
        runs.backward(0)
        runs.step()
        zero()
        runs.step()
    runs.check()


@ranks(2)
def test_C2_norms_are_clipped(rank: int, world: int) -> None:
    """Over the model's parameters and, from the first step on, over those that the optimizer holds."""
    runs = Runs(MAKE["sgd"], rank, world)
    for step in range(3):
        runs.backward(step)
        parameters = list(runs.model.parameters())
        if step:
            parameters = [p for group in runs.optimizers[1].param_groups for p in group["params"]]
        expected = nn.utils.clip_grad_norm_(runs.plain.parameters(), 0.1)
        assert torch.allclose(nn.utils.clip_grad_norm_(parameters, 0.1), expected)
        runs.step()
        runs.zero()
    runs.check()


@ranks(2)
def test_C2_a_summon_keeps_the_gradients(rank: int, world: int) -> None:
    runs = Runs(MAKE["sgd"], rank, world)
    for step in range(3):
        runs.backward(2 * step)
        for with_grads in (False, True):
            with FullyShardedDataParallel.summon_full_params(runs.model, with_grads=with_grads):
                pass
        runs.backward(2 * step + 1)
        runs.step()
        runs.zero()
    runs.check()


@ranks(2)
def test_C2_state_from_before_wrapping_goes_on(rank: int, world: int) -> None:
    """It stepped unsharded; its state becomes rows when it steps next. Its checkpoints are by name."""
    plain, twin = TinyMLP(), TinyMLP()
    optimizers = MAKE["adamw"](plain), MAKE["adamw"](twin)
    for model, optimizer in zip((plain, twin), optimizers, strict=True):
        for one in range(world):
            (loss(model, points(one, 0)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = shard(twin, "flat", [twin.middle])
    for step in (1, 2):
        for one in range(world):
            (loss(plain, points(one, step)) / world).backward()
        loss(sharded, points(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_parameters(full_parameters(sharded, names), plain.named_parameters())
    found = get_optimizer_state_dict(sharded, optimizers[1], options=StateDictOptions(full_state_dict=True))["state"]
    for name, parameter in plain.named_parameters():
        assert_same_tensors(found[name], optimizers[0].state[parameter], name)


@ranks(2)
def test_U66_optimizer_in_backward_made_before_wrapping(rank: int, world: int) -> None:
    """One optimizer for each parameter, which steps and zeroes in the parameter's hook."""
    plain, twin = TinyMLP(), TinyMLP()
    for p in twin.parameters():
        own = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad()))
    sharded = shard(twin, "flat", [twin.middle])
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for one in range(world):
            (loss(plain, points(one, step)) / world).backward()
        reference.step()
        reference.zero_grad()
        loss(sharded, points(rank, step)).backward()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_parameters(full_parameters(sharded, names), plain.named_parameters())


@ranks(2)
@pytest.mark.parametrize("make", MAKE)
def test_U62_a_scaler_at_the_first_step(rank: int, world: int, make: str) -> None:
    """The gradients that the optimizer sees only now are unscaled, and an infinity skips the step."""
    runs, scaler = Runs(MAKE[make], rank, world), ShardedGradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        runs.backward(step)
        runs.model.zero_grad()
        scaler.scale(loss(runs.model, points(rank, step))).backward()
        scaler.step(runs.optimizers[1])
        scaler.update()
        runs.optimizers[0].step()
        runs.check()
        runs.zero()
    scaler.scale(loss(runs.model, points(rank, 7)) * (math.inf if rank else 1.0)).backward()
    scaler.step(runs.optimizers[1])
    runs.check()
