"""Which modules become units, and what is left alone (rows U25, U81, U84, A12's plain side)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import FullyShardedDataParallel, ShardingStrategy, wrap
from tests.bed import ranks
from tests.bed.fronts import WRAPPERS, shard, units
from tests.bed.models import OddBlock, OddFeedForward, OddTransformer, TinyMLP, batch, loss, points
from tests.bed.training import Twins


def _wrapped(policy: Any, model: nn.Module | None = None, **arguments: Any) -> Any:
    arguments = {"use_orig_params": True} | arguments
    return FullyShardedDataParallel(model or OddTransformer(blocks=2), auto_wrap_policy=policy, **arguments)


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, OddBlock)


BLOCKS = ["", "blocks.0", "blocks.1"]


@ranks(2)
def test_U84_policies_choose_units() -> None:
    """Class, function, size and custom policies, torch's keyword forms included."""
    policies: dict[str, tuple[Any, list[str]]] = {
        "classes": (wrap.ModuleWrapPolicy({OddBlock}), BLOCKS),
        "transformer": (
            partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={OddBlock}), BLOCKS),
        "lambda": (partial(wrap.lambda_auto_wrap_policy, lambda_fn=_is_block), BLOCKS),
        "custom": (wrap.CustomPolicy(_is_block), BLOCKS),
        "or": (partial(wrap.or_policy, policies=[wrap.ModuleWrapPolicy({OddBlock}),
                                                partial(wrap.transformer_auto_wrap_policy,
                                                        transformer_layer_cls={OddFeedForward})]),
               ["", "blocks.0", "blocks.0.feed_forward", "blocks.1", "blocks.1.feed_forward"]),
        "size": (partial(wrap.size_based_auto_wrap_policy, min_num_params=1300),
                 ["", "blocks.0.attention.mixing", "blocks.0.feed_forward",
                  "blocks.1.attention.mixing", "blocks.1.feed_forward"]),
    }
    for name, (policy, expected) in policies.items():
        found = sorted(units(_wrapped(policy)))
        if name == "size":
            assert found and all(sum(s.layout.flat_numel for s in unit.storages) >= 1300
                                 for unit in units(_wrapped(policy)).values())
        else:
            assert found == expected, name


@ranks(2)
def test_always_wrap_and_containers(rank: int) -> None:
    """Every module that has a forward; containers only warn."""
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    wrapped = _wrapped(wrap.always_wrap_policy, model)
    assert len(FullyShardedDataParallel.fsdp_modules(wrapped)) == 5
    loss(wrapped, (points(rank, 0)[0], torch.ones(4, 3))).backward()
    with pytest.warns(UserWarning, match="ModuleList has no forward of its own"):
        FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)]), use_orig_params=True)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_custom_policy_overrides(front: str, rank: int, world: int) -> None:
    """A unit with a strategy of its own, next to one that inherits."""
    def policy(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.Linear) and module.out_features == 7:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.Linear) and module.out_features == 3

    twins = Twins(TinyMLP, front, (rank, world), auto_wrap_policy=wrap.CustomPolicy(policy))
    settings = {n: u.settings.reshard_after_forward for n, u in units(twins.model).items()}
    assert settings == {"": True, "inward": False, "middle": True}
    twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_mixed_strategies_clip_and_train(front: str, rank: int, world: int) -> None:
    """One unit replicated, the rest sharded: the norm counts each once."""
    def policy(module: nn.Module) -> bool | dict[str, Any]:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD} if (
            isinstance(module, nn.Linear) and module.out_features == 7) else False

    twins = Twins(TinyMLP, front, (rank, world), auto_wrap_policy=wrap.CustomPolicy(policy))
    for step in range(3):
        twins.backward(step)
        expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05)
        torch.testing.assert_close(twins.model.clip_grad_norm_(0.05), expected)
        twins.check_gradients()
        twins.update()
        twins.check_parameters()


