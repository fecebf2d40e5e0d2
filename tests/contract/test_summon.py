"""summon_full_params: whole values on the user's own objects (rows A25, C11, U63)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import FullyShardedDataParallel, is_sharded, iter_units_full, summon_full_params
from shardwise.errors import LifecycleError, OptionTypeError, WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard, units, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)


def _twins(front: str, rank: int, world: int, **arguments: Any) -> Twins:
    return Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle], **arguments)


def _check_one(twins: Twins, options: dict[str, bool]) -> None:
    """One combination: what is shown, what stays, and that training goes on."""
    twins.backward()
    model, whole = twins.model, not options["rank0_only"] or twins.rank == 0
    identities = [id(p) for p in model.parameters()]
    with summon_full_params(model, **options):
        shown = dict(model.named_parameters())
        assert list(shown) == twins.names
        for name, reference in twins.plain.named_parameters() if whole else ():
            assert torch.equal(shown[name], reference)
            assert not is_sharded(shown[name])
            if options["with_grads"]:
                assert not is_sharded(shown[name].grad)
                torch.testing.assert_close(shown[name].grad, reference.grad)
        with torch.no_grad():
            for parameter in shown.values() if whole else ():
                parameter.mul_(1.5)
                if options["with_grads"]:
                    parameter.grad.mul_(3)
    assert [id(p) for p in model.parameters()] == identities
    if options["writeback"]:
        with torch.no_grad():
            for parameter in twins.plain.parameters():
                parameter.mul_(1.5)
                if options["with_grads"]:
                    parameter.grad.mul_(3)
    twins.check_parameters()
    twins.check_gradients()
    twins.update()


@ranks(2)
@fronts
@pytest.mark.parametrize("strategy", ["DEFAULT", "SHARD_GRAD_OP"])
def test_A25_every_combination(rank: int, world: int, front: str, strategy: str) -> None:
    twins = _twins(front, rank, world, strategy=strategy)
    names = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")
    for values in itertools.product([True, False], repeat=4):
        _check_one(twins, dict(zip(names, values, strict=True)))
    twins.train(1)


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "flat"])
def test_A25_no_shard(rank: int, world: int, front: str) -> None:
    twins = _twins(front, rank, world, strategy="NO_SHARD")
    for values in itertools.product([True, False], repeat=3):
        _check_one(twins, dict(zip(("writeback", "rank0_only", "with_grads"), values, strict=True))
                   | {"offload_to_cpu": False})


@ranks(2)
@fronts
def test_A25_assignments_inside_stay(rank: int, world: int, front: str) -> None:
    """``.data =``, a new Parameter and ``.grad =`` inside the block, on all ranks and on rank 0 for all."""
    for rank0_only in (False, True):
        twins = _twins(front, rank, world)
        twins.backward()
        with summon_full_params(twins.model, rank0_only=rank0_only, with_grads=True):
            if rank == 0 or not rank0_only:
                _assign(twins.model)
        _assign(twins.plain)
        twins.check_parameters(bitwise=True)
        twins.check_gradients()


def _assign(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    model.inward.weight.data = torch.randn(7, 5, generator=generator)
    model.middle.bias = nn.Parameter(torch.randn(3, generator=generator))
    model.middle.bias.grad = torch.randn(3, generator=generator)
    model.outward.weight.grad = torch.randn(1, 3, generator=generator)
    model.middle.weight.grad = None


@ranks(2)
@fronts
def test_A25_a_misfit_is_refused_and_nothing_is_lost(rank: int, world: int, front: str) -> None:
    """Cannot writeback, with the name; on rank 0 only, all ranks learn of it."""
    twins = _twins(front, rank, world)
    for rank0_only in (False, True):
        with (pytest.raises(WritebackError, match="Cannot writeback"),
              summon_full_params(twins.model, rank0_only=rank0_only)):
            if rank == 0 or not rank0_only:
                twins.model.inward.weight.data = torch.zeros(2, 2)
        twins.check_parameters(bitwise=True)
    twins.train(1)


@ranks(2)
@fronts
def test_A25_an_exception_inside(rank: int, world: int, front: str) -> None:
    """Edits made before it stay, and the state is as ever."""
    twins = _twins(front, rank, world)
    with pytest.raises(KeyError, match="mine"), summon_full_params(twins.model), torch.no_grad():
        twins.model.inward.weight.add_(1)
        raise KeyError("mine")
    with torch.no_grad():
        twins.plain.inward.weight.add_(1)  # type: ignore[union-attr]
    twins.train(1)


@ranks(2)
@fronts
def test_A25_only_here_or_below(rank: int, world: int, front: str) -> None:
    """``recurse=False`` leaves the units below; a plain child has its unit summoned."""
    twins = _twins(front, rank, world)
    model: Any = twins.model
    with summon_full_params(model, recurse=False):
        assert model.inward.weight.shape == (7, 5)
        assert units(model)["middle"].storages[0].widened is False
    with summon_full_params(model.middle):
        assert model.middle.weight.shape == (3, 7)
        assert not units(model)[""].storages[0].widened
    with summon_full_params(model.inward):
        assert model.inward.weight.shape == (7, 5)
    twins.train(1)


@ranks(2)
@fronts
def test_A25_nested(rank: int, world: int, front: str) -> None:
    """In the same way it is right; in another way it is refused."""
    twins = _twins(front, rank, world)
    model: Any = twins.model
    with summon_full_params(model):
        with summon_full_params(model.middle), torch.no_grad():
            model.middle.bias.add_(1)
        assert model.middle.weight.shape == (3, 7)
        with pytest.raises(LifecycleError, match="other options"), summon_full_params(model, writeback=False):
            pass
    with torch.no_grad():
        twins.plain.middle.bias.add_(1)  # type: ignore[union-attr]
    twins.check_parameters(bitwise=True)


class _Summons(nn.Module):
    """Summons its model in forward, or in backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inside, self.where = TinyMLP(), where
        self.model: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x)
        if self.where == "forward":
            self._summon()
        elif self.where == "backward":
            y.register_hook(lambda _: self._summon())
        return y

    def _summon(self) -> None:
        with summon_full_params(self.model[0]):
            pass


