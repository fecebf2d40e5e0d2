"""When reduced gradients become ``.grad``, and what an early end leaves alone (rows A22, U66, C3, C17)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.storage.sharded_parameter import held_gradient
from tests.bed import ranks
from tests.bed.bomb import bomb
from tests.bed.fronts import full_gradients, full_parameters, shard, units
from tests.bed.training import assert_same_tensors

VISIBLE = pytest.mark.parametrize("front", ["orig", "fully_shard"])


class Chain(nn.Module):
    """Four layers of different widths, each a unit; the first and the last have a root of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.inward, self.second = nn.Linear(5, 7), nn.Linear(7, 6)
        self.third, self.outward = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor, before_first: Callable[[Tensor], None] | None = None) -> Tensor:
        x = torch.tanh(self.inward(x))
        if before_first is not None:
            x.register_hook(before_first)
        return self.outward(torch.tanh(self.third(torch.tanh(self.second(x)))))


def _made(front: str) -> tuple[Any, Chain, Chain]:
    chain = Chain()
    layers = [chain.inward, chain.second, chain.third, chain.outward]
    return shard(chain, front, layers), chain, Chain()


def _rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(17 * step + rank))


def _inside(chain: Chain, name: str) -> Any:
    layer = getattr(chain, name)
    return getattr(layer, "module", layer)


def _check(model: Any, plain: Chain, world: int, steps: int = 1) -> None:
    total = sum(plain(_rows(one, step)).square().sum() for one in range(world) for step in range(steps)) / world
    total.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected)


@ranks(2)
@VISIBLE
def test_U66_what_hooks_wait_for_is_bound_while_the_backward_runs(front: str, rank: int, world: int) -> None:
    """An optimizer in the backward has freed the last layer's gradients before the first layer's arrive."""
    model, chain, plain = _made(front)
    seen: list[str] = []
    last, third = _inside(chain, "outward"), _inside(chain, "third")
    last.weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"hook {tuple(p.grad.shape)}"))

    def before_first(_: Tensor) -> None:
        seen.append(f"first {[held_gradient(layer.weight) is not None for layer in (last, third)]}")

    model(_rows(rank), before_first).square().sum().backward()
    assert seen == [f"hook {tuple(last.weight.shape)}", "first [True, False]"]
    assert third.weight.grad is not None
    _check(model, plain, world)


@ranks(2)
@VISIBLE
@pytest.mark.parametrize("what", ["reads", "steps", "clears"])
def test_U66_a_hook_elsewhere_has_the_gradients_of_what_is_reduced(
    front: str, what: str, rank: int, world: int
) -> None:
    """A hook on an activation reads, uses or takes away gradients of a later layer while the backward runs."""
    model, chain, plain = _made(front)
    ours, theirs = _inside(chain, "outward"), plain.outward
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (ours, theirs)]
    norms: list[Tensor] = []

    def use(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        assert layer.weight.grad is not None and layer.bias.grad is not None
        if what == "reads":
            norms.append(layer.weight.grad.norm())
        if what == "steps":
            optimizer.step()
        if what != "reads":
            layer.weight.grad = layer.bias.grad = None

    model(_rows(rank), lambda _: use(ours, optimizers[0])).square().sum().backward()
    for one in range(world):
        (plain(_rows(one)).square().sum() / world).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    use(theirs, optimizers[1])
    if what == "reads":
        torch.testing.assert_close(torch.as_tensor(float(norms[0])), norms[1])
    else:
        expected |= {"outward.weight": None, "outward.bias": None}
    assert_same_tensors(full_gradients(model, list(expected)), expected)
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), dict(plain.named_parameters()))


@ranks(2)
@VISIBLE
def test_C1_edits_after_a_backward_that_failed(front: str, rank: int, world: int) -> None:
    """Whoever catches the exception sees the parameters, not what was in use; before the next forward, too."""
    model, chain, plain = _made(front)
    layer: Any = chain.third
    mine = _inside(chain, "third").weight

    def fails(_: Tensor) -> None:
        raise RuntimeError("in a hook")

    layer.register_forward_hook(lambda *call: call[-1].register_hook(fails) and None)
    output = model(_rows(rank, 5))
    with pytest.raises(RuntimeError, match="in a hook"):
        output.square().sum().backward()
    inside = _inside(chain, "third")
    assert inside.weight is mine
    with torch.no_grad():
        inside.weight.mul_(2)
        plain.third.weight.mul_(2)
    layer._forward_hooks.clear() if front == "orig" else layer._forward_hooks.popitem()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="shardwise: the last backward did not finish")
        model(_rows(rank)).square().sum().backward()
    _check(model, plain, world)


