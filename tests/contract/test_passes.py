"""Forwards and backwards in every combination (rows A26, C8's calm side, C16, C22, U8, U90)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard, transport, units, unsynced
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


class Parts(nn.Module):
    """Units that a forward uses once, twice, not at all, or on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.c = nn.Linear(5, 5)
        self.spare = nn.Parameter(torch.rand(3, 5))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor, path: str = "abc") -> Tensor:
        for name in path:
            x = x + self.spare.sum(0) if name == "s" else torch.tanh(getattr(self, name)(x))
        return self.last(x)


def _along(*paths: str) -> Any:
    """A run in which rank r takes the path number r (the last one for ranks beyond)."""
    def run(model: Any, rank: int, step: int) -> Tensor:
        return model(points(rank, step)[0], paths[min(rank, len(paths) - 1)]).square().mean()
    return run


def _inner(model: Any) -> list[nn.Module]:
    return [model.a, model.b, model.c]


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("over", ["shared", "group"])
def test_A26_paths_through_the_units(front: str, strategy: str, over: str, rank: int, world: int) -> None:
    """A unit twice or three times in a forward, units left out, parameters unused everywhere (None)
    or used on one rank only (the same gradient on all)."""
    with transport(over):
        twins = Twins(Parts, front, (rank, world), inner=_inner, strategy=strategy)
    for path in (["abc"], ["aba"], ["aaab"], ["c"], ["", "s"], ["abcs", "abc"], ["bca"]):
        twins.run = _along(*path)
        twins.train(1)


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_A26_used_on_some_ranks_of_four(front: str, rank: int, world: int) -> None:
    twins = Twins(Parts, front, (rank, world), inner=_inner)
    for paths in (["abc", "abcs", "abc"], ["abcs", "abc", "abc", "abcs"], ["abc"]):
        twins.run = _along(*paths)
        twins.train(1)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A26_used_on_one_rank_with_accumulation(front: str, rank: int, world: int) -> None:
    """Used in the unsent micro-batch of one rank only."""
    twins = Twins(Parts, front, (rank, world), inner=_inner)
    for paths in (["abcs", "abc"], ["abc", "abcs"]):
        twins.run = _along(*paths)
        with unsynced(twins.model, front):
            twins.backward(0)
        twins.run = _along("abc")
        twins.backward(1)
        twins.check_gradients()
        twins.update()
        twins.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_forwards_before_a_backward(front: str, strategy: str, rank: int, world: int) -> None:
    """Of one sum, and of two backwards one behind the other."""
    twins = Twins(Parts, front, (rank, world), inner=_inner, strategy=strategy)
    twins.backward(0, runs=[_along("abc"), _along("cb"), _along("aas")])
    twins.check_gradients()
    twins.update()
    twins.check_parameters()
    for model, ranks_ in ((twins.model, [rank]), (twins.plain, range(world))):
        values = [_along(path)(model, r, 5) / len(ranks_) for r in ranks_ for path in ("abc", "ca")]
        for value in values:
            value.backward()
    twins.check_gradients()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_forward_without_grad_between(front: str, rank: int, world: int) -> None:
    """Units entered many times, partly without grad; evaluation between forward and backward."""
    def run(model: Any, rank: int, step: int) -> Tensor:
        x = points(rank, step)[0]
        with torch.no_grad():
            target = model(x, "cab")
        value = (model(x) - target).square().mean()
        with torch.no_grad():
            model(x, "a")
        return value

    Twins(Parts, front, (rank, world), inner=_inner, run=run).train(3)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("inference", [False, True])
def test_evaluation_equals_training_forward(front: str, inference: bool, rank: int) -> None:
    """After training; in inference mode first of all, too."""
    plain = TinyMLP()
    model = shard(plain, front, [plain.middle])
    inputs = points(rank, 0)[0]
    with torch.inference_mode(inference), torch.no_grad():
        first = model(inputs)
    loss(model, points(rank, 1)).backward()
    torch.testing.assert_close(first.clone(), TinyMLP()(inputs))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = model(inputs)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(inputs), trained)
    loss(model, points(rank, 2)).backward()


class Pair(NamedTuple):
    """An output with names."""

    first: Tensor
    second: dict[str, list[Tensor]]


@dataclass
class Held:
    """An output as a dataclass."""

    value: Tensor
    note: str


