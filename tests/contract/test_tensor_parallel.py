"""Tensor parallelism inside, sharding outside: 2 x 2 ranks (rows A37, U87)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
import shardwise.checkpoint
from shardwise import FullyShardedDataParallel
from shardwise.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardwise.errors import CheckpointError, ConfigurationError
from tests.bed import ranks
from tests.bed.fronts import FRONTS
from tests.bed.models import points
from tests.bed.parity import assert_same_tensors


class Wide(nn.Module):
    """A column-wise and a row-wise layer between plain ones; rows do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(5, 9)
        self.up = nn.Linear(9, 14)
        self.down = nn.Linear(14, 3)
        self.after = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(torch.tanh(self.up(torch.tanh(self.before(x))))))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _parallel(mesh: DeviceMesh) -> Wide:
    return parallelize_module(Wide(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _sharded(front: str, mesh: DeviceMesh) -> tuple[Any, Wide]:
    model = _parallel(mesh)
    if front == "fully_shard":
        shardwise.fully_shard(model.up, mesh=mesh["dp"])
        return shardwise.fully_shard(model, mesh=mesh["dp"]), model
    model.up = FullyShardedDataParallel(model.up, device_mesh=mesh["dp"], use_orig_params=front == "orig")
    return FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=front == "orig"), model


def _whole(model: nn.Module) -> dict[str, Tensor]:
    names = [name for name, _ in Wide().named_parameters()]
    found = {}
    for name in names:
        path, _, local = name.rpartition(".")
        found[name] = getattr(model.get_submodule(path), local).full_tensor()
    return found


def _loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_A37_trains_as_the_unsharded_model(front: str, rank: int) -> None:
    """Three steps of AdamW with clipping over both dims, against one process with the data of both."""
    mesh = _mesh()
    model, _ = _sharded(front, mesh)
    plain = Wide()
    kind = torch.optim.SGD if front == "flat" else torch.optim.AdamW
    ours, theirs = (kind(m.parameters(), lr=0.05) for m in (model, plain))
    for step in range(3):
        _loss(model, points(mesh.get_local_rank("dp"), step)).backward()
        torch.stack([_loss(plain, points(replica, step)) for replica in range(2)]).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(norm, expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_tensors(_whole(model), dict(plain.named_parameters()), rtol=1e-4)
    assert shardwise.memory_of(model).gathered == 0


@ranks(4)
def test_A37_the_object_stays_and_is_a_dtensor_in_use(rank: int) -> None:
    """At rest the same object shows rows of the local part; the forward computes with a DTensor."""
    mesh = _mesh()
    model = _parallel(mesh)
    before, shape = model.up.weight, model.up.weight.shape
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # made before sharding: trains all the same
    shardwise.fully_shard(model, mesh=mesh["dp"])
    after: Any = model.up.weight
    assert after is before and isinstance(after, nn.Parameter) and not isinstance(after, DTensor)
    assert after.global_shape == shape == (14, 9) and after.shape[1] == 9 and after.shape[0] <= 7
    seen: list[Any] = []
    model.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    value = after.full_tensor()
    _loss(model, points(mesh.get_local_rank("dp"), 0)).backward()
    assert isinstance(seen[0], DTensor) and seen[0].shape == (14, 9) and seen[0].placements[0].is_shard(0)
    optimizer.step()
    assert not torch.equal(after.full_tensor(), value)


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_A37_inside_summon_a_part_is_whole(front: str, rank: int) -> None:
    """Over the shard group; ``full_tensor()`` over both; edits of the part stay."""
    mesh = _mesh()
    model, inner = _sharded(front, mesh)
    plain = Wide()
    with shardwise.summon_full_params(model):
        named = dict(inner.named_parameters())
        assert tuple(named["up.weight"].shape) == (7, 9) and tuple(named["down.weight"].shape) == (3, 7)
        here = mesh.get_local_rank("tp")
        assert torch.equal(named["up.weight"], plain.up.weight[7 * here : 7 * here + 7])
        assert torch.equal(named["up.weight"].full_tensor(), plain.up.weight)
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(2)
    assert_same_tensors(_whole(model), {n: 2 * p for n, p in plain.named_parameters()}, bitwise=True)


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
def test_A37_copies_and_states_of_the_first_rank(front: str, rank: int) -> None:
    """A copy computes and trains alike; ``sync_module_states`` spreads parts to the same parts."""
    mesh = _mesh()
    if front == "fully_shard":
        model, _ = _sharded(front, mesh)
    else:
        bare = _parallel(mesh)
        with torch.no_grad():
            for parameter in bare.parameters():
                parameter.mul_(1 + mesh.get_local_rank("dp"))
        model = FullyShardedDataParallel(bare, device_mesh=mesh["dp"], use_orig_params=front == "orig",
                                         sync_module_states=True)
        assert_same_tensors(_whole(model), dict(Wide().named_parameters()), bitwise=True)
    copied = copy.deepcopy(model)
    losses = [_loss(one, points(mesh.get_local_rank("dp"), 0)) for one in (model, copied)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert all(p.grad is not None for p in copied.parameters())
    plain = Wide()
    torch.stack([_loss(plain, points(replica, 0)) for replica in range(2)]).mean().backward()
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0),
                               torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))