@ranks(2)
@VISIBLE
def test_A22_a_gradient_that_is_there_already_is_added_to_at_once(front: str, rank: int, world: int) -> None:
    """So that never two sets of gradients are held."""
    model, chain, plain = _made(front)
    model(_rows(rank)).square().sum().backward()
    weight, seen = _inside(chain, "outward").weight, list[bool]()
    held = weight.grad
    assert held is not None
    before = held.clone()

    def before_first(_: Tensor) -> None:
        seen.append(weight.grad is held and (not held.numel() or not torch.equal(held, before)))

    model(_rows(rank, 1), before_first).square().sum().backward()
    assert seen == [True]
    _check(model, plain, world, steps=2)


@ranks(2)
@VISIBLE
def test_a_backward_that_fails_binds_nothing(front: str, rank: int, world: int) -> None:
    """Layers whose reduction was over have no gradient of half a step; the next step is whole."""
    model, chain, plain = _made(front)
    inward = _inside(chain, "inward")
    handle = inward.register_forward_hook(lambda *call: bomb(call[-1], RuntimeError("in backward")))
    with pytest.raises(RuntimeError, match="in backward"):
        model(_rows(rank, 5)).square().sum().backward()
    handle.remove()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="shardwise: the last backward did not finish")
        output = model(_rows(rank))
    assert all(p.grad is None for p in model.parameters())
    output.square().sum().backward()
    _check(model, plain, world)


@ranks(2)
@VISIBLE
@pytest.mark.parametrize("where", ["outward", "third", "inward"])
def test_C3_gradients_of_a_units_output_alone(front: str, where: str, rank: int, world: int) -> None:
    """``autograd.grad`` down to the output of a unit, which does not run the unit's own backward, twice; then all."""
    model, chain, plain = _made(front)
    outputs: list[Tensor] = []
    handles = [getattr(one, where).register_forward_hook(lambda *call: outputs.append(call[-1]))
               for one in (chain, plain)]
    totals = [one(_rows(rank)).square().sum() for one in (model, plain)]
    for _ in range(2):
        ours, theirs = [torch.autograd.grad(total, output, retain_graph=True)[0]
                        for total, output in zip(totals, outputs, strict=True)]
        assert torch.equal(ours, theirs)
        assert all(p.grad is None for p in model.parameters())
    totals[0].backward()
    for handle in handles:
        handle.remove()
    _check(model, plain, world)
    assert all(unit.gather.nbytes == 0 for unit in units(model).values())


@ranks(2)
@VISIBLE
def test_outputs_go_to_files_without_a_word_about_hooks(front: str, rank: int) -> None:
    """What the engine watches an output by is not the user's business; a hook of the user's is called as ever."""
    model, _, _ = _made(front)
    output, seen = model(_rows(rank)), list[Tensor]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())
    output.register_hook(seen.append)
    output.sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(4, 3))


@ranks(2, 4)
@VISIBLE
def test_C17_a_unit_with_nothing_at_all(front: str, rank: int, world: int) -> None:
    """Its only parameter has no element."""
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.none.sum()

    model, seen = shard(Nothing(), front), list[Tensor]()
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        seen.append(x.grad)
    assert all(torch.equal(gradient, torch.ones(2)) for gradient in seen)
    (parameter,) = model.parameters()
    assert parameter.grad is not None and parameter.grad.shape == parameter.shape


@ranks(2)
@VISIBLE
@pytest.mark.parametrize("kept", ["all", "one", "hooked"])
def test_A22_gradients_are_added_to_what_is_there(front: str, kept: str, rank: int, world: int) -> None:
    """Where all parameters of a unit have a gradient, where one has none, and where one has a hook."""
    model, chain, plain = _made(front)
    model(_rows(rank)).square().sum().backward()
    held = {p: p.grad for p in model.parameters()}
    weight, before = _inside(chain, "third").weight, _inside(plain, "third").weight
    if kept == "one":
        weight.grad = None
    if kept == "hooked":
        weight.register_hook(lambda gradient: gradient * 2)
    model(_rows(rank, 1)).square().sum().backward()
    assert all(p.grad is gradient for p, gradient in held.items() if kept != "one" or p is not weight)
    totals = [sum(plain(_rows(one, step)).square().sum() for one in range(world)) / world for step in range(2)]
    totals[0].backward()
    if kept == "one":
        before.grad = None
    if kept == "hooked":
        before.register_hook(lambda gradient: gradient * 2)
    totals[1].backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected)
