"""Edits at rest in every setting: values, gradients, ties, one rank only (rows A18-A20, C1, U16, U17)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import MixedPrecision, MixedPrecisionPolicy
from shardwise.errors import LifecycleError, WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, full_parameters, shard, units
from tests.bed.models import TinyMLP, loss, points
from tests.bed.training import Twins

fronts = pytest.mark.parametrize("front", FRONTS)
VISIBLE = ("orig", "fully_shard")


def _twins(front: str, rank: int, world: int, **arguments: Any) -> Twins:
    return Twins(TinyMLP, front, (rank, world), inner=lambda model: [model.middle], **arguments)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@ranks(2)
@fronts
def test_A20_edits_of_the_originals(rank: int, world: int, front: str) -> None:
    """``.data =`` and a new Parameter, whole, in flat mode too (where they are attributes)."""
    twins = _twins(front, rank, world)
    for model in (twins.model, twins.plain):
        model.inward.weight.data = _random(7, 5)  # type: ignore[union-attr]
        model.middle.weight = nn.Parameter(_random(3, 7))  # type: ignore[union-attr]
    inputs, _ = points(rank, 0)
    with torch.no_grad():
        torch.testing.assert_close(twins.model(inputs), twins.plain(inputs))
    twins.check_parameters(bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_A20_where_parameters_stay_gathered(rank: int, world: int, front: str, strategy: str) -> None:
    """An edit after a forward that left its unit gathered is seen by the next one."""
    if front == "fully_shard" and strategy == "NO_SHARD":
        return
    twins = _twins(front, rank, world, strategy=strategy)
    inputs, _ = points(rank, 0)
    twins.backward()
    for edit in range(3):
        twins.model(inputs).sum()  # no backward: it stays gathered
        with torch.no_grad():
            for model in (twins.model, twins.plain):
                if edit == 0:
                    for parameter in model.parameters():
                        parameter.mul_(1.25)
                elif edit == 1:
                    model.inward.weight.data = _random(7, 5)  # type: ignore[union-attr]
                else:
                    model.outward.weight = nn.Parameter(_random(1, 3))  # type: ignore[union-attr]
        torch.testing.assert_close(twins.model(inputs), twins.plain(inputs))
    twins.check_parameters()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A20_mixed_precision_keeps_the_masters_value(rank: int, world: int, front: str) -> None:
    """The stored parameter takes what was assigned, not its cast."""
    precision: dict[str, Any] = (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if front == "fully_shard"
        else {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)})
    model: Any = shard(TinyMLP(), front, **precision)
    model.inward.weight.data = _random(7, 5) / 3
    with torch.no_grad():
        model(points(rank, 0)[0])
    assert torch.equal(full_parameters(model, ["inward.weight"])["inward.weight"], _random(7, 5) / 3)
    model.inward.weight.data = _random(7, 5).bfloat16()
    with pytest.raises(WritebackError, match=r"Cannot writeback.*float32 on cpu.*bfloat16 on cpu"):
        model(points(rank, 0)[0])


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A20_a_gradient_that_the_user_sets(rank: int, world: int, front: str) -> None:
    """The optimizer uses it, and the next backward adds to it."""
    twins = _twins(front, rank, world)
    twins.backward()
    for parameter in (*twins.model.parameters(), *twins.plain.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5)
    twins.backward(1)
    twins.check_gradients()
    twins.update()
    twins.check_parameters()


@ranks(2)
@fronts
def test_A19_one_rank_only(rank: int, world: int, front: str) -> None:
    """The rank that cannot take an edit over raises; the others get an error instead of a hang."""
    model: Any = shard(TinyMLP(), front)
    model(points(rank, 0)[0])
    if rank == 1:
        model.inward.weight.data = torch.zeros(2, 2)
        with pytest.raises(WritebackError, match="Cannot writeback"):
            model(points(rank, 0)[0])
        model.inward.weight.data = torch.zeros(7, 5)
    model(points(rank, 0)[0])  # rank 0 waited here for the forward that came to be


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A20_data_on_one_rank_only(rank: int, world: int, front: str) -> None:
    """Only that rank's rows change."""
    model: Any = shard(TinyMLP(), front)
    before = full_parameters(model, ["inward.weight"])["inward.weight"]
    if rank == 1:
        model.inward.weight.data = torch.zeros(7, 5)
    with torch.no_grad():
        model(points(rank, 0)[0])
    after = full_parameters(model, ["inward.weight"])["inward.weight"]
    mine = units(model)[""].storages[0].layout.span(0, 0).numel
    assert torch.equal(after.view(-1)[:mine], before.view(-1)[:mine])
    assert not after.view(-1)[mine:].any()


