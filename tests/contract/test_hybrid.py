"""Hybrid sharding: shard inside a group, replicate across groups; and parts kept after forward.

Rows U47 (hybrid), U49 (``reshard_after_forward`` as a number), U59 (reduce-scatter without
all-reduce), and groups that differ between the units of a model.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy, fully_shard
from shardwise.errors import ConfigurationError
from shardwise.frontend import wrapper_options
from shardwise.storage.sharded_parameter import home_of
from shardwise.wrap import ModuleWrapPolicy
from tests.bed import ranks
from tests.bed.fronts import counted, full_gradients, full_parameters, on_streams, shard, units
from tests.bed.parity import assert_same_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.b0 = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.b1 = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b1(self.b0(self.inward(x))))


def _model() -> Net:
    torch.manual_seed(3)
    return Net()


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(model: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        model(_data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cache
def _unsharded(world: int) -> dict[str, Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        for rank in range(world):
            (model(_data(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@cache
def _single() -> dist.ProcessGroup:
    """A group of this rank alone."""
    group, _ = dist.new_subgroups(1)
    assert group is not None
    return group


def _as(form: str) -> dict[str, Any]:
    if form == "pair":
        return {"process_group": (_mesh().get_group("shard"), _mesh().get_group("replicate"))}
    return {"device_mesh": _mesh()} if form == "mesh" else {}


def _expect_as_unsharded(model: nn.Module, world: int) -> None:
    expected = _unsharded(world)
    assert_same_tensors(full_parameters(model, list(expected)), expected, "parameter", rtol=1e-5, atol=1e-6)


@ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("front", ["orig", "flat"])
def test_U47_the_wrapper_trains_as_unsharded(front: str, strategy: str, rank: int) -> None:
    for form in ("pair", "mesh"):
        model = _model()
        model = shard(model, front, [model.b0, model.b1], strategy, **_as(form))
        for unit in units(model).values():
            assert unit.groups.shard.size == unit.groups.replicate.size == 2
            assert unit.settings.reshard_after_forward is (strategy == "HYBRID_SHARD")
        _train(model, rank)
        _expect_as_unsharded(model, 4)


@ranks(4)
def test_U47_groups_by_node(rank: int) -> None:
    """Without groups, ranks of one node shard, and nodes are replicas."""
    wrapper_options._NODE_GROUPS.clear()
    model = _model()
    with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}):
        wrapped = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    wrapper_options._NODE_GROUPS.clear()
    assert len(units(wrapped)) == 3
    for unit in units(wrapped).values():
        assert unit.groups.shard.members == ((0, 1) if rank < 2 else (2, 3))
        assert unit.groups.replicate.members == (rank % 2, rank % 2 + 2)
    _train(wrapped, rank)
    _expect_as_unsharded(wrapped, 4)


@ranks(4)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_U47_fully_shard_on_a_mesh_of_two_dims(reshard: bool | None, rank: int) -> None:
    model = _model()
    for module in (model.b0, model.b1, model):
        fully_shard(module, mesh=_mesh(), reshard_after_forward=reshard)
    _train(model, rank)
    _expect_as_unsharded(model, 4)


@ranks(4)
def test_U47_each_unit_reduces_once_in_each_group(rank: int) -> None:
    with counted() as traffic:
        model = _model()
        for module in (model.b0, model.b1, model):
            fully_shard(module, mesh=_mesh(), reshard_after_forward=True)
        model(_data(rank)).sum().backward()
        traffic.clear()
        model(_data(rank)).sum().backward()
    assert traffic.count("all_gather") == 3 + (2 if on_streams() else 3)  # there the last unit is still gathered
    assert traffic.count("reduce_scatter") == 3
    gradients = [call for call in traffic.calls if call.operation == "all_reduce" and call.tag % 4 == 2]
    assert len(gradients) == 3


@ranks(4)
def test_U47_states_are_spread_over_both_groups(rank: int) -> None:
    torch.manual_seed(100 + rank)
    model = Net()
    model.register_buffer("level", torch.full((3,), float(rank)))
    names = _names(model)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, first)
    wrapped = FullyShardedDataParallel(
        model, device_mesh=_mesh(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True,
        sync_module_states=True)
    assert_same_tensors(full_parameters(wrapped, names), everyone[0], "parameter", bitwise=True)
    assert model.level.tolist() == [0.0, 0.0, 0.0]


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_U47_shard_groups_of_one_rank(front: str, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = _model()
    if front == "orig":
        model = shard(model, front, [model.b0, model.b1], "HYBRID_SHARD", device_mesh=mesh)
    else:
        for module in (model.b0, model.b1, model):
            fully_shard(module, mesh=mesh)
    _train(model, rank)
    _expect_as_unsharded(model, 2)


@ranks(4)
def test_U59_reduce_scatter_without_all_reduce(rank: int) -> None:
    """Micro-batches are reduced in the shard group; replicas meet once, in the last of them."""
    with counted() as traffic:
        model = _model()
        for module in (model.b0, model.b1, model):
            fully_shard(module, mesh=_mesh())
        plain = _model()
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            traffic.clear()
            model(_data(rank, micro)).square().mean().backward()
            assert traffic.count("reduce_scatter") == 3
            assert len([c for c in traffic.calls if c.operation == "all_reduce" and c.tag % 4 == 2]) == (
                3 if micro == 2 else 0)
            if micro < 2:
                assert all(p.grad is None for p in model.parameters())
            for other in range(4):
                (plain(_data(other, micro)).square().mean() / 4).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)


class Choosing(Net):
    """Uses ``b0`` only where it is told to."""

    use = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        return self.head(self.b1(self.b0(h) if self.use else h))


@ranks(4)
def test_U59_a_parameter_that_one_rank_used_in_an_early_micro_batch(rank: int) -> None:
    torch.manual_seed(3)
    model, plain = Choosing(), Net()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=_mesh())
    model.set_requires_all_reduce(False)
    model.use = rank == 1
    model(_data(rank, 0)).square().mean().backward()
    model.set_requires_all_reduce(True)
    model.use = False
    model(_data(rank, 1)).square().mean().backward()
    (plain(_data(1, 0)).square().mean() / 4).backward()
    names = ["b0.0.weight", "b0.2.weight", "b0.2.bias"]
    expected = {name: dict(plain.named_parameters())[name].grad for name in names}
    assert_same_tensors(full_gradients(model, names), expected, "gradient", rtol=1e-5, atol=1e-6)


@ranks(4)
@pytest.mark.parametrize("mixed", [False, True])
def test_U49_parts_are_kept_after_forward(mixed: bool, rank: int) -> None:
    """A number: backward gathers among neighbours only, from what each kept."""
    if on_streams():
        pytest.skip("counts what is freed at once")
    model = _model()
    if mixed:
        model.b0[2].to(torch.bfloat16).requires_grad_(False)  # a second flat parameter in the unit
        model.b0.insert(2, _Cast(torch.bfloat16))
        model.b0.append(_Cast(torch.float32))
    plain: Any = copy.deepcopy(model)
    with counted() as traffic:
        for module in (model.b0, model.b1, model):
            fully_shard(module, reshard_after_forward=2)
        model(_data(0)).square().mean().backward()
        model.zero_grad()
        traffic.clear()
        value = model(_data(0)).square().mean()
        assert traffic.count("all_gather") == 3
        held = shardwise.memory_of(model).gathered
        whole = sum(unit.gathered_bytes for unit in shardwise.plan_of(model).units)
        assert held == whole / 2
        assert traffic.wire_bytes("all_gather") == whole * 3 / 4
        traffic.clear()
        value.backward()
        assert shardwise.memory_of(model).gathered == 0
    assert traffic.count("all_gather") == 0  # neighbours send each other what they kept
    plain(_data(0)).square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", bitwise=True)


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@ranks(4)
def test_U49_training_sees_every_step_of_the_optimizer(rank: int) -> None:
    model = _model()
    for module in (model.b0, model.b1, model):
        fully_shard(module, reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        value = model(_data(rank, step)).square().mean()
        with torch.no_grad():
            model(_data(rank, 9))  # what was kept is dropped; backward gathers anew
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(_data(rank, 8))  # kept, and out of date after the next step
    _expect_as_unsharded(model, 4)


@ranks(4)
def test_U49_one_and_all_are_the_plain_choices(rank: int) -> None:
    for number, choice in ((1, False), (4, True)):
        (unit,) = units(fully_shard(nn.Linear(3, 3), reshard_after_forward=number)).values()
        assert unit.settings.reshard_after_forward is choice
        assert unit.gather.small is None
    with pytest.raises(ConfigurationError, match=r"(?s)does not divide.*a factor of 4.*3"):
        fully_shard(nn.Linear(3, 3), reshard_after_forward=3)


class Experts(Net):
    """``b0`` belongs to this rank alone; the rest is data-parallel."""


@ranks(2)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_experts_on_their_own_group(front: str, rank: int) -> None:
    """Each gradient is divided by the ranks of its own unit's group, and the norm is that of all."""
    torch.manual_seed(3)
    model = Experts()
    with torch.no_grad():
        model.b0[0].weight.add_(rank)  # experts differ
    plains = [_expert(other) for other in range(2)]
    if front == "orig":
        model.b0 = FullyShardedDataParallel(model.b0, process_group=_single(), use_orig_params=True,
                                            sharding_strategy=ShardingStrategy.NO_SHARD)
        wrapped: Any = FullyShardedDataParallel(model, use_orig_params=True)
    else:
        mesh = DeviceMesh.from_group(_single(), "cpu")
        fully_shard(model.b0, mesh=mesh)
        wrapped = fully_shard(model)
    for other, plain in enumerate(plains):
        plain(_data(other)).square().mean().backward()
    wrapped(_data(rank)).square().mean().backward()
    expected = {name: p.grad if name.startswith("b0") else (p.grad + q.grad) / 2 for (name, p), q in
                zip(plains[rank].named_parameters(), plains[1 - rank].parameters(), strict=True)}
    assert_same_tensors(full_gradients(wrapped, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)
    shared = sum(g.square().sum() for name, g in expected.items() if not name.startswith("b0"))
    own = sum(p.grad.square().sum() for plain in plains for p in plain.b0.parameters())
    norm = shardwise.clip_grad_norm(wrapped.parameters(), 1e9)
    mine = sum(p.grad.square().sum() for p in plains[rank].b0.parameters())
    assert any(math.isclose(float(norm) ** 2, float(shared + part), rel_tol=1e-4) for part in (own, mine))


def _expert(rank: int) -> Experts:
    torch.manual_seed(3)
    model = Experts()
    with torch.no_grad():
        model.b0[0].weight.add_(rank)
    return model


def test_a_pair_is_needed_and_only_for_hybrid() -> None:
    """Neither groups nor a policy is refused, and so is a single group."""
    with pytest.raises(ConfigurationError, match=r"a hybrid strategy needs groups, or an auto_wrap_policy"):
        FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(ConfigurationError, match="needs two groups"):
        FullyShardedDataParallel(
            nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(object(),))  # type: ignore


@ranks(2)
def test_every_parameter_knows_its_home(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(3, 5), mesh=mesh)
    for parameter in model.parameters():
        home = home_of(parameter)
        assert home is not None
        assert home[0].world_size == 2


def _freeze(model: Any, *, frozen: bool = True) -> None:
    for name in ("b0.0.weight", "head.bias"):
        model.get_parameter(name).requires_grad_(not frozen)


def _thaw(model: Any) -> None:
    _freeze(model, frozen=False)


def _add(model: Any) -> None:
    torch.manual_seed(5)
    model.b0.append(nn.Linear(6, 6))


@ranks(4)
@pytest.mark.parametrize("unsent", [False, True])
@pytest.mark.parametrize("changes", [(_freeze, _thaw), (_thaw, _freeze), (_add, _freeze)])
def test_U59_other_parameters_trained_while_sums_wait_for_the_replicas(changes: Any, unsent: bool, rank: int) -> None:
    """The sums that wait are of the parameters that were trained then."""
    model, plain = _model(), _model()
    for each in (model, plain):
        _freeze(each, frozen=changes[0] is _thaw)
    for module in (model.b0, model.b1, model):
        fully_shard(module, mesh=_mesh())
    for turn in range(2):
        for micro, change in enumerate((*changes, None)):
            model.set_requires_gradient_sync(micro == 2 or not (unsent and micro == turn))
            model.set_requires_all_reduce(micro == 2)
            model(_data(rank, micro)).square().mean().backward()
            for other in range(4):
                (plain(_data(other, micro)).square().mean() / 4).backward()
            if change is not None and not (turn and change is _add):
                for each in (model, plain):
                    change(each)
        expected = {name: p.grad for name, p in plain.named_parameters()}
        assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)
        model.zero_grad()
        plain.zero_grad()


