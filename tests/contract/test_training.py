"""Training in the ways that people train (rows A34, A35, A41, B15, C8, U7, U43-U46, U56, U84, U94)."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import BackwardPrefetch, FullyShardedDataParallel, fully_shard, wrap
from shardwise.errors import DivergenceError, PeerError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, over_the_group, shard, transport, units
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points
from tests.bed.training import Twins


def _layers(model: Any) -> list[nn.Module]:
    return [model.inward, model.middle, model.outward]


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_A34_A35_every_prefetch_choice(front: str, rank: int, world: int) -> None:
    """With a transport that works ahead, with accumulation, and on a graph that changes."""
    def run(model: Any, rank: int, step: int) -> Tensor:
        x = points(rank, step)[0]
        return model(x).square().mean() if step % 2 else model.outward(model.middle(model.inward(x))).mean()

    for backward in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        for forward in (False, True):
            with over_the_group():
                twins = Twins(TinyMLP, front, (rank, world), inner=_layers, backward_prefetch=backward,
                              forward_prefetch=forward, limit_all_gathers=forward)
            twins.train(2)
            twins.run = run
            for step in range(4):
                twins.backward(step)
            twins.check_gradients()


@ranks(2)
@pytest.mark.filterwarnings("ignore:shardwise. ModuleList has no forward")
@pytest.mark.parametrize("front", WRAPPERS)
def test_every_submodule_a_unit(front: str, rank: int, world: int) -> None:
    twins = Twins(lambda: OddTransformer(blocks=1, batch_norm=False), front, (rank, world),
                  auto_wrap_policy=wrap.always_wrap_policy, run=lambda m, r, s: loss(m, batch(r, s)))
    assert len(units(twins.model)) == len(list(twins.plain.modules()))
    twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_a_rank_that_comes_late(front: str, over: str, rank: int, world: int) -> None:
    """In forward, before its gradients are reduced, and between backward and step."""
    with transport(over):
        twins = Twins(TinyMLP, front, (rank, world), inner=_layers)

    def late(*_: object) -> None:
        time.sleep(0.03 * rank)

    inside = twins.model.module if front in WRAPPERS else twins.model
    inside.middle.register_forward_hook(late)
    inside.middle.register_full_backward_hook(late)
    for step in range(2):
        twins.backward(step)
        late()
        twins.check_gradients()
        twins.update()
    twins.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_sharded_again_further_out(front: str, rank: int, world: int) -> None:
    """A unit that was trained by itself becomes part of a larger model, with its own optimizer."""
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.inner, self.last = TinyMLP(), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    alone = Twins(TinyMLP, front, (rank, world), inner=_layers)
    alone.train(2)
    expected, model = Outer(), Outer()
    expected.inner, model.inner = alone.plain, alone.model
    sharded = shard(model, front)
    for step in range(2):
        sharded(points(rank, step)[0]).square().mean().backward()
        for r in range(world):
            (expected(points(r, step)[0]).square().mean() / world).backward()
        alone.check_gradients()
        alone.update()
        alone.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_half_precision_models(front: str, rank: int, world: int) -> None:
    """``.bfloat16()`` and ``.half()`` before sharding; gradients in that dtype, as DDP's."""
    for dtype in (torch.bfloat16, torch.float16):
        twins = Twins(lambda dtype=dtype: TinyMLP(dtype=dtype), front, (rank, world), inner=_layers,
                      run=lambda m, r, s, dtype=dtype: m(points(r, s)[0].to(dtype)).float().square().mean())
        twins.train(2, rtol=2e-2, atol=2e-2)
        twins.backward(3)
        assert {p.grad.dtype for p in twins.model.parameters()} == {dtype}


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_autocast(front: str, rank: int, world: int) -> None:
    """The parameters stay fp32, and so do their gradients."""
    def run(model: Any, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, points(rank, step)).float()

    twins = Twins(TinyMLP, front, (rank, world), inner=_layers, run=run)
    twins.train(3, rtol=2e-2, atol=1e-3)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_C8_U94_another_order_on_one_rank_is_told(front: str, over: str, rank: int, world: int) -> None:
    """To every rank, at once, with the units' names; nothing was mixed up before."""
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, swap: bool) -> Tensor:
            order = (self.second, self.first) if swap else (self.first, self.second)
            return order[1](order[0](x))

    group = dist.new_group(list(range(world)))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    arguments: dict[str, Any] = {"mesh": mesh} if front == "fully_shard" else {"process_group": group}
    with transport(over):
        plain = Swapped()
        model = shard(plain, front, [plain.first, plain.second], **arguments)
    model(points(rank, 0)[0], False).sum().backward()
    with pytest.raises(DivergenceError) as caught:
        model(points(rank, 0)[0], swap=rank == 1)
    text = str(caught.value)
    assert re.search(r"rank 0 runs gather of .*first.*, rank 1 runs gather of .*second", text), text


@ranks(2)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_A19_a_rank_that_stays_away_is_waited_for_as_long_as_the_group_says(over: str, rank: int) -> None:
    """Whatever carries the data: the timeout is that of the process group."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    with transport(over):
        model = fully_shard(TinyMLP(), mesh=mesh)
    loss(model, points(rank, 0)).backward()
    if rank == 0:
        with pytest.raises(PeerError):
            model(points(rank, 1)[0])
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_training_and_evaluation_alternate_without_a_warning(front: str, rank: int, world: int) -> None:
    twins = Twins(TinyMLP, front, (rank, world), inner=_layers, strategy="SHARD_GRAD_OP")
    for step in range(3):
        twins.train(1)
        twins.model.eval()
        with torch.no_grad():
            assert torch.isfinite(twins.run(twins.model, rank, step))
        twins.model.train()


@ranks(2)
def test_ignored_modules_stay_on_meta(rank: int) -> None:
    """With and without ``param_init_fn``, which is not called for them."""
    called: list[nn.Module] = []
    for init in (None, called.append):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, device="meta"))
        FullyShardedDataParallel(model, ignored_modules=[model[1]], param_init_fn=init, use_orig_params=True)
        assert model[1].weight.is_meta and not model[0].weight.is_meta
    assert not called


@ranks(2)
def test_requires_grad_is_kept_for_each_parameter() -> None:
    for build in (fully_shard, lambda m: FullyShardedDataParallel(m, use_orig_params=True)):
        model = TinyMLP()
        model.middle.weight.requires_grad_(False)
        expected = [p.requires_grad for p in model.parameters()]
        assert [p.requires_grad for p in build(model).parameters()] == expected
