"""Initialisation from the meta device, and making ranks alike (rows C3, C6, C12, U80, U81, U82, U83)."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import CPUOffload, MixedPrecision
from shardwise import FullyShardedDataParallel as Wrapper
from shardwise.errors import ConfigurationError, LifecycleError, OptionTypeError
from shardwise.frontend import placing
from shardwise.wrap import ModuleWrapPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, counted, full_parameters, shard, units
from tests.bed.pages import script_of
from tests.bed.parity import assert_same_tensors


class Block(nn.Module):
    """Own parameters beside children: initialised after them, at the end of construction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.LayerNorm(width)
        self.second = nn.Linear(width, 6, bias=False)
        self.gain = nn.Parameter(torch.empty(6))
        self.register_buffer("slope", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain, mean=1.0, std=0.1)
        self.slope.copy_(torch.arange(3) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.second(torch.tanh(self.norm(self.first(x)))) + self.slope.sum()


class Net(nn.Module):
    """Tied ends, units in between: bottom-up wrapping is not the order of construction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(width) for width in (9, 10))
        self.steady = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(6, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(self.steady(x)).sum() + self.head(x).logsumexp(-1).mean()


def _on_one_device(seed: int = 5) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def _on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def _init(module: nn.Module) -> None:
    """What users write as param_init_fn."""
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()


def _sharded(front: str, function: Callable[[nn.Module], None] | None = None, **arguments: Any) -> Any:
    model = _on_meta()
    if front == "fully_shard":
        shard(model, front, [*model.blocks])
        return shardwise.materialise(model, function)
    return Wrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=front == "orig",
                   param_init_fn=function, **arguments)


def _require_equal(model: nn.Module, plain: nn.Module) -> None:
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    wanted = {name: plain.get_parameter(name) for name in names}
    assert_same_tensors(full_parameters(model, names), wanted, "parameter")
    assert_same_tensors(dict(model.named_buffers()), dict(plain.named_buffers()), "buffer")


def _require_trains(model: Any, plain: nn.Module, world: int) -> None:
    """One step on equal data is the unsharded one."""
    tokens = torch.arange(8) % 11
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(tokens).backward()
        optimizer.step()
    names = [name for name, _ in plain.named_parameters()]
    assert_same_tensors(full_parameters(model, names), dict(plain.named_parameters()), "parameter",
                        rtol=1e-4, atol=1e-6)


@ranks(1, 2, 4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("function", [None, _init])
@pytest.mark.filterwarnings("ignore:.*the group has one rank")
def test_C3_C6_C12_U80_U82_values_are_those_of_one_device(
    front: str, function: Any, rank: int, world: int
) -> None:
    """For every world size, though ranks were seeded apart; ties and buffers too; the seed goes on."""
    torch.manual_seed(5 if rank == 0 else 77 + rank)
    model = _sharded(front, function)
    following = torch.rand(1)
    plain = _on_one_device()
    _require_equal(model, plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5 if rank == 0 else 77 + rank)
        if rank == 0:
            Net()
        assert torch.equal(following, torch.rand(1)), "the state after it is not the one of construction"
    inner = model.module if front != "fully_shard" else model
    assert inner.head.weight is inner.embedding.weight
    _require_trains(model, plain, world)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_C6_U80_other_ways_to_nest_and_place(front: str, rank: int, world: int) -> None:
    """Without inner units, wrapped by hand where they are constructed, offloaded, in mixed precision."""
    plain = _on_one_device()
    for arguments in ({}, {"cpu_offload": CPUOffload(True)}, {"device_id": torch.device("cpu")},
                      {"mixed_precision": MixedPrecision(torch.bfloat16, _module_classes_to_ignore=())},
                      {"sharding_strategy": shardwise.ShardingStrategy.NO_SHARD}):
        torch.manual_seed(5)
        model = Wrapper(_on_meta(), use_orig_params=front == "orig", **arguments)
        _require_equal(model, plain)
        torch.manual_seed(5)
        _require_equal(_sharded(front, **arguments), plain)

    class ByHand(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            wrap = {"use_orig_params": front == "orig"}
            self.embedding = Wrapper(nn.Embedding(11, 6), **wrap)
            self.blocks = nn.ModuleList(Wrapper(Block(width), **wrap) for width in (9, 10))
            self.steady = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 1)

    torch.manual_seed(5)
    with torch.device("meta"):
        model = ByHand()
    model = Wrapper(model, use_orig_params=front == "orig")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = [nn.Embedding(11, 6), Block(9), Block(10)]
    assert_same_tensors(full_parameters(model, ["embedding.weight"]),
                        {"embedding.weight": expected[0].weight}, "parameter")
    for number, block in enumerate(expected[1:]):
        names = [name for name, _ in block.named_parameters()]
        ours = full_parameters(model, [f"blocks.{number}.{name}" for name in names])
        for name in names:
            assert torch.equal(ours[f"blocks.{number}.{name}"], block.get_parameter(name)), name


@ranks(4)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_C6_replicas_are_alike(front: str, rank: int, world: int) -> None:
    torch.manual_seed(5 if rank == 0 else rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if front == "orig":
        model = _sharded(front, sharding_strategy=shardwise.ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    else:
        model = _on_meta()
        shard(model, front, [*model.blocks], mesh=mesh)
        shardwise.materialise(model)
    _require_equal(model, _on_one_device())


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C6_U80_one_module_is_whole_at_a_time(front: str, rank: int) -> None:
    """And no unit is gathered: the peak is the shards and one module."""
    alive: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            gc.collect()
            assert not [ref for ref in alive if ref() is not None], "an earlier module is whole still"
            assert not any(unit.gather.holds_memory for unit in units(model[0]).values()) if model else True
            alive.extend(weakref.ref(p) for p in (self.weight, self.bias))
            assert tuple(self.weight.shape) == (40, 40)
            super().reset_parameters()

    model: list[nn.Module] = []
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    for layer in net:
        layer.__class__ = Watched
    if front == "fully_shard":
        model.append(shard(net, front, [net[1], net[2]]))
        shardwise.materialise(net)
    else:
        Wrapper(net, auto_wrap_policy=ModuleWrapPolicy({Watched}), use_orig_params=front == "orig")
    assert len(alive) == 8


# ---------------------------------------------------------------------- fully_shard, as torch's users do it
@ranks(2)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_U80_shard_on_meta_to_empty_reset_train(rank: int, world: int) -> None:
    model: Any = _on_meta()
    shard(model, "fully_shard", [*model.blocks])
    before = dict(model.named_parameters())
    assert all(p.is_meta for p in before.values())
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and not parameter.is_meta and shardwise.is_sharded(parameter)
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(rank)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    plain = _on_one_device()
    with torch.no_grad():
        for name, value in full_parameters(model, [n for n, _ in plain.named_parameters()]).items():
            plain.get_parameter(name).copy_(value)
    _require_trains(model, plain, world)


@ranks(2, 4)
@pytest.mark.parametrize("how", ["one seed", "a seed for each rank", "materialise", "loaded", "constants"])
def test_C6_rows_that_are_copies_are_warned_of_once(how: str, rank: int, world: int) -> None:
    """to_empty and reset_parameters with one seed give every rank the same rows."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 24))
    shardwise.fully_shard(model[0])
    shardwise.fully_shard(model)
    torch.manual_seed(rank if how == "a seed for each rank" else 0)
    if how == "materialise":
        shardwise.materialise(model)
    else:
        model.to_empty(device="cpu")
        for module in model:
            module.reset_parameters()
    if how == "loaded":
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 24))
        model.load_state_dict(plain.state_dict())
    if how == "constants":
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(3, 16)).sum().backward()
    said = [str(one.message) for one in caught if "the same rows" in str(one.message)]
    if how != "one seed" or rank:
        assert said == []
        return
    assert said == [
        "shardwise: all ranks hold the same rows of '2.weight', '0.weight': to_empty() and reset_parameters() with "
        "one seed initialise each rank's rows alike, so the whole matrices are copies of one block. "
        "Call shardwise.materialise(model) in place of them, or load a checkpoint"]


