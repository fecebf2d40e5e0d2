"""Parameters of every kind in one unit (rows C3, C4, C17, U11-U14, U19, U20, U23, A11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, units
from tests.bed.models import TinyMLP, points
from tests.bed.training import Twins

VISIBLE = ("orig", "fully_shard")


def _rows(rank: int, step: int, width: int = 5) -> Tensor:
    return points(rank, step)[0][:, :width]


# ---------------------------------------------------------------------- ties
class TiedInside(nn.Module):
    """One weight under two names of one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedAcross(nn.Module):
    """One weight in two units; each also has its own parameters. Forwards run in either order."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.right.weight = self.left.weight
        self.last = nn.Linear(5, 3)
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        one, two = (self.right, self.left) if self.backwards else (self.left, self.right)
        return self.last(two(torch.tanh(one(x))))


class SharedModule(nn.Module):
    """One module object below two units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(5)
        self.a = nn.Sequential(nn.Linear(5, 5), self.norm)
        self.b = nn.Sequential(nn.Linear(5, 5), self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(torch.tanh(self.norm(self.a(x)))))


def _run(model: Any, rank: int, step: int) -> Tensor:
    return model(_rows(rank, step)).square().mean()


TIES: dict[str, tuple[Any, Any]] = {
    "inside": (TiedInside, lambda m: []),
    "across": (TiedAcross, lambda m: [m.left, m.right]),
    "across_backwards": (lambda: TiedAcross(backwards=True), lambda m: [m.left, m.right]),
    "with_the_root": (TiedAcross, lambda m: [m.left]),
    "shared_module": (SharedModule, lambda m: [m.a, m.b]),
    "shared_module_as_unit": (SharedModule, lambda m: [m.norm, m.a, m.b]),
}


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("tie", TIES)
def test_C3_U11_U12_tied_weights(front: str, tie: str, rank: int, world: int) -> None:
    """One shard, gradients summed once, still one object under both names."""
    build, inner = TIES[tie]
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        twins = Twins(build, front, (rank, world), inner=inner, run=_run, strategy=strategy)
        twins.train(3)
        owned = [id(p) for unit in units(twins.model).values() for s in unit.storages for p in s.parameters]
        assert len(owned) == len(set(owned)) == len(twins.names)
    if tie == "across":
        assert twins.model.left.weight is twins.model.right.weight


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C3_a_borrower_alone(front: str, rank: int, world: int) -> None:
    """The unit that borrows the weight runs without its owner."""
    def right_only(model: Any, rank: int, step: int) -> Tensor:
        return model.right(_rows(rank, step)).square().mean()

    twins = Twins(TiedAcross, front, (rank, world), inner=lambda m: [m.left, m.right], run=_run)
    twins.train(1)
    twins.run = right_only
    twins.backward(1)
    twins.check_gradients()


# ---------------------------------------------------------------------- dtypes and frozen parts
class Complex(nn.Module):
    """Complex parameters beside real ones, as spectral layers have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.spectrum = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.real = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.spectrum.mT + self.phase).abs() + self.real(x)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C4_complex_parameters_train(front: str, rank: int, world: int) -> None:
    """Both parts of a complex gradient are averaged, and count in its norm."""
    twins = Twins(Complex, front, (rank, world), run=_run)
    twins.train(2)
    twins.backward(3)
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1e-2) for model in (twins.plain, twins.model)]
    torch.testing.assert_close(*norms)
    twins.check_gradients()


class Mixed(nn.Module):
    """Two dtypes and frozen parts in one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 3).double()
        self.c = nn.Linear(3, 3).double().requires_grad_(False)
        self.d = nn.Linear(3, 2).requires_grad_(False)
        self.e = nn.Linear(2, 2)
        self.late = nn.Parameter(torch.rand(3, 2, dtype=torch.float64))

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        x = self.c(self.b(torch.tanh(self.a(x)).double()))
        if late:
            x = x + self.late.sum()
        return self.e(self.d(x.float()))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C4_U13_U14_several_kinds_in_one_unit(front: str, rank: int, world: int) -> None:
    """Also a parameter whose first gradient comes in the second micro-batch."""
    twins = Twins(Mixed, front, (rank, world), run=_run)
    assert len(units(twins.model)[""].storages) == 4
    twins.train(2)
    twins.backward(3)
    twins.run = lambda model, rank, step: model(_rows(rank, step), late=True).square().mean()
    twins.backward(4)
    twins.check_gradients()
    twins.update()
    twins.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A41_frozen_and_thawed_later(front: str, rank: int, world: int) -> None:
    """``requires_grad`` of the user's objects is followed, between any two steps."""
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda m: [m.middle])
    twins.train(1)
    for frozen in (("middle",), ("inward", "outward"), ("inward", "middle"), ()):
        for model in (twins.plain, twins.model):
            for name, p in model.named_parameters():
                p.requires_grad_(name.partition(".")[0] not in frozen)
        twins.train(2)
        assert all((p.grad is None) for p in twins.model.parameters())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("units_of_blocks", [False, True])
