"""Ten steps of the odd transformer give what DDP gives, and what no sharding gives.

Rows A1-A4, A10, A11, C3, C4, C17, U2, U11, U13, U15, U19, U20, U23, U58, U59: the model has a tied
head, frozen and integer parameters, a 0-d and a channels-last one, shapes that nothing divides, and three
parameter groups.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard, transport, unsynced
from tests.bed.models import OddTransformer, batch, concatenated, loss, three_groups
from tests.bed.parity import assert_same_parameters, assert_same_tensors
from tests.bed.peers import ddp

STEPS = 10
MICRO = {"none": 1, "sync_each": 2, "no_sync": 2}
CASES = [(front, strategy) for front in FRONTS for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
         if (front, strategy) != ("fully_shard", "NO_SHARD")]
CASES += [("fully_shard", "DEFAULT")]


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _optimizer(model: nn.Module, front: str) -> torch.optim.Optimizer:
    """AdamW; a flat parameter cannot be split into groups."""
    if front == "flat":
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.05)
    return torch.optim.AdamW(three_groups(model))


def _train(model: Any, optimizer: torch.optim.Optimizer, quiet: Any, rank: int, micro: int) -> list[float]:
    """Train; ``quiet(number)`` is the context of micro-batch ``number`` of a step."""
    losses: list[float] = []
    for step in range(STEPS):
        for number in range(micro):
            with quiet(number):
                value = loss(model, batch(rank, 100 * number + step)) / micro
                value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def _ddp(rank: int, accumulation: str, flat: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the same run under DDP; made once for each worker."""
    plain, micro = OddTransformer(), MICRO[accumulation]
    model = ddp(plain)
    optimizer = _optimizer(plain, "flat" if flat else "orig")
    losses: list[float] = []
    for step in range(STEPS):
        earlier: dict[nn.Parameter, Tensor] = {}
        for number in range(micro):
            model.require_backward_grad_sync = accumulation == "sync_each" or number == micro - 1
            value = loss(model, batch(rank, 100 * number + step)) / micro
            value.backward()
            losses.append(value.item())
            if accumulation == "sync_each":  # what was reduced before must not be reduced again
                earlier = {p: p.grad + earlier.get(p, 0) for p in plain.parameters() if p.grad is not None}
                plain.zero_grad()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in plain.named_parameters()}


def _check_against_ddp(front: str, strategy: str, accumulation: str, rank: int) -> None:
    micro = MICRO[accumulation]
    ddp_losses, ddp_parameters = _ddp(rank, accumulation, front == "flat")
    plain = OddTransformer()
    names, objects = _names(plain), dict(plain.named_parameters())
    model = shard(plain, front, plain.units(), strategy)
    optimizer = _optimizer(model, front)

    def quiet(number: int) -> Any:
        return unsynced(model, front, quiet=accumulation == "no_sync" and number < micro - 1)

    losses = _train(model, optimizer, quiet, rank, micro)
    assert losses == ddp_losses
    assert_same_parameters(full_parameters(model, names), ddp_parameters, bitwise=True)
    if front != "flat":  # A1, A4, A10: the very objects, under the very names
        assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(objects[n])) for n in names]


@ranks(2)
@pytest.mark.parametrize("accumulation", MICRO)
@pytest.mark.parametrize(("front", "strategy"), CASES)
def test_A2_A3_as_ddp(front: str, strategy: str, accumulation: str, rank: int) -> None:
    """Bitwise: every loss, and every parameter at the end."""
    _check_against_ddp(front, strategy, accumulation, rank)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A2_A3_as_ddp_over_the_process_group(front: str, rank: int) -> None:
    with transport("group"):
        _check_against_ddp(front, "FULL_SHARD", "no_sync", rank)


def _sgd(model: nn.Module, front: str) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained if front == "flat" else three_groups(model), lr=0.1, momentum=0.9)


@cache
def _unsharded(world: int, front: str) -> tuple[list[float], dict[str, Tensor]]:
    """SGD on the concatenated batch: losses and parameters."""
    model = OddTransformer(batch_norm=False)
    optimizer = _sgd(model, front)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, concatenated(world, step))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@ranks(1, 2, 4)
@pytest.mark.parametrize(("front", "strategy"), CASES)
def test_A2_as_unsharded_on_the_concatenated_batch(
    front: str, strategy: str, rank: int, world: int
) -> None:
    expected_losses, expected = _unsharded(world, "flat" if front == "flat" else "orig")
    plain = OddTransformer(batch_norm=False)
    names = _names(plain)
    model = shard(plain, front, plain.units(), strategy)
    optimizer = _sgd(model, front)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch(rank, step))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    totals = torch.stack(losses)
    torch.distributed.all_reduce(totals)
    torch.testing.assert_close((totals / world).tolist(), expected_losses, rtol=1e-4, atol=1e-4)
    assert_same_tensors(full_parameters(model, names), expected, "parameter", rtol=1e-3, atol=1e-4)
