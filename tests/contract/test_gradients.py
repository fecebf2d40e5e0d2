"""Gradients: their mean, their norm and their accumulation (rows C10, D12's calls, U57-U60, U62, B-free)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, full_gradients, shard, unsynced
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points
from tests.bed.training import Twins

NORMS = (0.5, 1.0, 2.0, 3.0, math.inf)


def _odd(front: str, place: tuple[int, int], **arguments: Any) -> Twins:
    return Twins(lambda: OddTransformer(blocks=1, batch_norm=False), front, place,
                 inner=lambda m: m.units(), run=lambda m, r, s: loss(m, batch(r, s)), **arguments)


@ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_C10_U60_every_norm_is_that_of_the_whole(
    front: str, strategy: str, rank: int, world: int
) -> None:
    """Ours and torch's own functions; on every rank, with empty shards; the clipped gradients too."""
    if (front, strategy) == ("fully_shard", "NO_SHARD"):
        pytest.skip("fully_shard has no such choice")
    twins = _odd(front, (rank, world), strategy=strategy)
    calls: dict[str, Any] = {
        "ours": lambda p: shardwise.clip_grad_norm(twins.model.parameters(), 0.05, p),
        "torch": lambda p: torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.05, p),
        "one_by_one": lambda p: torch.nn.utils.clip_grad_norm_(
            twins.model.parameters(), 0.05, p, foreach=False),
    }
    if front in WRAPPERS:
        calls["method"] = partial(twins.model.clip_grad_norm_, 0.05)
    for number, (name, call) in enumerate(calls.items()):
        norm_type = NORMS[(number * 2) % len(NORMS)]
        for p in {norm_type, 2.0, math.inf}:
            twins.model.zero_grad(), twins.plain.zero_grad()
            twins.backward(number)
            expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05, p)
            norm = call(p)
            assert norm.dim() == 0 and norm.dtype is torch.float32, name
            torch.testing.assert_close(torch.as_tensor(float(norm)), expected, rtol=1e-4, atol=1e-6)
            twins.check_gradients(rtol=1e-4)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C10_total_norm_and_norms_of_single_gradients(front: str, rank: int, world: int) -> None:
    twins = _odd(front, (rank, world))
    twins.backward()
    grads = [p.grad for p in twins.model.parameters() if p.grad is not None]
    theirs = [p.grad for p in twins.plain.parameters() if p.grad is not None]
    for p in NORMS:
        torch.testing.assert_close(float(torch.nn.utils.get_total_norm(grads, p)),
                                   float(torch.nn.utils.get_total_norm(theirs, p)), rtol=1e-4, atol=1e-6)
    if front != "flat":
        for ours, whole in zip(grads, theirs, strict=True):
            for p in (1.0, 2.0, math.inf):
                torch.testing.assert_close(float(torch.linalg.vector_norm(ours, p)),
                                           float(torch.linalg.vector_norm(whole, p)), rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(float(ours.norm()), float(whole.norm()), rtol=1e-4, atol=1e-7)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C10_nonfinite_gradients(front: str, rank: int) -> None:
    """An infinity on one rank is seen by all; the gradients are left alone."""
    model: Any = shard(TinyMLP(), front)
    loss(model, points(rank, 0)).backward()
    if rank == 0:
        gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
        gradient.view(-1)[0] = math.inf
    before = [p.grad.clone() for p in model.parameters()]
    clip = model.clip_grad_norm_ if front in WRAPPERS else (
        lambda *args, **kwargs: shardwise.clip_grad_norm(model.parameters(), *args, **kwargs))
    with pytest.raises(shardwise.errors.ShardwiseError) as caught:
        clip(1.0, error_if_nonfinite=True)
    assert str(caught.value) == (
        "shardwise: the total norm of order 2.0 of the gradients is not finite: expected a finite norm, "
        "got inf. Look for the first non-finite loss, or skip the step.")
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    assert math.isinf(clip(1.0, math.inf))


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_clipping_nothing_warns(front: str) -> None:
    """A zero norm in fp32, on the root only."""
    plain = TinyMLP()
    model: Any = shard(plain, front, [plain.middle])
    with pytest.warns(UserWarning, match="clip_grad_norm_ found no gradients and returns a zero norm"):
        norm = model.clip_grad_norm_(1.0)
    assert norm.dtype is torch.float32 and norm.item() == 0.0
    with pytest.raises(shardwise.errors.LifecycleError, match="clip_grad_norm_ must be called on the root"):
        model.middle.clip_grad_norm_(1.0)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_the_norm_has_the_widest_dtype_of_the_gradients(front: str, rank: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).double())

    model = shard(Two(), front)
    model(points(rank, 0)[0]).sum().backward()
    assert shardwise.clip_grad_norm(model.parameters(), 1.0).dtype is torch.float64


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_clip_by_value(front: str, rank: int, world: int) -> None:
    twins = _odd(front, (rank, world))
    twins.backward()
    shardwise.clip_grad_value(twins.model.parameters(), 1e-3)
    torch.nn.utils.clip_grad_value_(twins.plain.parameters(), 1e-3)
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U62_grad_scaler_sees_every_rank(front: str, rank: int, world: int) -> None:
    """torch.amp.GradScaler itself: an infinity on one rank makes all skip and back off."""
    twins = Twins(TinyMLP, front, (rank, world))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    optimizer = twins.optimizers[1]
    for step, bad in enumerate((False, True, False)):
        scaler.scale(twins.run(twins.model, rank, step)).backward()
        for r in range(world):
            (twins.run(twins.plain, r, step) / world).backward()
        if bad and rank == 1:
            next(p.grad for p in twins.model.parameters() if p.grad.numel()).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            twins.optimizers[0].step()
        twins.plain.zero_grad(), twins.model.zero_grad()
        twins.check_parameters()
    assert scaler.get_scale() == 4.0


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_U58_U59_accumulation_interleaved(front: str, strategy: str, rank: int, world: int) -> None:
    """no_sync, synced, no_sync, no_sync, synced: one big batch. Nothing is bound before it is reduced."""
    if (front, strategy) == ("fully_shard", "NO_SHARD"):
        pytest.skip("fully_shard has no such choice")
    twins = Twins(TinyMLP, front, (rank, world), inner=lambda m: [m.middle], strategy=strategy)
    for number, quiet in enumerate((True, False, True, True, False)):
        if quiet:
            before = full_gradients(twins.model, twins.names)
            with unsynced(twins.model, front):
                twins.backward(number)
            after = full_gradients(twins.model, twins.names)
            assert all(old is new or torch.equal(old, new)
                       for old, new in zip(before.values(), after.values(), strict=True))
        else:
            twins.backward(number)
            twins.check_gradients()
    twins.update()
    twins.check_parameters()
    assert all(p.grad is None for p in twins.model.parameters())


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_no_sync_belongs_to_the_root(front: str) -> None:
    plain = TinyMLP()
    model: Any = shard(plain, front, [plain.middle])
    assert model.check_is_root()
    text = r"no_sync must be called on the root.*'middle'"
    with pytest.raises(shardwise.errors.LifecycleError, match=text), model.middle.no_sync():
        pass


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_contiguous_parameters_and_gradients(front: str, rank: int) -> None:
    model = shard(TinyMLP(), front)
    loss(model, points(rank, 0)).backward()
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in model.parameters())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U17_gradients_set_by_the_user_are_added_to(front: str, rank: int, world: int) -> None:
    """Changed in place, replaced, and cleared for one parameter only."""
    twins = Twins(TinyMLP, front, (rank, world))
    twins.backward(0)
    for model in (twins.plain, twins.model):
        for p in model.parameters():
            p.grad = p.grad * 0.5 if p.dim() > 1 else p.grad.mul_(0.5)
    twins.backward(1)
    twins.check_gradients()
    if front != "flat":
        twins.model.middle.bias.grad = twins.plain.middle.bias.grad = None
        twins.backward(2)
        twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