def test_every_way_of_freezing(front: str, units_of_blocks: bool, rank: int, world: int) -> None:
    """Each of the eight subsets of three layers, as one unit and as four."""
    for frozen in range(7):
        def build(frozen: int = frozen) -> nn.Module:
            model = TinyMLP()
            for bit, layer in enumerate((model.inward, model.middle, model.outward)):
                layer.requires_grad_(not frozen >> bit & 1)
            return model

        inner = (lambda m: [m.inward, m.middle, m.outward]) if units_of_blocks else (lambda m: [])
        Twins(build, front, (rank, world), inner=inner).train(2)


# ---------------------------------------------------------------------- layouts
class Shapes(nn.Module):
    """Fewer rows than ranks, nothing at all, no dimension, a strided and a channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.rand(1))
        self.row = nn.Parameter(torch.rand(1, 5))
        self.tall = nn.Parameter(torch.rand(11, 1))
        self.none = nn.Parameter(torch.rand(0, 4))
        self.turned = nn.Parameter(torch.rand(5, 3).t())
        self.image = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.table = nn.Parameter(torch.randint(9, (5,)), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.strides: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.strides = [self.image.weight.stride()]
        x = x * self.scalar + self.one + self.row + self.none.sum() + self.tall.mean()
        x = x * self.table.remainder(3) + self.flags.sum()
        y = self.image(x.reshape(-1, 1, 5, 1).expand(-1, 3, 5, 5))
        return self.turned.mul(2).matmul(x.t()).sum() + y.square().mean()


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_C17_U19_U20_U21_U23_any_shape_and_memory(front: str, rank: int, world: int) -> None:
    """All train, and a channels-last parameter is channels-last in use."""
    twins = Twins(Shapes, front, (rank, world), run=lambda model, r, s: model(_rows(r, s)) / 100)
    twins.train(2)
    inside = twins.model.module if front != "fully_shard" else twins.model
    assert inside.strides == twins.plain.strides == [(27, 1, 9, 3)]


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_C17_empty_shards(front: str, strategy: str, rank: int, world: int) -> None:
    """Three numbers on four ranks: some hold nothing, and nothing else is different for them."""
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.inner = nn.Linear(1, 1)
            self.gain = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gain

    twins = Twins(Few, front, (rank, world), inner=lambda m: [m.inner], strategy=strategy,
                  run=lambda model, r, s: model(_rows(r, s, 1)).square().mean())
    twins.train(3)
    held = torch.tensor(sum(p.numel() == 0 for p in twins.model.parameters()) * (front != "flat"))
    torch.distributed.all_reduce(held)
    assert held == (0 if front == "flat" else 3 * (world - 1))
    norm = torch.nn.utils.get_total_norm([p for p in twins.model.parameters()])
    assert norm.dim() == 0


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_integer_parameters_keep_their_values(front: str, rank: int, world: int) -> None:
    twins = Twins(Shapes, front, (rank, world), run=lambda model, r, s: model(_rows(r, s)) / 100)
    values = full_parameters(twins.model, ["table", "flags"])
    assert torch.equal(values["table"], Shapes().table) and values["flags"].tolist() == [True, False, True]
    twins.train(1)
    again = full_parameters(twins.model, ["table", "flags"])
    assert torch.equal(again["table"], values["table"]) and again["flags"].dtype is torch.bool


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_unit_without_parameters(front: str, rank: int, world: int) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.Tanh()
            self.rest = TinyMLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.activation(x))

    Twins(Bare, front, (rank, world), inner=lambda m: [m.activation, m.rest]).train(2)