@ranks(2)
def test_wrapping_by_hand(rank: int) -> None:
    """``wrap`` inside ``enable_wrap`` uses the context's arguments and its own; outside it does nothing."""
    layer = nn.Linear(5, 5)
    assert wrap.wrap(layer) is layer
    with wrap.enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=False):
        flat = wrap.wrap(nn.Linear(5, 5))
        original = wrap.wrap(nn.Linear(5, 5), use_orig_params=True)
    assert [n for n, _ in flat.named_parameters()] == ["_flat_param"]
    assert [n for n, _ in original.named_parameters()] == ["weight", "bias"]
    model = FullyShardedDataParallel(nn.Sequential(flat, original, nn.Linear(5, 1)), use_orig_params=True)
    loss(model, points(rank, 0)).backward()
    assert model[0]._flat_param.grad is not None and model[1].weight.grad is not None


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("how", ["modules", "states", "parameters"])
def test_U25_ignored(front: str, how: str, rank: int, world: int) -> None:
    """Not sharded, not moved, not renamed; trained by whoever owns them."""
    plain = OddTransformer(blocks=1)
    feed = plain.blocks[0].feed_forward
    kept = {id(p) for p in feed.parameters()}
    argument: dict[str, Any] = {
        "modules": {"ignored_modules": [feed]}, "states": {"ignored_states": [feed]},
        "parameters": {"ignored_states": list(feed.parameters())}}[how]
    model = FullyShardedDataParallel(plain, use_orig_params=front == "orig",
                                     auto_wrap_policy=wrap.ModuleWrapPolicy({OddFeedForward, OddBlock}),
                                     **argument)
    whole = {n: p for n, p in model.named_parameters() if id(p) in kept}
    assert len(whole) == 4 and not any(map(shardwise.is_sharded, whole.values()))
    if front == "orig":
        assert all(n.startswith("blocks.0.feed_forward") for n in whole)
    loss(model, batch(rank, 0)).backward()
    reference = OddTransformer(blocks=1)
    loss(reference, batch(rank, 0)).backward()
    own = dict(reference.blocks[0].feed_forward.named_parameters())
    for name, p in feed.named_parameters():
        torch.testing.assert_close(p.grad, own[name].grad, msg=lambda text, name=name: f"{name}: {text}")


@ranks(2)
def test_ignored_modules_may_differ_between_ranks(rank: int) -> None:
    """What is ignored on one rank only must not be what others shard; here it has no parameters."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 1))
    wrapped = FullyShardedDataParallel(model, ignored_modules=[model[1 + rank]], use_orig_params=True)
    loss(wrapped, points(rank, 0)).backward()
    elsewhere = FullyShardedDataParallel(TinyMLP(), ignored_modules=[nn.Linear(1, 1)], use_orig_params=True)
    loss(elsewhere, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_U81_sync_module_states(front: str, rank: int) -> None:
    """Ranks that began with other values have rank 0's, buffers too."""
    plain = OddTransformer(seed=rank, blocks=1)
    model = FullyShardedDataParallel(plain, use_orig_params=front == "orig", sync_module_states=True,
                                     auto_wrap_policy=wrap.ModuleWrapPolicy({OddBlock}))
    expected = OddTransformer(seed=0, blocks=1)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(0, 0)[0]), expected.eval()(batch(0, 0)[0]))
    for (name, ours), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_device_id_is_for_every_unit(front: str, rank: int) -> None:
    model = FullyShardedDataParallel(OddTransformer(blocks=1), device_id=torch.device("cpu"),
                                     use_orig_params=front == "orig",
                                     auto_wrap_policy=wrap.ModuleWrapPolicy({OddBlock}))
    assert all(p.device.type == "cpu" for p in model.parameters())
    loss(model, batch(rank, 0)).backward()


@ranks(1)
def test_one_rank_warns() -> None:
    text = r"the group has one rank, so FULL_SHARD shards nothing \(as NO_SHARD\)"
    with pytest.warns(UserWarning, match=text):
        FullyShardedDataParallel(TinyMLP())


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_a_group_of_one_inside(front: str, rank: int, world: int) -> None:
    """Experts on groups of one rank inside a data-parallel model: their gradients stay this rank's,
    the outer reduction stays right."""
    alone = [torch.distributed.new_group([r]) for r in range(world)][rank]

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.expert = TinyMLP(), TinyMLP(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.trunk(x) + self.expert(x)

    plain, reference = Expert(), Expert()
    with pytest.warns(UserWarning, match="the group has one rank"):
        plain.expert = FullyShardedDataParallel(plain.expert, alone, use_orig_params=front == "orig")
    model = shard(plain, front)
    loss(model, points(rank, 0)).backward()
    loss(reference, points(rank, 0)).backward()
    own = torch.cat([p.grad.flatten() for p in reference.expert.parameters()]).norm()
    ours = torch.cat([p.grad.flatten() for p in model.expert.parameters()]).norm()
    torch.testing.assert_close(torch.as_tensor(float(ours)), own)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_meshes_and_groups_are_the_same(front: str, rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    Twins(TinyMLP, front, (rank, world), device_mesh=mesh).train(1)
    Twins(TinyMLP, front, (rank, world), process_group=mesh.get_group()).train(1)
    Twins(TinyMLP, "fully_shard", (rank, world), mesh=mesh).train(1)
    named = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    Twins(TinyMLP, "fully_shard", (rank, world), mesh=named["shard"]).train(1)
