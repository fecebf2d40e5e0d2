"""Model state dicts: what they hold, on both front ends, for every kind and at any depth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from shardwise import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from shardwise.checkpoint import ShardedRecord
from shardwise.errors import CheckpointError, OptionTypeError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, odd, train
from tests.bed.fronts import FRONTS, WRAPPERS, shard, units
from tests.bed.models import OddTransformer, TinyMLP, TwinBuffers, batch, loss, points
from tests.bed.parity import assert_same_tensors

FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT,
                        StateDictType.LOCAL_STATE_DICT)
kind_of = FullyShardedDataParallel.state_dict_type


def plain_odd(seed: int = 0) -> OddTransformer:
    """The module that ``odd`` shards."""
    return OddTransformer(seed=seed, blocks=2)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Records gathered; all else as it is."""
    return {key: value.full_tensor() if isinstance(value, ShardedRecord) else value
            for key, value in state.items()}


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("front", FRONTS)
def test_keys_order_and_values_are_the_bare_modules(front: str, kind: StateDictType) -> None:
    """A9, A10, U68, U69: no flat key, no prefix; an ignored nothing; buffers uncopied."""
    model, bare = odd(front), plain_odd()
    before = {name: buffer for name, buffer in model.named_buffers()}
    with kind_of(model, kind):
        state = model.state_dict()
    assert_same_tensors(whole(state), bare.state_dict(), bitwise=True)
    for name, buffer in before.items():
        assert name not in state or state[name].data_ptr() == buffer.data_ptr()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_defaults(front: str) -> None:
    """The wrapper gives whole tensors, the composable front end records (as its peers)."""
    state = odd(front).state_dict()
    assert isinstance(state["embedding.weight"], ShardedRecord) == (front == "fully_shard")
    assert state["embedding.weight"].shape == (37, 21)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("front", FRONTS)
