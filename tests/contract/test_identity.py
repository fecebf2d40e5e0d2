"""The user's parameters stay themselves, under their own names.

Rows A1, A4, A5, A7-A10, A13, A17, B12, U1, U2.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import FSDPModule, FullyShardedDataParallel, is_sharded
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, shard
from tests.bed.models import OddTransformer, TinyMLP, batch, loss, points

VISIBLE = ("orig", "fully_shard")


def _ids(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters()]


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A4_identity_through_everything(front: str, rank: int) -> None:
    """Names, order and objects are those from before sharding, whatever was called."""
    plain = OddTransformer()
    before, buffers = _ids(plain), [name for name, _ in plain.named_buffers()]
    model = shard(plain, front, plain.units())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def same(after: str) -> None:
        assert _ids(model) == before, after
        assert [name for name, _ in model.named_buffers()] == buffers, after

    same("wrapping")
    for step in range(2):
        value = loss(model, batch(rank, step))
        same("forward")
        value.backward()
        same("backward")
        optimizer.step()
        same("step")
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss(model, batch(rank, 0))
    same("evaluation")
    model.train()
    list(model.modules()), list(model.named_modules())
    same("traversal")


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A1_A10_names_while_nested(front: str) -> None:
    """Units inside units inside units; also as seen from a part of the model."""
    plain = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2)), nn.Linear(2, 5))
    names = [name for name, _ in plain.named_parameters()]
    inner = [plain[0][0][0], plain[0][0], plain[0]]
    model: Any = shard(plain, front, inner)
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model[0].named_parameters()] == [n[2:] for n in names if n.startswith("0.")]
    assert [name for name, _ in model.named_parameters(prefix="x")] == ["x." + name for name in names]
    assert [name for name, _ in model.named_parameters(recurse=False)] == []


@ranks(2)
def test_A1_flat_parameters_are_one_for_each_kind_and_unit() -> None:
    """A unit's trained, frozen and double parameters make three; the root has one."""
    plain = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False),
                                        nn.Linear(3, 3).double()), nn.Linear(3, 5))
    model = shard(plain, "flat", [plain[0]])
    found = dict(model.named_parameters())
    assert list(found) == ["0._flat_param", "0._flat_param_1", "0._flat_param_2", "1._flat_param"] or (
        list(found) == ["_flat_param", "0._flat_param", "0._flat_param_1", "0._flat_param_2"])
    kinds = [(p.dtype, p.requires_grad) for n, p in found.items() if n.startswith("0")]
    assert kinds == [(torch.float32, True), (torch.float32, False), (torch.float64, True)]
    assert all(p.dim() == 1 for p in found.values())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_A5_A7_A8_originals_stay_reachable(front: str, rank: int) -> None:
    """As attributes at all times, also when nobody else holds them; never registered twice."""
    plain = TinyMLP()
    bias = weakref.ref(plain.inward.bias)
    weight = plain.inward.weight
    model: Any = shard(plain, front, [plain.inward])
    gc.collect()
    for _ in range(2):
        assert model.inward.weight is weight and model.inward.bias is bias()
        registered = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
        assert len(registered) == len(set(registered))
        assert (id(weight) in registered) == (front != "flat")
        loss(model, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_names_and_shapes_inside_forward(front: str, rank: int) -> None:
    """The unit that runs shows whole parameters under the original names."""
    plain = TinyMLP()
    expected = [(name, p.shape) for name, p in plain.named_parameters()]
    seen: list[list[tuple[str, torch.Size]]] = []
    model = shard(plain, front)
    plain.middle.register_forward_pre_hook(
        lambda module, args: seen.append([(name, p.shape) for name, p in model.named_parameters()]))
    model(points(rank, 0)[0])
    assert seen == [expected]
    local = [p.shape for p in model.parameters()]
    assert local != [shape for _, shape in expected]


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_dimensions_at_rest(front: str, world: int) -> None:
    """Whole rows: dim() and shape[1:] are the original's; the ranks' rows add up."""
    plain = OddTransformer()
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    model = shard(plain, front, plain.units())
    for name, p in model.named_parameters():
        assert p.shape[1:] == shapes[name][1:] and p.global_shape == shapes[name]
        assert p.dim() == max(len(shapes[name]), 1)
        rows = torch.tensor(p.numel())
        torch.distributed.all_reduce(rows)
        assert rows == shapes[name].numel()
        assert torch.equal(p.to_local(), p.detach())
        assert p.full_tensor().shape == shapes[name]


@ranks(2)
@pytest.mark.parametrize("front", VISIBLE)
def test_A13_is_sharded_tells_for_every_state(front: str, rank: int) -> None:
    plain = TinyMLP()
    assert not any(is_sharded(p) for p in plain.parameters())
    model = shard(plain, front)
    assert all(is_sharded(p) for p in model.parameters())
    inside: list[bool] = []
    plain.inward.register_forward_hook(lambda module, args, out: inside.append(is_sharded(module.weight)))
    loss(model, points(rank, 0)).backward()
    assert inside == [False], "what forward shows is whole"
    assert all(is_sharded(p) for p in model.parameters())
    assert not is_sharded(torch.ones(2))


@ranks(1)
def test_A13_one_rank_shards_nothing() -> None:
    model = shard(TinyMLP(), "fully_shard")
    assert not any(is_sharded(p) for p in model.parameters())


@ranks(2)
def test_B12_U1_fully_shard_keeps_the_class() -> None:
    """isinstance, attributes, methods, names of modules, and the name of the class."""
    class Named(TinyMLP):
        label = "kept"

        def twice(self, x: Tensor) -> Tensor:
            return 2 * self(x)

    model = Named()
    model.extra = 3
    modules = [name for name, _ in model.named_modules()]
    assert shardwise.fully_shard(model) is model
    assert isinstance(model, Named) and isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPNamed"
    assert (model.extra, model.label) == (3, "kept") and [n for n, _ in model.named_modules()] == modules
    torch.testing.assert_close(model.twice(torch.ones(1, 5)), 2 * model(torch.ones(1, 5)))
    other = shardwise.fully_shard(Named())
    assert type(other) is not type(model) or type(other).__name__ == "FSDPNamed"


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_A17_the_wrapper_forwards_attributes(front: str) -> None:
    """To the module's own object, which is the one that was wrapped, with nothing in between."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain.note = "kept"
    first = plain[0]
    model: Any = shard(plain, front)
    assert isinstance(model, FullyShardedDataParallel)
    assert model.module is plain and model.note == "kept"
    assert model[0] is first and len(model) == 2 and list(model) == list(plain)
    kinds = [FullyShardedDataParallel, nn.Sequential, nn.Linear, nn.Linear]
    assert [type(m) for m in model.modules()] == kinds
    model.eval()
    assert not plain.training and not first.training
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_fsdp_modules_and_the_root(front: str) -> None:
    plain = OddTransformer(blocks=2)
    model: Any = shard(plain, front, plain.units())
    found = FullyShardedDataParallel.fsdp_modules(model)
    assert found[0] is model and len(found) == 5
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    both = nn.ModuleList([model, shard(TinyMLP(), front)])
    assert FullyShardedDataParallel.fsdp_modules(both, root_only=True) == list(both)
    assert model.check_is_root() and not found[1].check_is_root()
