"""State dicts there and back, over kinds, offload, dtypes and mixed precision; trained values against DDP's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedStateDictConfig,
    StateDictType,
)
from shardwise.checkpoint import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

F = FullyShardedDataParallel
CONFIGS: dict[StateDictType, Any] = {
    StateDictType.FULL_STATE_DICT: FullStateDictConfig, StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig}
WHOLE = StateDictOptions(full_state_dict=True)


def low(front: str, *, offload: bool = False) -> dict[str, Any]:
    """bf16 for computation, and shards on the host."""
    if front == "fully_shard":
        policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        return policy | ({"offload_policy": CPUOffloadPolicy()} if offload else {})
    policy = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    return policy | ({"cpu_offload": CPUOffload(offload_params=True)} if offload else {})


def build(front: str, seed: int, **options: Any) -> nn.Module:
    model = TinyMLP(seed=seed, dtype=options.pop("dtype", torch.float32))
    return shard(model, front, [model.middle], **options)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", CONFIGS, ids=str)
@pytest.mark.parametrize("front", FRONTS)
def test_there_and_back(front: str, kind: StateDictType, offload: bool, dtype: torch.dtype) -> None:
    """U68–U71: every kind, entries on the host or not, fp32 and fp16."""
    model, other = build(front, 0, dtype=dtype), build(front, 1, dtype=dtype)
    config = CONFIGS[kind](offload_to_cpu=offload)
    with F.state_dict_type(model, kind, config), F.state_dict_type(other, kind, config):
        state = model.state_dict()
        assert {value.dtype for value in state.values()} == {dtype}
        other.load_state_dict(state)
    assert_same_tensors(get_model_state_dict(other, options=WHOLE), TinyMLP(dtype=dtype).state_dict(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_low_precision_and_offload(front: str, offload: bool, rank: int) -> None:
    """The values saved are those of the optimizer, in full precision; training goes on from them."""
    model, other = build(front, 0, **low(front, offload=offload)), build(front, 1, **low(front, offload=offload))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, points(rank, 0)).backward()
    optimizer.step()
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with F.state_dict_type(model, kind), F.state_dict_type(other, kind):
            state = model.state_dict()
            assert {value.dtype for value in state.values()} == {torch.float32}
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            other.load_state_dict(state)
        assert_same_tensors(get_model_state_dict(other, options=WHOLE), get_model_state_dict(model, options=WHOLE),
                            bitwise=True)
    assert torch.equal(loss(other, points(rank, 1)), loss(model, points(rank, 1)))


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_blank_bare_model_becomes_ddps(front: str, rank: int) -> None:
    """Train, save, load into a model that was never sharded: what DDP trained."""
    model, theirs = build(front, 0), DistributedDataParallel(TinyMLP())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, theirs)]
    for step in range(3):
        for one, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss(one, points(rank, step)).backward()
            optimizer.step()
    blank = TinyMLP(seed=5)
    blank.load_state_dict(get_model_state_dict(model, options=WHOLE))
    assert_same_tensors(blank.state_dict(), theirs.module.state_dict())


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_rank_0_loads_and_spreads(front: str, rank: int) -> None:
    """Saved on rank 0 only, loaded there before sharding, and spread by ``sync_module_states``."""
    source = build(front, 4)
    with F.state_dict_type(source, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
        state = source.state_dict()
    assert bool(state) == (rank == 0)
    plain = TinyMLP(seed=rank)
    if rank == 0:
        plain.load_state_dict(state)
    model = shard(plain, front, sync_module_states=True)
    assert_same_tensors(get_model_state_dict(model, options=WHOLE), TinyMLP(seed=4).state_dict(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_names_in_errors_are_the_bare_modules(front: str) -> None:
    """Missing, unexpected and ill-fitting entries, at any depth."""
    model = build(front, 0)
    state = TinyMLP().state_dict()
    del state["middle.weight"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state | {"middle.more": torch.ones(1)})
    text = str(caught.value)
    assert '"middle.weight"' in text and '"middle.more"' in text
    assert "_fsdp" not in text and "_flat" not in text and ".module" not in text
    with pytest.raises(CheckpointError, match=r"size mismatch for middle\.bias \(parameter 'middle\.bias'"):
        model.load_state_dict(TinyMLP().state_dict() | {"middle.bias": torch.ones(9)})


class FirstUnused(TinyMLP):
    """Its first parameters never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        layers = dict(self.named_children())
        self._modules.clear()
        self.aside = nn.Linear(3, 3)
        for name, layer in layers.items():
            self.add_module(name, layer)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_first_parameter_without_state(front: str, rank: int) -> None:
    """The optimizer's state of the rest is not looked for under the first."""
    plain = FirstUnused()
    model = shard(FirstUnused(), front, [])
    model = model if front != "flat" else shard_apart(FirstUnused())
    optimizers = [torch.optim.Adam(one.parameters()) for one in (plain, model)]
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        loss(one, points(0, 0)).backward()
        optimizer.step()
    found = get_optimizer_state_dict(model, optimizers[1], options=WHOLE)["state"]
    expected = get_optimizer_state_dict(plain, optimizers[0])["state"]
    assert list(found) == list(expected) and "aside.weight" not in found
    for name, values in expected.items():
        assert_same_tensors(sorted(found[name].items()), sorted(values.items()), name, rtol=1e-4, atol=1e-7)


def shard_apart(model: Any) -> nn.Module:
    """A flat parameter of its own for the part that is never used."""
    return shard(model, "flat", [model.aside])


@ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("peer", ["fully_shard", "wrapper on a mesh", "wrapper"])
@pytest.mark.parametrize("front", FRONTS)
def test_sharded_dicts_of_the_peers(front: str, peer: str) -> None:
    """C30: DTensors as they are; the older ShardedTensors are refused with what to do."""
    from torch.distributed import fsdp, init_device_mesh

    plain = TinyMLP(seed=3)
    if peer == "fully_shard":
        theirs: Any = fsdp.fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
        state = theirs.state_dict()
    else:
        mesh = {"device_mesh": init_device_mesh("cpu", (2,))} if peer != "wrapper" else {}
        theirs = fsdp.FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True, **mesh)
        with fsdp.FullyShardedDataParallel.state_dict_type(theirs, fsdp.StateDictType.SHARDED_STATE_DICT):
            state = theirs.state_dict()
    model = build(front, 0)
    if peer == "wrapper":
        with pytest.raises(CheckpointError, match=r"is a ShardedTensor.*Load it through torch\.distributed\.check"):
            model.load_state_dict(state)
        state = TinyMLP(seed=3).state_dict()
    model.load_state_dict(state)
    assert_same_tensors(get_model_state_dict(model, options=WHOLE), TinyMLP(seed=3).state_dict(), bitwise=True)