def test_values_are_the_trained_ones(front: str, strategy: str, rank: int, world: int) -> None:
    """U68: also between forward and backward, when parameters are gathered."""
    plain, model = TinyMLP(), TinyMLP()
    model = shard(model, front, [model.middle], strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, model)]
    for step in range(2):
        value = loss(model, points(rank, step))
        with kind_of(model, FULL):
            assert_same_tensors(model.state_dict(), plain.state_dict())
        value.backward()
        torch.stack([loss(plain, points(r, step)) for r in range(world)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with kind_of(model, FULL):
        assert_same_tensors(model.state_dict(), plain.state_dict())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_any_depth_and_any_plain_parent(front: str) -> None:
    """A16: a plain parent, a unit, a nested unit, and a module inside a unit."""
    bare = plain_odd()
    parent = nn.ModuleDict({"left": nn.Linear(3, 2), "right": odd(front)})
    with kind_of(parent, FULL):
        state = parent.state_dict()
        inner = parent["right"].blocks[1].state_dict(prefix="here.")
        below = parent["right"].blocks[1].attention.state_dict()
    assert_same_tensors({k.removeprefix("right."): v for k, v in state.items() if k.startswith("right.")},
                        bare.state_dict(), bitwise=True)
    assert list(state)[:2] == ["left.weight", "left.bias"]
    assert_same_tensors(inner, bare.blocks[1].state_dict(prefix="here."), bitwise=True)
    assert_same_tensors(below, bare.blocks[1].attention.state_dict(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_rank0_only(front: str, offload: bool, rank: int) -> None:
    """U71: other ranks take part and get an empty dict; training goes on."""
    model = odd(front)
    with kind_of(model, FULL, FullStateDictConfig(offload, rank0_only=True)):
        state = model.state_dict()
    if rank == 0:
        assert_same_tensors(state, plain_odd().state_dict(), bitwise=True)
    else:
        assert not state
    loss(model, batch(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_full_state_dict_is_a_copy_and_ties_share_memory(front: str, rank: int) -> None:
    """Tied weights under both names, once in memory, and not the model's."""
    model = odd(front)
    with kind_of(model, FULL):
        state = model.state_dict()
    kept = state["embedding.weight"].clone()
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["embedding.weight"].untyped_storage().nbytes() == kept.nbytes
    train(model, adamw(model), rank, range(1))
    assert torch.equal(state["embedding.weight"], kept)


class Twice(nn.Module):
    """A module under two names, a parameter under two names, in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.second = nn.Sequential(self.first[0], nn.Linear(5, 3))
        self.third = nn.Linear(5, 3)
        self.third.weight = self.second[1].weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.third(x)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_registered_twice(front: str) -> None:
    """A module and a parameter registered twice are saved under all names and loaded from any."""
    torch.manual_seed(3)
    bare = Twice()
    twin = copy.deepcopy(bare)
    model = shard(twin, front, [twin.first, twin.second] if front == "fully_shard" else [])
    with kind_of(model, FULL):
        state = model.state_dict()
    assert_same_tensors(state, bare.state_dict(), bitwise=True)
    assert len({state[k].data_ptr() for k in ("first.0.weight", "second.0.weight", "again.0.weight")}) == 1
    left_out = ("second.0", "again", "third.weight")
    once = {key: value + 1 for key, value in state.items() if not key.startswith(left_out)}
    once.pop("second.1.weight")
    once["third.weight"] = state["third.weight"] + 1
    assert not any(model.load_state_dict(once))
    with kind_of(model, FULL):
        assert_same_tensors(model.state_dict(), {k: v + 1 for k, v in bare.state_dict().items()})


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_checkpoint_wrappers_leave_no_trace(front: str) -> None:
    """A10, B7: activation checkpointing inside and outside of units."""
    bare = plain_odd()
    twin = plain_odd()
    twin.blocks[0].attention = checkpoint_wrapper(twin.blocks[0].attention)
    twin.blocks[1] = checkpoint_wrapper(twin.blocks[1])
    inner = [twin.blocks[0], twin.blocks[1]] if front == "fully_shard" else [twin.blocks[0]]
    model = shard(twin, front, inner)
    with kind_of(model, FULL):
        state = model.state_dict()
        assert_same_tensors(state, bare.state_dict(), bitwise=True)
        other = plain_odd(seed=7).state_dict()
        model.load_state_dict(other)
        assert_same_tensors(model.state_dict(), other, bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_buffers_are_exact_under_mixed_precision(front: str, rank: int) -> None:
    """C5, B1, B4, B9–B11: original dtype and value, by full name; afterwards the compute dtype is back."""
    bare, twin = TwinBuffers(), TwinBuffers()
    model = shard(twin, front, [twin.inner], mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1))
        now = dict(model.named_buffers())
        assert {b.dtype for b in now.values()} == {torch.float16}
        with kind_of(model, FULL):
            assert_same_tensors(model.state_dict(), bare.state_dict(), bitwise=True)
        assert all(buffer is now[name] for name, buffer in model.named_buffers())
    changed = {key: value / 3 for key, value in bare.state_dict().items()}
    model.load_state_dict(changed)
    assert {b.dtype for b in model.buffers()} == {torch.float16}
    with kind_of(model, FULL):
        assert_same_tensors(model.state_dict(), changed, bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_ignored_and_unsharded_parts_are_as_they_are(front: str) -> None:
    """Ignored parameters and an unwrapped root: uncopied, in their own dtype, under their own names."""
    bare = plain_odd()
    model = plain_odd()
    kept = model.adapter.weight
    ignored = {"ignored_params": {kept}} if front == "fully_shard" else {"ignored_states": [kept]}
    sharded = shard(model, front, **ignored)
    with kind_of(sharded, FULL):
        state = sharded.state_dict()
    assert state["adapter.weight"].data_ptr() == kept.data_ptr()
    assert_same_tensors(sorted(state.items()), sorted(bare.state_dict().items()), bitwise=True)
    root = plain_odd()
    for index, block in enumerate(root.blocks):
        root.blocks[index] = shard(block, front)
    with kind_of(root, FULL):
        assert_same_tensors(root.state_dict(), bare.state_dict(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_local_state_is_this_ranks_rows(front: str, rank: int) -> None:
    """U70: raw rows, no traffic, loadable into the same layout."""
    model, other = odd(front), odd(front, seed=5)
    with kind_of(model, LOCAL), kind_of(other, LOCAL):
        state = model.state_dict()
        assert list(state) == list(plain_odd().state_dict())
        assert sum(v.numel() for k, v in state.items() if "block" in k) < 5000 * 21
        other.load_state_dict(state)
        state["last.weight"] = torch.zeros(40)
        with pytest.raises(CheckpointError, match=r"size mismatch for last.weight.*this rank's rows"):
            other.load_state_dict(state)
    with kind_of(other, FULL):
        assert_same_tensors(other.state_dict(), plain_odd().state_dict(), bitwise=True)


@ranks(2)
def test_keep_vars_and_summon(rank: int) -> None:
    """``keep_vars`` keeps ``requires_grad``; inside ``summon_full_params`` the whole values are saved."""
    model = odd("orig")
    state = model.state_dict(keep_vars=True)
    assert state["last.weight"].requires_grad and not state["adapter.weight"].requires_grad
    with FullyShardedDataParallel.summon_full_params(model):
        with torch.no_grad():
            model.last.weight.add_(1)
        inside = model.state_dict()
    assert torch.equal(inside["last.weight"], plain_odd().last.weight + 1)
    assert torch.equal(model.state_dict()["last.weight"], inside["last.weight"])


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_hybrid_and_unsharded_strategies(front: str) -> None:
    """Replicas give the same; with a mesh of one rank, and NO_SHARD, records hold everything."""
    bare = plain_odd()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments = {"device_mesh": mesh, "strategy": "HYBRID_SHARD"}
    model = shard(plain_odd(), front, **({"mesh": mesh} if front == "fully_shard" else arguments))
    for kind in (FULL, SHARDED):
        with kind_of(model, kind):
            assert_same_tensors(whole(model.state_dict()), bare.state_dict(), bitwise=True)
    if front != "fully_shard":
        alone = shard(plain_odd(), front, strategy="NO_SHARD")
        with kind_of(alone, SHARDED):
            state = alone.state_dict()
        assert state["last.weight"].to_local().shape == (21,)
        assert_same_tensors(whole(state), bare.state_dict(), bitwise=True)


@ranks(2)
def test_choosing_the_kind() -> None:
    """Per instance and for the tree; a config of another type raises and changes nothing."""
    model = odd("orig")
    F = FullyShardedDataParallel
    assert F.get_state_dict_type(model).state_dict_type is FULL
    block = next(m for m in F.fsdp_modules(model) if m is not model)
    with F.state_dict_type(block, SHARDED), pytest.raises(CheckpointError, match="differ in their"):
        F.get_state_dict_type(model)
    before = F.set_state_dict_type(model, LOCAL, LocalStateDictConfig())
    assert before.state_dict_type is FULL and F.get_state_dict_type(block).state_dict_type is LOCAL
    with pytest.raises(OptionTypeError, match=r"config does not fit SHARDED.*ShardedStateDictConfig"):
        F.set_state_dict_type(model, SHARDED, FullStateDictConfig())
    with pytest.raises(OptionTypeError, match="optim_state_dict_config does not fit"):
        F.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(), FullOptimStateDictConfig())
    assert F.get_state_dict_type(model).state_dict_type is LOCAL
    with pytest.raises(CheckpointError, match="no sharded module"):
        F.get_state_dict_type(nn.Linear(2, 2))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_hooks_pre_and_postconditions(front: str) -> None:
    """A16: at every depth, the user's hooks see the final values, and the model is as it was."""
    model = odd(front)
    seen: list[tuple[str, bool]] = []
    for unit in units(model).values():
        def after(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
            own = [key for key in state if key.startswith(prefix)]
            seen.append((prefix, any("_flat" in key for key in own) or not own))
        unit.modules[0].register_state_dict_post_hook(after)
    parameters = list(model.parameters())
    with kind_of(model, FULL):
        model.state_dict()
    depths = {prefix.count(".") for prefix, bad in seen if not bad}
    assert depths >= {0, 2, 3} and len(seen) == len(units(model)) and not any(bad for _, bad in seen)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@ranks(2)
def test_a_custom_group(rank: int) -> None:
    """One-rank groups, and a group of some ranks."""
    groups = [dist.new_group([r]) for r in range(2)]
    model = fully_shard(TinyMLP(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    state = model.state_dict()
    assert groups and state["inward.weight"].to_local().shape == (7, 5)
    assert_same_tensors(whole(state), TinyMLP().state_dict(), bitwise=True)

