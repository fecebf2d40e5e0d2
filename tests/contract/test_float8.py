"""C3: trained float8 parameters, alone in a unit or beside other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_gradients, shard, unsynced
from tests.bed.parity import assert_same_tensors


class Eighth(nn.Module):
    """A matrix in float8, and beside it what ``others`` are."""

    def __init__(self, kind: torch.dtype, *others: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4).to(kind))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(8, dtype=dtype)) for dtype in others)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.float().t()
        return sum((shift.float() for shift in self.shifts), y)


OTHERS = {"alone": (), "fp32": (torch.float32,), "three": (torch.float16, torch.float32, torch.float8_e5m2)}


def _inputs(rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("unsent", [False, True])
def test_C3_float8_is_trained(rank: int, world: int, front: str, others: str, unsent: bool) -> None:
    """The mean of what ranks have in float8, rounded once; torch cannot promote or add float8."""
    kinds = (torch.float8_e4m3fn, *OTHERS[others])
    model: Any = shard(Eighth(*kinds), front)
    names = [name for name, _ in Eighth(*kinds).named_parameters()]
    for quiet in (True, False) if unsent else (False,):
        with unsynced(model, front, quiet):
            model(_inputs(rank)).square().sum().backward()
    sums: dict[str, Tensor] = {}
    for one in range(world):
        plain = Eighth(*kinds)
        plain(_inputs(one)).square().sum().backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            mine = p.grad.float() * (2 if unsent else 1)
            sums[name] = sums[name] + mine if one else mine
    expected = {name: (value / world).to(p.dtype) for (name, value), p in
                zip(sums.items(), Eighth(*kinds).parameters(), strict=True)}
    found = {name: g for name, g in full_gradients(model, names).items() if g is not None}
    assert {name: g.dtype for name, g in found.items()} == {name: g.dtype for name, g in expected.items()}
    assert_same_tensors({name: g.float() for name, g in found.items()},
                        {name: g.float() for name, g in expected.items()}, "gradient", rtol=1e-2, atol=1e-2)