class Nested(nn.Module):
    """Inputs and outputs in containers, on all of which a backward may start."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind, self.a, self.b = kind, nn.Linear(5, 5), nn.Linear(5, 3)
        self.inner = Inner(kind)

    def forward(self, box: Any, *, scale: Tensor) -> Any:
        return self.inner({"x": [self.a(box["rows"][0]) * scale], "y": (self.b(box["rows"][1]),)})


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(5, 3)

    def forward(self, box: Any) -> Any:
        value = self.layer(box["x"][0]) + box["y"][0]
        return {"tensor": value, "list": [value], "dict": {"v": value, "n": None},
                "named": Pair(value, {"all": [value]}), "dataclass": Held(value, "x")}[self.kind]


def _value(output: Any) -> Tensor:
    if isinstance(output, Pair):
        return output.second["all"][0]
    if isinstance(output, Held):
        return output.value
    return output["v"] if isinstance(output, dict) else output[0] if isinstance(output, list) else output


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "named", "dataclass"])
def test_A38_containers_as_inputs_and_outputs(front: str, kind: str, rank: int, world: int) -> None:
    def run(model: Any, rank: int, step: int) -> Tensor:
        rows = points(rank, step)[0]
        output = model({"rows": (rows, rows + 1), "n": 3}, scale=torch.tensor(0.5))
        return _value(output).square().mean()

    Twins(lambda: Nested(kind), front, (rank, world), inner=lambda m: [m.a, m.inner], run=run).train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_an_output_that_the_loss_does_not_use(front: str, rank: int, world: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.body, self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.body(x)
            return self.left(x), self.right(x)

    twins = Twins(Two, front, (rank, world), inner=lambda m: [m.body, m.left, m.right],
                  run=lambda m, r, s: m(points(r, s)[0])[s % 2].square().mean())
    twins.train(3)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_U90_activation_checkpointing(front: str, reentrant: bool, rank: int, world: int) -> None:
    """Around units and inside them."""
    class Saved(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            x = torch.tanh(checkpoint(self.inward, x, use_reentrant=reentrant))
            return self.outward(torch.tanh(checkpoint(self.middle, x, use_reentrant=reentrant)))

    for inner in (lambda m: [m.inward, m.middle], lambda m: []):
        for strategy in STRATEGIES:
            Twins(Saved, front, (rank, world), inner=inner, strategy=strategy).train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_input_gradients(front: str, rank: int) -> None:
    plain = TinyMLP()
    model = shard(plain, front, [plain.inward, plain.middle], "FULL_SHARD")
    ours, theirs = (points(rank, 0)[0].requires_grad_() for _ in range(2))
    model(ours).sum().backward()
    TinyMLP()(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


class _Stop(Exception):
    pass


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@pytest.mark.filterwarnings("ignore:shardwise. the last backward did not finish")
def test_C22_U8_after_an_exception_the_next_step_is_right(
    front: str, where: str, rank: int, world: int
) -> None:
    twins = Twins(Parts, front, (rank, world), inner=_inner)
    twins.run = _along("abc")
    twins.train(1)

    def stop(*_: object) -> None:
        raise _Stop

    inside = twins.model.module if front != "fully_shard" else twins.model
    if where == "forward":
        handle = inside.b.register_forward_pre_hook(stop)
        with pytest.raises(_Stop):
            twins.run(twins.model, rank, 1)
        handle.remove()
    else:
        value = twins.run(twins.model, rank, 1)
        if where == "backward":
            inputs: list[Tensor] = []
            handle = inside.b.register_forward_hook(lambda m, a, out: inputs.append(out.register_hook(stop)))
            value = twins.run(twins.model, rank, 1)
            handle.remove()
            with pytest.raises(_Stop):
                value.backward()
            twins.model.zero_grad()
        del value
    twins.train(2)
    assert sum(unit.gather.nbytes for unit in units(twins.model).values()) == 0


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_part_alone_after_the_root(front: str, rank: int, world: int) -> None:
    """Root first, then a unit below it by itself, then both in one graph."""
    def part(model: Any, rank: int, step: int) -> Tensor:
        return model.b(points(rank, step)[0]).square().mean()

    def both(model: Any, rank: int, step: int) -> Tensor:
        return part(model, rank, step) + _along("ab")(model, rank, step)

    twins = Twins(Parts, front, (rank, world), inner=_inner)
    for run in (_along("abc"), part, both, _along("cba")):
        twins.run = run
        twins.train(1)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_unit_runs_before_its_root_does(front: str, rank: int, world: int) -> None:
    """B21: a unit that ran by itself joins the root's session later."""
    twins = Twins(Parts, front, (rank, world), inner=_inner,
                  run=lambda m, r, s: m.b(points(r, s)[0]).square().mean())
    twins.train(1)
    twins.run = _along("abc")
    twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_retained_graphs(front: str, rank: int, world: int) -> None:
    """Two backwards through one graph."""
    twins = Twins(Parts, front, (rank, world), inner=_inner)
    run = _along("abc")
    mine = run(twins.model, rank, 0)
    whole = torch.stack([run(twins.plain, r, 0) for r in range(world)]).mean()
    for value in (mine, whole):
        value.backward(retain_graph=True)
        value.backward()
    twins.check_gradients()


@ranks(1)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_takes_the_same_path(front: str, strategy: str, rank: int, world: int) -> None:
    twins = Twins(Parts, front, (rank, world), inner=_inner, strategy=strategy)
    for path in ("abc", "aba", "c"):
        twins.run = _along(path)
        twins.train(1)