@ranks(2)
def test_U80_module_by_module(rank: int, world: int) -> None:
    """to_empty(recurse=False) on each module is taken over when a unit has all of its memory."""
    model: Any = _on_meta()
    shard(model, "fully_shard", [*model.blocks])
    for module in model.modules():
        if module is not model.last:
            module.to_empty(device="cpu", recurse=False)
    with pytest.raises(LifecycleError) as caught:
        model(torch.arange(3))
    assert str(caught.value) == (
        "shardwise: parameters on the meta device have no values to compute with "
        "('last.weight', 'last.bias') (unit '(root)'): expected materialised parameters, got meta. "
        "Call shardwise.materialise(model), or model.to_empty(device=...) and initialise them.")
    model.last.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.5) if tensor.is_floating_point() else tensor.zero_()
    assert model(torch.arange(3)).isfinite()


@ranks(2)
@pytest.mark.parametrize("how", ["train", "evaluate"])
def test_U80_computing_on_meta_names_the_parameters(how: str) -> None:
    model: Any = _on_meta()
    shard(model, "fully_shard", [*model.blocks])
    names = r"'embedding.weight', 'steady.weight', 'steady.bias', 'last.weight' and 1 more"
    with pytest.raises(LifecycleError, match=rf"{names}\) \(unit '\(root\)'\)"):
        if how == "train":
            model(torch.arange(3))
        else:
            with torch.no_grad():
                model(torch.arange(3))


@ranks(2)
def test_C6_an_unsharded_module_and_one_sharded_in_part(rank: int) -> None:
    torch.manual_seed(5)
    _require_equal(shardwise.materialise(_on_meta()), _on_one_device())
    torch.manual_seed(5)
    model = _on_meta()
    ids = [id(p) for p in model.parameters()]
    shardwise.fully_shard(model.blocks[1])
    _require_equal(shardwise.materialise(model, device="cpu"), _on_one_device())
    assert [id(p) for p in model.parameters()] == ids
    _require_equal(shardwise.materialise(model), _on_one_device())  # nothing is left to do


