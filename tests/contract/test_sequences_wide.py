"""C22: more kinds of actions in any order: ties over units, recomputation, two graphs, copies, other reshardings."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard, unsynced
from tests.contract.test_sequences import ACTIONS, BLOCK, SHORT, Failure, Net, Pair

LONG = 12


class WideNet(Net):
    """Two units share a weight, the root's has two names; blocks may be recomputed; a buffer scales."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.again = nn.Linear(5, 12)
        self.again.weight = self.inward.weight
        self.register_buffer("gain", torch.tensor(1.0))
        self.double()  # differences are faults, not rounding

    def forward(self, x: Tensor, used: int = 2, fail: str = "", recompute: str = "") -> Tensor:
        x = self.inward(x) + self.again(x).tanh()
        for number, block in enumerate(self.blocks[:used]):
            if fail == f"forward {number}":
                raise Failure(fail)
            x = x + (checkpoint(block, x, use_reentrant=recompute == "reentrant") if recompute else block(x))
        if fail == "backward":
            x.register_hook(_fail)
        return self.outward(x) * self.scale * self.gain


def _fail(_: Tensor) -> Tensor:
    raise Failure("backward")


class WidePair(Pair):
    """More of what users do. ``both(run)`` is one backward of ``run(model, inputs)`` on each side."""

    net = WideNet
    dtype = torch.float64
    inward = ("inward", "again")

    def make(self, net: nn.Module, dice: random.Random) -> Any:
        return shard(net, self.front, [*net.blocks], dice.choice(["FULL_SHARD", "SHARD_GRAD_OP", "DEFAULT"]))  # type: ignore[misc]

    def both(self, run: Callable[[Any, Tensor], Tensor], *, sent: bool = True) -> None:
        self.step += 1
        with unsynced(self.model, self.front, not sent):
            run(self.model, self._data(self.rank)).backward()
        total = sum(run(self.plain, self._data(rank)) for rank in range(self.world))
        (total / self.world).backward()  # type: ignore[union-attr]

    def end(self, dice: random.Random) -> None:
        """The gradients are the same; step."""
        self._check_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad(dice)

    def accumulate(self, dice: random.Random) -> None:
        """Several micro-batches, with something else between them."""
        for sent in [False] * dice.randrange(1, 4) + [True]:
            used = dice.choice([0, 1, 2, 2])
            self.both(lambda model, x, used=used: model(x, used).square().sum(), sent=sent)
            dice.choice([self.evaluate, self.look, self.left_over, self.state_dict, self.nothing])(dice)
        self.end(dice)

    def recompute(self, dice: random.Random) -> None:
        """Blocks run again in backward."""
        kind = dice.choice(["reentrant", "not"])
        self.both(lambda model, x: model(x.requires_grad_(), 2, "", kind).square().sum(), sent=True)
        self.end(dice)

    def two_graphs(self, dice: random.Random) -> None:
        """Two forwards, then one backward or two, in either order, with a look or an evaluation between."""
        between, apart = dice.choice([self.evaluate, self.look, self.nothing]), dice.random() < 0.5
        self.step += 1
        inputs = [self._data(self.rank), self._data(self.rank + 50)]
        losses = [self.model(x, used).square().sum() for x, used in zip(inputs, (2, 1), strict=True)]
        between(dice)
        for one in dice.sample(losses, 2) if apart else [sum(losses)]:
            one.backward()
        for rank in range(self.world):
            for x, used in zip([self._data(rank), self._data(rank + 50)], (2, 1), strict=True):
                (self.plain(x, used).square().sum() / self.world).backward()
        self.end(dice)

    def twice_through(self, dice: random.Random) -> None:
        """One graph, two backwards."""
        def run(model: Any, x: Tensor) -> Tensor:
            first = model(x).square().sum()
            first.backward(retain_graph=True)
            return first

        self.step += 1
        run(self.model, self._data(self.rank)).backward()
        for rank in range(self.world):
            loss = self.plain(self._data(rank)).square().sum() / self.world
            loss.backward(retain_graph=True)
            loss.backward()
        self.end(dice)

    def penalty(self, dice: random.Random) -> None:
        """The gradient at the input is trained, by autograd or by torch.func."""
        def by_autograd(model: Any, x: Tensor) -> Tensor:
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            return gradient.square().sum()

        def by_func(model: Any, x: Tensor) -> Tensor:
            return func.vmap(func.grad(lambda y: model(y).square().sum()))(x).square().sum()

        self.both(dice.choice([by_autograd, by_func]))
        self.end(dice)

    def jacobian(self, dice: random.Random) -> None:
        """Values only."""
        x = self._data(self.rank)
        ours, theirs = (func.jacrev(model)(x) for model in (self.model, self.plain))
        torch.testing.assert_close(ours, theirs, rtol=self.rtol, atol=1e-5)

    def look(self, dice: random.Random) -> None:
        """Whole parameters, not changed."""
        with shardwise.summon_full_params(self.model, writeback=dice.random() < 0.5):
            pass

    def nothing(self, dice: random.Random) -> None:
        """On purpose."""

    def copied(self, dice: random.Random) -> None:
        """The model is a copy of itself from now on."""
        self.model = copy.deepcopy(self.model)
        self._optimizers()

    def plainly_copied(self, dice: random.Random) -> None:
        """An unsharded copy computes the same."""
        with shardwise.summon_full_params(self.model):
            copied = copy.deepcopy(self.model)
        torch.testing.assert_close(copied(self._data(0)), self.plain(self._data(0)), rtol=self.rtol, atol=1e-5)

    def buffer(self, dice: random.Random) -> None:
        """Edited in place, or replaced."""
        value, anew = 0.5 + dice.random(), dice.random() < 0.5
        for model in (self.model, self.plain):
            if anew:
                model.gain = torch.tensor(value, dtype=self.dtype)
            else:
                model.gain.fill_(value)

    def reshard(self, dice: random.Random) -> None:
        """Another choice for what stays gathered, and gathering by hand."""
        if self.front == "fully_shard":
            self.model.set_reshard_after_forward(dice.random() < 0.5)
            self.model.set_reshard_after_backward(True)
            if dice.random() < 0.5:
                self.model.unshard()

    def zeroed(self, dice: random.Random) -> None:
        """Unsent gradients are forgotten, by the model's own zero_grad or the optimizer's."""
        self.both(lambda model, x: model(x).square().sum(), sent=False)
        noticed = bool(self.optimizers[1].state)  # at its first step
        for one in self.optimizers if noticed and dice.random() < 0.5 else (self.plain, self.model):
            one.zero_grad()

    def fail_unsent(self, dice: random.Random) -> None:
        """An exception while there are unsent gradients."""
        self.both(lambda model, x: model(x).square().sum(), sent=False)
        self.fail(dice)
        self.model.zero_grad()
        self.plain.zero_grad()

    def optimizer_state(self, dice: random.Random) -> None:
        """There and back."""
        self.optimizers[1].load_state_dict(self.optimizers[1].state_dict())

    def frozen_root(self, dice: random.Random) -> None:
        """A tied weight, trained or not from now on."""
        if self.front != "flat":
            on = dice.random() < 0.6
            for model in (self.model, self.plain):
                model.inward.weight.requires_grad_(on)


MORE: list[Callable[[Any, random.Random], None]] = [
    WidePair.accumulate, WidePair.accumulate, WidePair.recompute, WidePair.two_graphs, WidePair.two_graphs,
    WidePair.twice_through, WidePair.penalty, WidePair.jacobian, WidePair.look, WidePair.copied,
    WidePair.plainly_copied, WidePair.buffer, WidePair.reshard, WidePair.reshard, WidePair.zeroed,
    WidePair.fail_unsent, WidePair.optimizer_state, WidePair.frozen_root,
]


def _run_all(front: str, seeds: range, place: tuple[int, int], folder: Path, length: int = SHORT) -> None:
    for seed in seeds:
        WidePair.run(front, seed, place, folder, length, [*ACTIONS, *MORE])
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_wide_sequences(front: str, rank: int, world: int, tmp_path: Path) -> None:
    _run_all(front, range(3000, 3000 + BLOCK // 2), (rank, world), tmp_path)


@pytest.mark.fuzz
@ranks(2, 3, timeout=1800)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_many_wide_sequences(front: str, rank: int, world: int, sequences: int, tmp_path: Path) -> None:
    _run_all(front, range(4000, 4000 + sequences), (rank, world), tmp_path, LONG)