@ranks(4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_U61_norms_over_both_dims(norm_type: float, rank: int) -> None:
    """torch's norm and ours count every part once, and what is replicated over the inner dim once."""
    mesh = _mesh()
    model, _ = _sharded("fully_shard", mesh)
    plain = Wide()
    _loss(model, points(mesh.get_local_rank("dp"), 0)).backward()
    torch.stack([_loss(plain, points(replica, 0)) for replica in range(2)]).mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
    gradients = [p.grad for p in model.parameters()]
    torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients, norm_type), expected)
    torch.testing.assert_close(shardwise.clip_grad_norm(model.parameters(), 0.1, norm_type), expected)


@ranks(4)
def test_A37_refusals(rank: int) -> None:
    """Sharding over the ranks of the inner dim too would mix parts; a pending sum is no parameter."""
    mesh = _mesh()
    with pytest.raises(ConfigurationError, match=r"(?s)split over ranks that would shard it once more.*'up.weight'"
                                                 r".*ranks \[0, 1\] in both|ranks \[2, 3\] in both"):
        shardwise.fully_shard(_parallel(mesh))
    dist.barrier()


@ranks(4)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_A37_full_state_dict_holds_dtensors(front: str, rank: int) -> None:
    """As of the parallel model before sharding; it goes back in, and so does a whole plain one."""
    mesh = _mesh()
    model, _ = _sharded(front, mesh)
    if front == "fully_shard":
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    else:
        found = model.state_dict()
    plain = Wide()
    bare = _parallel(mesh).state_dict()
    for name, value in found.items():
        assert isinstance(value, DTensor) is isinstance(bare[name], DTensor), name
        if isinstance(value, DTensor):
            assert value.placements == bare[name].placements
            assert torch.equal(value.to_local(), bare[name].to_local())
            assert torch.equal(value.full_tensor(), plain.state_dict()[name])
    assert isinstance(found["up.weight"], DTensor) and isinstance(found["down.bias"], DTensor)
    assert found["down.bias"].placements == (Replicate(),)
    doubled = {name: 2 * value for name, value in found.items()}
    model.load_state_dict(doubled)
    assert_same_tensors(_whole(model), {n: 2 * p for n, p in plain.named_parameters()}, bitwise=True)
    model.load_state_dict({name: 3 * value for name, value in plain.state_dict().items()})
    assert_same_tensors(_whole(model), {n: 3 * p for n, p in plain.named_parameters()}, bitwise=True)


@ranks(4)
def test_A37_sharded_state_through_dcp(rank: int, tmp_path: Any) -> None:
    """Records of rows of parts: saved, and read back into another model; a whole plain model reads them too."""
    place = [str(tmp_path)]
    dist.broadcast_object_list(place, 0)
    mesh = _mesh()
    model, _ = _sharded("fully_shard", mesh)
    dcp.save(model.state_dict(), checkpoint_id=place[0])
    other, _ = _sharded("fully_shard", mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = other.state_dict()
    assert tuple(state["up.weight"].shape) == (14, 9) and tuple(state["down.weight"].shape) == (3, 14)
    dcp.load(state, checkpoint_id=place[0])
    other.load_state_dict(state)
    plain = Wide()
    assert_same_tensors(_whole(other), dict(plain.named_parameters()), bitwise=True)
    blank = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load(blank, checkpoint_id=place[0])
    assert_same_tensors(blank, plain.state_dict(), bitwise=True)
    for name, record in state.items():
        assert torch.equal(record.full_tensor(), plain.state_dict()[name])
    with pytest.raises(CheckpointError, match=r"(?s)split by tensor parallelism as well \('up.*checkpoint"):
        shardwise.checkpoint.save(place[0] + "/folder", model)
    dist.barrier()


@ranks(4)
@pytest.mark.parametrize("full", [True, False])
def test_A37_optimizer_state(full: bool, rank: int) -> None:
    """Moments are placed as their parameters are; they go back in."""
    mesh, options = _mesh(), StateDictOptions(full_state_dict=full)
    model, _ = _sharded("fully_shard", mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, points(mesh.get_local_rank("dp"), 0)).backward()
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer, options=options)
    moment = found["state"]["up.weight"]["exp_avg"]
    assert tuple(moment.shape) == (14, 9) and isinstance(moment, DTensor) is full
    whole = moment.full_tensor()
    kept = {name: p.detach().clone() for name, p in optimizer.state[model.up.weight].items()}
    other = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, other, found, options=options)
    for name, value in other.state[model.up.weight].items():
        assert torch.equal(value, kept[name]), name
    plain = Wide()
    torch.stack([_loss(plain, points(replica, 0)) for replica in range(2)]).mean().backward()
    torch.testing.assert_close(whole, 0.1 * plain.up.weight.grad)
