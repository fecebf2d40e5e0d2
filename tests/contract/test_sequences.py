"""C22, U36: any sequence of what users do to a model gives what it gives to an unsharded one.

Every rank draws the same sequence from the same seed. The oracle sees the data of all ranks.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import checkpoint
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, full_parameters, shard, units, unsynced
from tests.bed.parity import assert_same_tensors

SHORT, LONG = 6, 10  # actions: in the suite, under ``make fuzz``
BLOCK = 56  # sequences in one test of the suite: three blocks of three front ends are 500


class Net(nn.Module):
    """A part that is often frozen, one that some forwards skip, tied names, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.inward = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.outward = nn.Linear(12, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, used: int = 2, fail: str = "") -> Tensor:
        x = self.inward(x)
        for number, block in enumerate(self.blocks[:used]):
            if fail == f"forward {number}":
                raise Failure(fail)
            x = x + block(x)
        if fail == "backward":
            x.register_hook(_fail)
        return self.outward(x) * self.scale


class Failure(Exception):
    """On purpose."""


def _fail(_: Tensor) -> Tensor:
    raise Failure("backward")


class Pair:
    """The sharded model and its oracle; each method is one thing that users do, done to both."""

    net: type[nn.Module] = Net
    rtol, dtype = 1e-4, torch.float32
    inward = ("inward",)  #: the modules that have its weight

    def __init__(self, front: str, place: tuple[int, int], folder: Path, dice: random.Random) -> None:
        self.front, (self.rank, self.world), self.folder = front, place, folder
        self.plain: Any = self.net()
        net = self.net()
        self.names = [name for name, _ in net.named_parameters()]
        self.model: Any = self.make(net, dice)
        self.step = 0
        self._optimizers()

    def make(self, net: Any, dice: random.Random) -> Any:
        """The sharded model."""
        return shard(net, self.front, [*net.blocks], "FULL_SHARD")

    def _optimizers(self) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
                           for model in (self.plain, self.model)]

    def _data(self, rank: int) -> Tensor:
        return torch.randn(3, 5, dtype=self.dtype, generator=torch.Generator().manual_seed(100 * self.step + rank))

    def train(self, dice: random.Random) -> None:
        """Forwards, one backward, step; or unsent first."""
        for sent in ([False, True] if dice.random() < 0.4 else [True]):
            self.step += 1
            used = dice.choice([0, 1, 2, 2])
            with unsynced(self.model, self.front, not sent):
                self.model(self._data(self.rank), used).square().sum().backward()
            total = sum(self.plain(self._data(rank), used).square().sum() for rank in range(self.world))
            (total / self.world).backward()
        self._check_gradients()
        if dice.random() < 0.5:
            for model in (self.plain, self.model):
                shardwise.clip_grad_norm(model.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad(dice)

    def _check_gradients(self) -> None:
        ours: dict[str, Tensor | None] = full_gradients(self.model, self.names)
        theirs = {name: p.grad for name, p in self.plain.named_parameters()}
        if self.front == "flat":
            ours = {n: g for n, g in ours.items() if theirs[n] is not None or (g is not None and g.any())}
            theirs = {n: g for n, g in theirs.items() if g is not None}
        assert_same_tensors(ours, theirs, "gradient", rtol=self.rtol, atol=1e-5)

    def zero_grad(self, dice: random.Random) -> None:
        """Forget what was added up."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def evaluate(self, dice: random.Random) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            ours, theirs = (model(self._data(self.rank)) for model in (self.model, self.plain))
        torch.testing.assert_close(ours, theirs, rtol=self.rtol, atol=1e-5)

    def left_over(self, dice: random.Random) -> None:
        """A forward whose backward never comes."""
        self.model(self._data(self.rank))

    def fail(self, dice: random.Random) -> None:
        """An exception on every rank."""
        where = dice.choice(["forward 0", "forward 1", "backward"])
        with pytest.raises(Failure):
            self.model(self._data(self.rank), 2, where).sum().backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the last backward did not finish")
            self.evaluate(dice)
        self.zero_grad(dice)

    def summon(self, dice: random.Random) -> None:
        """Whole parameters are looked at and edited."""
        factor = dice.choice([0.5, 1.0, 1.25])
        with shardwise.summon_full_params(self.model), torch.no_grad():
            for model in (self.model, self.plain):
                for name in self.names:
                    _at(model, name).mul_(factor)

    def freeze(self, dice: random.Random) -> None:
        """Or thaw one block; in flat mode the whole of a flat parameter follows."""
        if self.front != "flat":
            number, on = dice.randrange(2), dice.random() < 0.5
            for model in (self.model, self.plain):
                for parameter in model.blocks[number].parameters():
                    parameter.requires_grad_(on)

    def replace(self, dice: random.Random) -> None:
        """New values under ``.data``, or a new parameter object."""
        if self.front == "flat":
            return
        value = torch.randn(12, 5, dtype=self.dtype, generator=torch.Generator().manual_seed(dice.randrange(99)))
        anew = dice.random() < 0.5
        for model in (self.model, self.plain):
            if anew:
                found = nn.Parameter(value.clone())
                for name in self.inward:
                    model.get_submodule(name).weight = found
            else:
                model.inward.weight.data = value.clone()
        self.evaluate(dice)  # taken over
        if anew:
            self._optimizers()

    def state_dict(self, dice: random.Random) -> None:
        """There and back."""
        self.model.load_state_dict(self.model.state_dict())

    def save_and_load(self, dice: random.Random) -> None:
        """A checkpoint is written, the model spoilt, the checkpoint read."""
        path = self.folder / f"saved-{self.step}-{dice.randrange(10**9)}"
        checkpoint.save(path, self.model, self.optimizers[1])
        with shardwise.summon_full_params(self.model), torch.no_grad():
            for name in self.names:
                _at(self.model, name).zero_()
        checkpoint.load(path, self.model, self.optimizers[1])

    def check(self, what: str) -> None:
        """The same parameters; nothing in use."""
        assert_same_tensors(full_parameters(self.model, self.names), dict(self.plain.named_parameters()),
                            f"parameter after {what}", rtol=self.rtol, atol=1e-5)
        for name, unit in units(self.model).items():
            assert unit.uses == 0 and not unit.face.in_use, f"{name} after {what}"


    @classmethod
    def run(cls, front: str, seed: int, place: tuple[int, int], folder: Path, length: int,
            actions: Sequence[Callable[[Any, random.Random], None]]) -> None:
        """One sequence; its seed and its actions are in the error."""
        dice, done = random.Random(seed), []
        pair = cls(front, place, folder, dice)
        try:
            for _ in range(length):
                action = dice.choice(actions)
                done.append(action.__name__)
                action(pair, dice)
            pair.train(dice)
            pair.check("the end")
        except BaseException as error:
            error.add_note(f"front {front!r}, seed {seed}: {', '.join(done)}")
            raise


def _at(model: Any, name: str) -> Tensor:
    path, _, local = name.rpartition(".")
    return getattr(model.get_submodule(path), local)


_OFTEN = [Pair.evaluate, Pair.left_over, Pair.fail, Pair.summon, Pair.freeze, Pair.replace]
ACTIONS: list[Callable[[Pair, random.Random], None]] = [
    *_OFTEN, *_OFTEN, Pair.train, Pair.train, Pair.train, Pair.state_dict, Pair.save_and_load, Pair.zero_grad,
]


def _run_all(front: str, seeds: range, place: tuple[int, int], folder: Path, length: int = SHORT) -> None:
    for seed in seeds:
        Pair.run(front, seed, place, folder, length, ACTIONS)
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("front", FRONTS)
def test_C22_sequences(front: str, block: int, rank: int, world: int, tmp_path: Path) -> None:
    _run_all(front, range(block * BLOCK, (block + 1) * BLOCK), (rank, world), tmp_path)


@ranks(3)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_sequences_on_three_ranks(front: str, rank: int, world: int, tmp_path: Path) -> None:
    _run_all(front, range(1000, 1020), (rank, world), tmp_path)


@pytest.mark.fuzz
@ranks(2, 3, timeout=1800)
@pytest.mark.parametrize("front", FRONTS)
def test_C22_many_sequences(front: str, rank: int, world: int, sequences: int, tmp_path: Path) -> None:
    _run_all(front, range(2000, 2000 + sequences), (rank, world), tmp_path, LONG)