@ranks(2)
@fronts
def test_A25_inside_forward_and_backward_it_raises(rank: int, front: str) -> None:
    for where in ("forward", "backward"):
        module = _Summons(where)
        model = shard(module, front)
        module.model.append(model)
        with pytest.raises(LifecycleError, match="inside forward or backward"):
            loss(model, points(rank, 0)).backward()
        module.where = "nowhere"
        module.model.clear()
        loss(model, points(rank, 0)).backward()


@ranks(2)
@fronts
def test_A25_inside_no_sync_and_between_passes(rank: int, world: int, front: str) -> None:
    """What is unsent stays unsent; a graph made before the block still runs backward after it."""
    twins = _twins(front, rank, world)
    with unsynced(twins.model, front):
        loss(twins.model, points(rank, 0)).backward()
        with summon_full_params(twins.model, with_grads=True):
            assert all(p.grad is None for p in twins.model.parameters())
    mine = loss(twins.model, points(rank, 1))
    with summon_full_params(twins.model):
        pass
    mine.backward()
    for step in range(2):
        parts = [loss(twins.plain, points(each, step)) for each in range(world)]
        (torch.stack(parts).sum() / world).backward()
    twins.check_gradients()


@ranks(2)
@fronts
def test_A25_a_forward_inside(rank: int, front: str) -> None:
    """Without grad mode it computes with what is shown, edits included; with grad mode it is refused."""
    model = shard(TinyMLP(), front)
    inputs, _ = points(0, 0)
    with summon_full_params(model, writeback=False):
        with torch.no_grad():
            before = model(inputs)
            model.outward.bias.add_(2)  # type: ignore[union-attr]
            torch.testing.assert_close(model(inputs), before + 2)
        with pytest.raises(LifecycleError, match="inside summon_full_params"):
            model(inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), before)


@ranks(2)
def test_A25_a_forward_without_whole_parameters_is_refused(rank: int) -> None:
    model = shard(TinyMLP(), "orig")
    with summon_full_params(model, rank0_only=True, writeback=False), torch.no_grad():
        if rank == 0:
            model(points(0, 0)[0])
        else:
            with pytest.raises(LifecycleError, match="rank0_only"):
                model(points(0, 0)[0])


@ranks(2)
@fronts
def test_C11_unit_by_unit(rank: int, world: int, front: str) -> None:
    """One unit is whole at a time; the names are those of the bare module."""
    twins = _twins(front, rank, world)
    reference, names = dict(twins.plain.named_parameters()), []
    with torch.no_grad():
        for _, shown in iter_units_full(twins.model, writeback=True):
            assert sum(s.widened for u in units(twins.model).values() for s in u.storages) == 1
            for name, parameter in shown.items():
                assert torch.equal(parameter, reference[name])
                parameter.add_(1)
                reference[name].add_(1)
                names.append(name)
    assert sorted(names) == sorted(twins.names)
    twins.train(1)


@ranks(2)
def test_A25_the_peak_is_one_copy(rank: int) -> None:
    """All units hold whole parameters once, and nothing else is gathered."""
    model = shard(TinyMLP(), "orig")
    loss(model, points(rank, 0)).backward()
    with summon_full_params(model):
        for unit in units(model).values():
            assert unit.gather.nbytes == 0
            memory = {p.untyped_storage().data_ptr() for s in unit.storages for p in s.parameters}
            assert len(memory) == len(unit.storages)


@ranks(2)
def test_A25_a_method_of_the_wrapper(rank: int) -> None:
    model = shard(TinyMLP(), "flat")
    with FullyShardedDataParallel.summon_full_params(model):
        assert dict(model.named_parameters())["inward.weight"].shape == (7, 5)
    assert shardwise.summon_full_params is summon_full_params
    with pytest.raises(OptionTypeError, match="writeback has the wrong type"), summon_full_params(
            model, writeback="yes"):  # type: ignore[arg-type]
        pass


@ranks(2)
@fronts
def test_apply_sees_whole_parameters(rank: int, front: str) -> None:
    """Unit by unit; changes persist; inside a summon it is refused."""
    model: Any = shard(TinyMLP(), front)
    seen: list[tuple[int, ...]] = []

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            nn.init.constant_(module.weight, 0.25)

    assert model.apply(initialise) is model
    assert seen == [(7, 5), (3, 7), (1, 3)]
    values = full_parameters(model, ["inward.weight", "middle.weight", "outward.weight"])
    assert all(bool((value == 0.25).all()) for value in values.values())
    with summon_full_params(model), pytest.raises(LifecycleError, match="apply"):
        model.apply(initialise)