# ---------------------------------------------------------------------- refusals
class _Forgetful(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))
        self.register_buffer("angles", torch.arange(4) / 5, persistent=False)
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.what = what

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.what != "bias":
            self.bias.data.zero_()
        if self.what != "angles":
            self.angles = torch.arange(4) / 5
        if self.what != "order":
            self.order.copy_(torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias + self.angles + self.order


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C12_U83_what_initialisation_forgets_is_found(front: str) -> None:
    def make(what: str, function: Any = None) -> Any:
        with torch.device("meta"):
            module = _Forgetful(what)
        if front == "fully_shard":
            return shardwise.materialise(shard(module, front), function)
        return shard(module, front, param_init_fn=function)

    for name in ("bias", "angles", "order"):
        with pytest.raises(ConfigurationError) as caught:
            make(name)
        kind = "FSDP_Forgetful" if front == "fully_shard" else "_Forgetful"
        assert str(caught.value) == (
            f"shardwise: reset_parameters() left parameters or buffers without values ('{name}') (unit "
            f"'{kind}'): expected values for all that the module itself registers, got {kind}. Compute "
            "them there too: buffers that no checkpoint holds can come from nowhere else.")
    with pytest.raises(ConfigurationError, match=r"param_init_fn left .*\('weight', 'bias', 'angles"):
        make("", lambda module: None)
    model = make("nothing")
    assert torch.equal(model(torch.zeros(1, 4)), (torch.arange(4) / 5 + torch.arange(4))[None])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_U80_no_way_to_initialise(front: str) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), Bare())
    with pytest.raises(ConfigurationError) as caught:
        shardwise.materialise(shard(net, front)) if front == "fully_shard" else shard(net, front)
    assert str(caught.value) == (
        "shardwise: cannot materialise a module from the meta device ('weight') (unit '1'): expected "
        "param_init_fn, or a reset_parameters() method, got Bare. Pass param_init_fn, or define "
        "reset_parameters() for what this module registers.")


@ranks(2)
def test_U80_functions_that_do_not_fit() -> None:
    with pytest.raises(OptionTypeError, match="param_init_fn must be callable"):
        shardwise.materialise(_on_meta(), 3)
    with pytest.raises(OptionTypeError, match="param_init_fn must be callable"):
        Wrapper(_on_meta(), param_init_fn=3)

    def deep(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        module.reset_parameters()

    with pytest.raises(ConfigurationError, match=r"param_init_fn gave new memory .*recurse=False"):
        Wrapper(_on_meta(), use_orig_params=True, param_init_fn=deep)
    mixed = _on_meta()
    mixed.last = nn.Linear(6, 1)
    text = r"some parameters of the unit are on the meta device .*'embedding"
    with pytest.raises(ConfigurationError, match=text):
        shardwise.fully_shard(mixed)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("function", [None, _init])
def test_ignored_modules_stay_on_meta(front: str, function: Any) -> None:
    model = _on_meta()
    model.head.weight = nn.Parameter(torch.empty(11, 6, device="meta"))
    wrapped: Any = Wrapper(model, ignored_modules=[model.blocks[1]], param_init_fn=function,
                           auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=front == "orig")
    assert all(t.is_meta for t in (*model.blocks[1].parameters(), *model.blocks[1].buffers()))
    assert not any(p.is_meta for p in wrapped.blocks[0].parameters())


# ---------------------------------------------------------------------- making ranks alike
@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("nested", [False, True])
def test_U81_states_are_those_of_the_first_rank(front: str, nested: bool, rank: int, world: int) -> None:
    """The first rank has values, others are on meta and only get memory; in bounded buckets."""
    arguments: dict[str, Any] = {"sync_module_states": True, "use_orig_params": front == "orig"}
    if nested:
        arguments["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    model = _on_one_device() if rank == 0 else _on_meta()
    allocate = None if rank == 0 else lambda module: module.to_empty(device="cpu", recurse=False)
    _require_equal(Wrapper(model, param_init_fn=allocate, **arguments), _on_one_device())
    _require_equal(Wrapper(_on_one_device(seed=5 + rank), **arguments), _on_one_device())


@ranks(2)
def test_U81_buckets_are_bounded(rank: int) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    total = sum(p.numel() * p.element_size() for p in net.parameters())
    with counted() as traffic, patch.object(placing, "BUCKET_BYTES", 400):
        Wrapper(net, sync_module_states=True, use_orig_params=True)
    sizes = [call.numel * 4 for call in traffic.calls if call.operation == "broadcast"]
    assert sum(sizes) == total and max(sizes) <= 400 and len(sizes) == 4


@ranks(2)
def test_the_page_runs() -> None:
    exec(compile(script_of("docs/initialisation.md"), "initialisation.md", "exec"), {"__name__": "page"})