@pytest.mark.parametrize("large", [False, True])
def test_U58_what_is_thawed_while_gradients_are_unsent(front: str, large: bool, rank: int, world: int) -> None:
    """It has the gradient of the passes in which it was trained, and afterwards nothing of them is left."""
    width = 70_000 if large else 6

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))

    twins = Twins(build, front, (rank, world), inner=lambda m: [m[0]], run=lambda m, r, s: loss(m, points(r, s)))
    both: tuple[Any, Any] = (twins.model, twins.plain)
    for frozen in ("0.bias", "2.weight"):
        for model in both:
            model.zero_grad()
            model.get_parameter(frozen).requires_grad_(False)
        with unsynced(twins.model, front):
            twins.backward(0)
        for model in both:
            model.get_parameter(frozen).requires_grad_(True)
        with unsynced(twins.model, front):
            twins.backward(1)
        twins.backward(2)
        twins.check_gradients()
        for model in both:
            model.zero_grad()
        twins.backward(3)
        twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U58_what_is_replaced_while_gradients_are_unsent(front: str, rank: int, world: int) -> None:
    """A new parameter has no gradient, as in an unsharded model; that of the old one is gone with it."""
    twins = Twins(TinyMLP, front, (rank, world))
    with unsynced(twins.model, front):
        twins.backward(0)
    for model in (twins.model, twins.plain):
        module: Any = model
        rows, columns = module.middle.out_features, module.middle.in_features
        module.middle.weight = nn.Parameter(torch.linspace(-1, 1, rows * columns).view(rows, columns))
    twins.backward(1)
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_gradient_is_no_view(front: str, rank: int, world: int) -> None:
    """What older programs do in place of ``zero_grad`` works, and a change in place is that of one gradient only."""
    twins = Twins(TinyMLP, front, (rank, world))
    twins.backward(0)
    gradients = [p.grad for p in twins.model.parameters() if p.grad is not None]
    versions = [gradient._version for gradient in gradients]
    gradients[0].detach_().zero_()
    assert [gradient._version for gradient in gradients[1:]] == versions[1:]