class _TwoHeads(nn.Module):
    """Two layers of one shape, in the root or in units of their own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def _run(model: Any, rank: int, step: int) -> Tensor:
    return model(points(rank, step)[0]).pow(2).mean()


@ranks(2)
@fronts
@pytest.mark.parametrize("apart", [True, False])
def test_A41_two_names_made_one(rank: int, world: int, front: str, apart: bool) -> None:
    """The name is tied from then on: one parameter, gradients summed once."""
    twins = Twins(_TwoHeads, front, (rank, world), run=_run,
                  inner=lambda model: [model.one, model.other] if apart else [])
    twins.backward()
    for model in (twins.model, twins.plain):
        model.zero_grad()
        model.other.weight = model.one.weight  # type: ignore[union-attr]
    twins.names.remove("other.weight")
    for _ in range(2):
        twins.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twins.plain, twins.model)]
        twins.train(1)
    model: Any = twins.model
    assert model.other.weight is model.one.weight


class _Tied(_TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.one.weight


@ranks(2)
@fronts
@pytest.mark.parametrize("apart", [True, False])
def test_A41_one_name_made_two(rank: int, front: str, apart: bool) -> None:
    """Refused under one name, with both names; honoured under all of them."""
    module = _Tied()
    model: Any = shard(module, front, [module.one, module.other] if apart else [])
    old = model.one.weight
    model.other.weight = nn.Parameter(_random(5, 5))
    with pytest.raises(WritebackError, match=r"under one of its names only .*weight.*weight"):
        model(points(rank, 0)[0])
    if front == "flat":
        return
    model.other.weight = old
    model(points(rank, 0)[0]).sum().backward()
    both = nn.Parameter(_random(5, 5))
    model.one.weight = model.other.weight = both
    model(points(rank, 0)[0]).sum().backward()
    plain = _Tied()
    plain.one.weight = plain.other.weight = nn.Parameter(_random(5, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(points(rank, 3)[0]), plain(points(rank, 3)[0]))


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A41_a_tie_of_two_shapes_is_refused(rank: int, front: str) -> None:
    model: Any = shard(TinyMLP(), front)
    model.middle.weight = model.inward.weight
    with pytest.raises(WritebackError, match=r"'middle.weight' was tied to 'inward.weight'"):
        model(points(rank, 0)[0])


@ranks(2)
@fronts
def test_A20_a_kept_value_is_not_overwritten(rank: int, front: str) -> None:
    """``keep = p.data; p.data = other``: ``keep`` has the old values after the edit is taken over."""
    model = shard(TinyMLP(), front)
    kept = [p.data for p in model.parameters()]
    values = [value.clone() for value in kept]
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    with torch.no_grad():
        model(points(rank, 0)[0])
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
    loss(model, points(rank, 0)).backward()


def _double(model: Any, name: str, **options: bool) -> None:
    with shardwise.summon_full_params(model, **options), torch.no_grad():
        path, _, local = name.rpartition(".")
        if not options.get("rank0_only") or dist.get_rank() == 0:
            getattr(model.get_submodule(path), local).mul_(2.0)


def _look(model: Any) -> None:
    with shardwise.summon_full_params(model):
        pass


BETWEEN: dict[str, tuple[Callable[[Any], object], bool]] = {
    "an edit in a summon": (lambda model: _double(model, "middle.weight"), True),
    "of a unit's last parameter": (lambda model: _double(model, "outward.bias"), True),
    "of the first rank": (lambda model: _double(model, "outward.bias", rank0_only=True), True),
    "that is not kept": (lambda model: _double(model, "inward.weight", writeback=False), False),
    "a summon that only reads": (_look, False),
    "a load": (lambda model: model.load_state_dict(model.state_dict()), True),
}


@ranks(2)
@fronts
@pytest.mark.parametrize("what", BETWEEN)
def test_A2_values_change_between_forward_and_backward(rank: int, world: int, front: str, what: str) -> None:
    """Noticed on every rank, whichever parameter it was; a look at them is no change."""
    twins, (change, refused) = _twins(front, rank, world, strategy="FULL_SHARD"), BETWEEN[what]
    late = loss(twins.model, points(rank, 1))
    change(twins.model)
    if not refused:
        late.backward()
        return
    with pytest.raises(LifecycleError, match=r"changed between a forward and its backward.*load or edit parameters"):
        late.backward()
    with pytest.warns(RuntimeWarning, match="did not finish"):
        loss(twins.model, points(rank, 2)).backward()


@ranks(2)
@fronts
@pytest.mark.parametrize("places", [(0, 1), (1,)])
def test_A18_data_between_forward_and_backward(rank: int, world: int, front: str, places: tuple[int, ...]) -> None:
    """A whole value, of every rank or one: the gradient is that of the forward, as torch gives it too."""
    twins = _twins(front, rank, world)
    twins.train(1)
    late = loss(twins.model, points(rank, 0))
    if rank in places:
        twins.model.inward.weight.data = _random(7, 5)
    late.backward()
    for one in range(world):
        (loss(twins.plain, points(one, 0)) / world).backward()
    twins.check_gradients()
    if places == (0, 1):
        twins.plain.inward.weight.data = _random(7, 5)  # type: ignore[union-attr]
        twins.update()
        twins.check_parameters()


def _assign(model: Any) -> None:
    model.outward.weight.data = torch.full((1, 3), 0.25)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.outward.bias.fill_(0.5)


@ranks(2)
@pytest.mark.parametrize("change", [_assign, _in_place])
@pytest.mark.parametrize("again", [False, True])
def test_A18_a_change_after_unshard(rank: int, world: int, change: Any, again: bool) -> None:
    """What ``unshard`` gathered is not taken for the parameters of the next forward, if they have changed."""
    twins = _twins("fully_shard", rank, world)
    twins.model.unshard()
    change(twins.plain), change(twins.model)
    if again:
        twins.model.unshard()
    with torch.no_grad():
        torch.testing.assert_close(twins.model(points(rank, 0)[0]), twins.plain(points(rank, 0)[0]))
    twins.train(1)


@ranks(2, 3)
@pytest.mark.parametrize("front", VISIBLE)
def test_A20_the_same_memory_in_another_layout(rank: int, world: int, front: str) -> None:
    """``.data =`` a view that begins where the rows do: honoured, or refused by its shape, before it is used."""
    torch.manual_seed(5)
    model: Any = shard(nn.Linear(4, 4, bias=False), front)
    inputs = torch.eye(4)
    whole = full_parameters(model, ["weight"])["weight"]
    rows = model.weight.data
    model.weight.data = rows.flip(0).T.contiguous().T.flip(0)  # other strides elsewhere: the control
    torch.testing.assert_close(model(inputs), whole.T)
    rows = model.weight.data
    if rows.shape[0] == 4:
        model.weight.data = rows.T
        whole = whole.T
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, whole if rows.shape[0] == 4 else None)
    expected = next((value for value in everyone if value is not None), whole)
    torch.testing.assert_close(model(inputs), expected.T)
    kept = model.weight.data
    if kept.numel():
        model.weight.data = kept.view(-1)
        with pytest.raises(WritebackError, match="the shape changed"):
            model(inputs)
        model.weight.data = kept
    torch.testing.assert_close(model(inputs), expected.T)
