"""Experts on a mesh of their own inside a model that all ranks share (rows U88, U61)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from tests.bed import ranks
from tests.bed.models import points
from tests.bed.parity import assert_same_tensors


class _ToAll(torch.autograd.Function):
    """The tokens of all ranks that share the experts; gradients come back summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        everyone = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(everyone, x.contiguous(), group=group)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class _Back(torch.autograd.Function):
    """The sum of what the experts made of this rank's tokens: the adjoint of ``_ToAll``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _ToAll.backward(ctx, y)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _ToAll.forward(ctx, gradients[0], ctx.group), None


class Experts(nn.Module):
    """Two experts, of which a rank may have one: ``weight[e]`` is that of expert ``e``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 7, 7) / 3)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return sum(torch.tanh(x @ matrix) for matrix in self.weight)
        weight: Any = self.weight
        mine = weight.to_local() if isinstance(weight, DTensor) else weight
        tokens = _ToAll.apply(x, self.group)
        return _Back.apply(sum(torch.tanh(tokens @ matrix) for matrix in mine), self.group)


class Sparse(nn.Module):
    """Dense layers around the experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.before, self.experts, self.after = nn.Linear(5, 7), Experts(), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.experts(self.before(x)))


def _parallel(mesh: DeviceMesh, as_dtensor: bool) -> Sparse:
    model = Sparse()
    spread = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(spread if as_dtensor else spread.to_local())
    model.experts.group = mesh["ep"].get_group()
    shardwise.fully_shard(model.experts, mesh=mesh["edp"])
    model.experts.set_gradient_divide_factor(4)  # they see the tokens of all four ranks
    return shardwise.fully_shard(model)


def _loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


@ranks(4)
@pytest.mark.parametrize("as_dtensor", [True, False])
def test_U88_experts_on_their_own_mesh_train(as_dtensor: bool, rank: int) -> None:
    """Two ranks share each expert's rows, all four the rest; equal to one process with all data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model, plain = _parallel(mesh, as_dtensor), Sparse()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, plain)]
    for step in range(3):
        _loss(model, points(rank, step)).backward()
        torch.stack([_loss(plain, points(one, step)) for one in range(4)]).mean().backward()
        if as_dtensor:  # every expert counts once, on whatever rank it is
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (model, plain)]
            torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found: dict[str, Tensor] = {n: p.full_tensor() for n, p in model.named_parameters()}  # pyright: ignore
        expected: dict[str, Tensor] = {n: p.detach() for n, p in plain.named_parameters()}
        if not as_dtensor:
            here = mesh["ep"].get_local_rank()
            expected["experts.weight"] = expected["experts.weight"][here : here + 1]
        assert_same_tensors(found, expected, rtol=1e-4)