@ranks(4)
@pytest.mark.parametrize("frozen", [False, True])
def test_U59_a_unit_that_is_not_in_the_last_micro_batch(frozen: bool, rank: int) -> None:
    """Its sums meet those of the replicas all the same."""
    torch.manual_seed(3)
    model, plain = Choosing(), Choosing()
    plain.load_state_dict(model.state_dict())
    for module in (model.b0, model.b1, model):
        fully_shard(module, mesh=_mesh())
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        for each in (model, plain):
            each.use = frozen or micro == 0
            each.b0.requires_grad_(not frozen or micro == 0)
        model(_data(rank, micro)).square().mean().backward()
        for other in range(4):
            (plain(_data(other, micro)).square().mean() / 4).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)


@ranks(4)
def test_U58_U59_zero_grad_of_an_optimizer_forgets_sums_that_wait_for_the_replicas(rank: int) -> None:
    model, plain = _model(), _model()
    for module in (model.b0, model.b1, model):
        fully_shard(module, mesh=_mesh())
    parts = [list(model.b0.parameters()) + list(model.head.parameters()), list(model.b1.parameters())]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    for optimizer in optimizers:
        optimizer.step()  # it is noticed
    model.set_requires_all_reduce(False)
    model(_data(rank, 0)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.zero_grad()
    model.set_requires_all_reduce(True)
    model(_data(rank, 1)).square().mean().backward()
    for other in range(4):
        (plain(_data(other, 1)).square().mean() / 4).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if not name.startswith("inward")}
    assert_same_tensors(full_gradients(model, list(expected)), expected, "gradient", rtol=1e-5, atol=1e-6)
