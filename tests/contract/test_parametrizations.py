"""Parameters that are computed from others: they train sharded, and are removed from an unsharded copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.utils as norms
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import shardwise
from shardwise.errors import LifecycleError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, full_parameters
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")


class _LowRank(nn.Module):
    """LoRA as a parametrization."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.up, self.down = nn.Parameter(torch.full((rows, 2), 0.1)), nn.Parameter(torch.full((2, columns), 0.2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def _low_rank(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _LowRank(module.weight))  # type: ignore[arg-type]


def _remove(module: nn.Module) -> None:
    parametrize.remove_parametrizations(module, "weight")


KINDS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str]] = {
    "old weight norm": (norms.weight_norm, norms.remove_weight_norm, "remove_weight_norm"),
    "old spectral norm": (norms.spectral_norm, norms.remove_spectral_norm, "remove_spectral_norm"),
    "weight norm": (parametrizations.weight_norm, _remove, "remove_parametrizations"),
    "spectral norm": (parametrizations.spectral_norm, _remove, "remove_parametrizations"),
    "orthogonal": (parametrizations.orthogonal, _remove, "remove_parametrizations"),
    "low rank": (_low_rank, _remove, "remove_parametrizations"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def _twins(kind: str, front: str, place: tuple[int, int]) -> Twins:
    def build() -> nn.Module:
        torch.manual_seed(1)
        model = TinyMLP()
        KINDS[kind][0](model.middle)
        return model

    return Twins(build, front, place, inner=lambda model: [model.middle],
                 run=lambda model, rank, step: loss(model.eval(), points(rank, step)))


@ranks(2)
@fronts
@kinds
def test_A12_removal_is_refused(rank: int, world: int, front: str, kind: str) -> None:
    """At rest (a kernel of torch's crashed), between forward and backward, and inside a summon; then it trains on."""
    twins, (_, remove, name) = _twins(kind, front, (rank, world)), KINDS[kind]
    twins.train(1, rtol=1e-4, atol=1e-6)
    output = loss(twins.model, points(rank, 1))
    for context in (nullcontext(), shardwise.summon_full_params(twins.model)):
        with context, pytest.raises(LifecycleError) as refused:
            remove(getattr(twins.model.middle, "module", twins.model.middle))
        for part in (f"torch.nn.utils {name} on a sharded module", "this rank's rows", "unit 'middle'",
                     "Remove it before sharding", "copy.deepcopy(model) made inside summon_full_params"):
            assert part in str(refused.value)
        if output is not None:
            output.backward()
            output = None
    twins.optimizers[1].zero_grad()
    twins.train(1, rtol=1e-4, atol=1e-6)


@ranks(2)
@fronts
@kinds
def test_A12_removal_from_the_unsharded_copy(rank: int, world: int, front: str, kind: str) -> None:
    """What the error recommends gives what the trained model computes."""
    twins, remove = _twins(kind, front, (rank, world)), KINDS[kind][1]
    twins.train(1, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        twins.model(points(rank, 1)[0])  # copy.deepcopy takes no attribute with a history, as old norms leave one
    with shardwise.summon_full_params(twins.model):
        copied = copy.deepcopy(twins.model)
    remove(copied.middle)
    inputs, _ = points(rank, 5)
    assert "middle.weight" in dict(copied.named_parameters())
    torch.testing.assert_close(copied(inputs), twins.model(inputs))


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_A12_a_parametrization_is_thrown_away(rank: int, world: int, front: str) -> None:
    """The original is registered under its old name again, and trains there."""
    twins = _twins("low rank", front, (rank, world))
    twins.train(1, rtol=1e-4, atol=1e-6)
    for model in (twins.model.module.middle.module, twins.plain.middle):
        parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    for _ in range(2):
        twins.backward()
        twins.update()
    name = "middle.weight"
    ours, theirs = full_parameters(twins.model, [name])[name], twins.plain.middle.weight
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U36_a_new_name_for_a_sharded_parameter(rank: int, world: int, front: str) -> None:
    """A module that is added later, and shares a weight from the beginning."""
    def run(model: Any, rank: int, step: int) -> Tensor:
        return loss(model, points(rank, step))

    twins = Twins(TinyMLP, front, (rank, world), run=run)
    twins.train(1)
    for model in (twins.model, twins.plain):
        first = nn.Linear(7, 3, bias=False)
        first.weight = model.middle.weight
        module = model.module if front != "fully_shard" and model is twins.model else model
        module.middle = nn.Sequential(first)
    twins.names = [name for name, _ in twins.plain.named_parameters()]
    for _ in range(2):
        twins.backward()
        twins.update()
    twins.check_parameters(rtol=1e-4, atol=1e-6)
