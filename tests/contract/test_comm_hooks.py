"""Communication hooks, custom transports, and hooks on parameters (rows U51, U52, U65, U66, C28)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as theirs  # what users have at hand
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import MixedPrecision, comm_hooks
from shardwise.errors import ConfigurationError, LifecycleError, OptionTypeError, WritebackError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, WRAPPERS, full_gradients, on_streams, over_the_group, shard, units
from tests.bed.models import TinyMLP, loss, points
from tests.bed.pages import script_of
from tests.bed.traffic import CountingCollectives
from tests.bed.training import Twins

_INNER: Callable[[Any], list[nn.Module]] = lambda model: [model.middle]  # noqa: E731


def _hybrid(world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    return {"strategy": "HYBRID_SHARD", "device_mesh": mesh}


# ---------------------------------------------------------------------- communication hooks
@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_U51_the_standard_hooks_average(front: str, strategy: str, rank: int, world: int) -> None:
    """Ours, and torch's own functions with their states."""
    for hooks in (comm_hooks, theirs):
        twins = Twins(TinyMLP, front, (rank, world), inner=_INNER, strategy=strategy)
        hook = hooks.allreduce_hook if strategy == "NO_SHARD" else hooks.reduce_scatter_hook
        group = dist.group.WORLD
        twins.model.register_comm_hook(hooks.DefaultState(group), hook)
        twins.train(2)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_U52_a_compressing_hook_gives_what_the_reduce_dtype_gives(
    front: str, strategy: str, dtype: torch.dtype, rank: int
) -> None:
    names = [name for name, _ in TinyMLP().named_parameters()]
    hooked = shard(TinyMLP(), front, strategy=strategy)
    name = "fp16_compress_hook" if dtype is torch.float16 else "bf16_compress_hook"
    hooked.register_comm_hook(comm_hooks.LowPrecisionState(), getattr(comm_hooks, name))
    narrow = shard(TinyMLP(), front, strategy=strategy, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    for model in (hooked, narrow):
        loss(model, points(rank, 0)).backward()
    for ours, expected in zip(full_gradients(hooked, names).values(), full_gradients(narrow, names).values(),
                              strict=True):
        assert ours.dtype is torch.float32 and torch.equal(ours, expected)
        assert torch.equal(ours.to(dtype).float(), ours), "the wire was wider"


@ranks(4)
@pytest.mark.parametrize("front", WRAPPERS)
def test_U51_hybrid_strategies(front: str, rank: int, world: int) -> None:
    """The hook averages over the shard group, the engine over the replicas."""
    place = _hybrid(world)
    twins = Twins(TinyMLP, front, (rank, world), inner=_INNER, **place)
    group = place["device_mesh"].get_group("shard")
    twins.model.register_comm_hook(comm_hooks.DefaultState(group), comm_hooks.reduce_scatter_hook)
    twins.train(2)
    other = Twins(TinyMLP, front, (rank, world), **place)
    other.model.register_comm_hook(comm_hooks.LowPrecisionState(group), comm_hooks.fp16_compress_hook)
    other.backward()
    other.check_gradients(rtol=5e-3, atol=1e-3)
    third = shard(TinyMLP(), front, **place)
    with pytest.raises(ConfigurationError) as caught:
        third.register_comm_hook(comm_hooks.DefaultState(), comm_hooks.reduce_scatter_hook)
    assert "not the one that this unit's gradients are averaged over" in str(caught.value)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_U51_what_a_hook_of_ones_own_gets(front: str, strategy: str, rank: int, world: int) -> None:
    """Not called for gradients that stay unsent; its exception comes out of backward."""
    calls: list[tuple[int, ...]] = []

    def hook(state: str, *tensors: Tensor) -> None:
        assert state == "mine"
        calls.append(tuple(tensor.numel() for tensor in tensors))
        tensors[-1].fill_(2.0)
        if len(calls) == 3:
            raise RuntimeError("the hook's own")

    model = shard(TinyMLP(), front, [], strategy)
    names = [name for name, _ in TinyMLP().named_parameters()]
    model.register_comm_hook("mine", hook)
    with model.no_sync():
        loss(model, points(rank, 0)).backward()
    assert not calls
    loss(model, points(rank, 1)).backward()
    (sizes,) = calls
    assert len(sizes) == (1 if strategy == "NO_SHARD" else 2)
    if strategy == "FULL_SHARD":
        assert sizes[0] == world * sizes[1]
    assert all((gradient == 2.0).all() for gradient in full_gradients(model, names).values())
    model.zero_grad()
    loss(model, points(rank, 2)).backward()
    with pytest.raises(RuntimeError, match="the hook's own"):
        loss(model, points(rank, 3)).backward()
    with pytest.warns(RuntimeWarning, match="the last backward did not finish"):
        model.zero_grad()
        loss(model, points(rank, 4)).backward()


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_U51_C13_a_copy_of_the_model_has_the_hook(front: str, rank: int) -> None:
    model = shard(TinyMLP(), front, [], "FULL_SHARD")
    model.register_comm_hook(None, lambda state, full, chunk: chunk.fill_(5.0))
    copied = copy.deepcopy(model)
    loss(copied, points(rank, 0)).backward()
    names = [name for name, _ in TinyMLP().named_parameters()]
    assert all((gradient == 5.0).all() for gradient in full_gradients(copied, names).values())
    with pytest.raises(LifecycleError, match="registered already"):
        copied.register_comm_hook(None, print)


@ranks(2)
@pytest.mark.parametrize("front", WRAPPERS)
def test_U51_who_may_register(front: str) -> None:
    model = shard(TinyMLP(), front, [], "FULL_SHARD")
    plain = TinyMLP()
    nested: Any = shard(plain, front, [plain.middle])
    hook = partial(comm_hooks.reduce_scatter_hook)
    nested.register_comm_hook(comm_hooks.DefaultState(), hook)
    text = r"shardwise: register_comm_hook must be called on the root \(unit 'middle'\)\. Call it on the"
    with pytest.raises(LifecycleError, match=text):
        nested.middle.register_comm_hook(None, hook)
    text = r"a communication hook is registered already \(unit '\(root\)'\)"
    with pytest.raises(LifecycleError, match=text):
        nested.register_comm_hook(None, hook)
    with pytest.raises(OptionTypeError, match="the communication hook must be callable: expected hook"):
        model.register_comm_hook(None, 3)


# ---------------------------------------------------------------------- custom transports
@ranks(2)
def test_U50_U51_custom_transports(rank: int, world: int) -> None:
    """Each call goes where it was told to; the numbers stay."""
    with over_the_group():
        twins = Twins(TinyMLP, "fully_shard", (rank, world))
    unit = units(twins.model)[""]
    gathers, reductions = (CountingCollectives(unit.groups.shard) for _ in range(2))
    twins.model.set_custom_all_gather(gathers)
    twins.model.set_custom_reduce_scatter(reductions)
    twins.train(2)
    assert gathers.traffic.operations == ["all_gather"] * 2
    assert reductions.traffic.operations == ["reduce_scatter"] * 2
    with pytest.raises(OptionTypeError, match=r"a custom transport has the wrong type.*Collectives, got object"):
        twins.model.set_custom_all_gather(object())
    reductions.size = 3
    with pytest.raises(ConfigurationError, match=f"rank {rank} of 2, got rank {rank} of 3"):
        twins.model.set_custom_reduce_scatter(reductions)


@ranks(2)
def test_U50_a_group_of_its_own_for_reductions(rank: int, world: int) -> None:
    twins = Twins(TinyMLP, "fully_shard", (rank, world), inner=_INNER)
    twins.model.set_separate_reduce_scatter_group()
    for unit in units(twins.model).values():
        assert unit.reducer.groups.shard is not unit.gather.comm
        assert unit.reducer.groups.shard.members == unit.gather.comm.members
    twins.train(2)
    twins.model.set_separate_reduce_scatter_group(False)
    for unit in units(twins.model).values():
        assert unit.reducer.groups.shard is unit.gather.comm
    twins.train(1)


@ranks(2)
def test_set_all_reduce_hook_sees_the_reduced_chunk(rank: int, world: int) -> None:
    model: Any = shard(TinyMLP(), "fully_shard")
    model.set_all_reduce_hook(lambda chunk: chunk.fill_(3.0))
    loss(model, points(rank, 0)).backward()
    assert all((p.grad == 3.0).all() for p in model.parameters())


# ---------------------------------------------------------------------- the other methods of FSDPModule
@ranks(2)
def test_U8_reset_iter_state(rank: int, world: int) -> None:
    twins = Twins(TinyMLP, "fully_shard", (rank, world), inner=_INNER)
    loss(twins.model, points(rank, 0))  # never goes backward
    twins.model.set_requires_gradient_sync(False)
    loss(twins.model, points(rank, 0)).backward()
    assert any(unit.collector.holding for unit in units(twins.model).values())
    twins.model.set_requires_gradient_sync(True)
    with pytest.raises(LifecycleError, match="reset_iter_state must be called on the root"):
        twins.model.middle.reset_iter_state()
    twins.model.reset_iter_state()
    assert not any(unit.collector.holding or unit.gather.holds_memory for unit in units(twins.model).values())
    twins.train(2)


@ranks(2)
def test_a_unit_that_backward_does_not_need_is_not_gathered(rank: int, world: int) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.table, self.out = nn.Embedding(11, 5), nn.Linear(5, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.table(tokens))

    def run(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.arange(4) + rank + step).pow(2).sum()

    for needed in (True, False):
        twins = Twins(Embedded, "fully_shard", (rank, world), inner=lambda m: [m.table], run=run)
        twins.model.table.set_unshard_in_backward(needed)
        unit = units(twins.model)["table"]
        counting = CountingCollectives(unit.groups.shard)
        twins.model.table.set_custom_all_gather(counting)
        twins.train(2)
        in_backward = needed and not on_streams()  # there the unit is still gathered when its backward comes
        assert counting.traffic.count("all_gather") == (4 if in_backward else 2)
        assert unit.uses == 0


@ranks(2)
def test_methods_without_a_choice_say_so() -> None:
    model: Any = shard(TinyMLP(), "fully_shard")
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_post_optim_event(None)
    for call, text in (
        (lambda: model.set_reduce_scatter_max_input_buffers(2), "one reduction is on its way at a time"),
        (lambda: model.set_allocate_memory_from_process_group_for_comm(True), "hands out its own memory"),
        (model.set_symm_mem_for_comm, "gathers into symmetric memory are not offered"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            call()


@ranks(2)
def test_every_method_of_torchs_module_is_there() -> None:
    """And every name that its package exports, but for one that is refused (docs/communication.md says why)."""
    from torch.distributed import fsdp

    def named(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert named(fsdp.FSDPModule) - named(shardwise.FSDPModule) == set()
    assert named(fsdp.FullyShardedDataParallel) - named(shardwise.FullyShardedDataParallel) == set()
    assert set(fsdp.__all__) - set(shardwise.__all__) == {"DataParallelMeshDims"}


@ranks(2)
def test_U89_roots_share_their_lanes() -> None:
    one, two = (shard(TinyMLP(seed=seed), "fully_shard") for seed in range(2))
    shardwise.share_comm_ctx([one, two])
    with pytest.raises(LifecycleError, match="share_comm_ctx takes sharded modules"):
        shardwise.share_comm_ctx([one, TinyMLP()])


# ---------------------------------------------------------------------- hooks on parameters
@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("before", [False, True])
def test_C28_U65_hooks_on_parameters_get_the_reduced_shard(
    front: str, before: bool, rank: int, world: int
) -> None:
    """Once in a backward; what they give back is the gradient; registered before or after sharding."""
    if front == "flat" and before:
        pytest.skip("the flat parameter is made by sharding")
    plain = TinyMLP()
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.as_subclass(Tensor).clone())
        return gradient * 3

    if before:
        for parameter in plain.parameters():
            parameter.register_hook(hook)
    model = shard(plain, front)
    twin = TinyMLP()
    if not before:
        for parameter in model.parameters():
            parameter.register_hook(hook)
    loss(model, points(rank, 0)).backward()
    for other in range(world):
        (loss(twin, points(other, 0)) / world).backward()
    parameters = list(model.parameters())
    assert len(seen) == len(parameters)
    for parameter, gradient in zip(parameters, seen, strict=True):
        assert gradient.shape == parameter.shape
        torch.testing.assert_close(parameter.grad.as_subclass(Tensor), gradient * 3)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # of the whole, although the hook made new tensors
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0) * 3
    torch.testing.assert_close(torch.as_tensor(float(norm)), expected)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C28_a_hook_that_gives_back_another_shape(front: str, rank: int) -> None:
    model = shard(TinyMLP(), front)
    handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient.new_zeros(3, 9))
    with pytest.raises(WritebackError, match=r"gave back a gradient of another shape.*got \(3, 9\)"):
        loss(model, points(rank, 0)).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match="did not finish"):
        loss(model, points(rank, 0)).backward()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_C28_U66_optimizer_in_backward(front: str, strategy: str, rank: int, world: int) -> None:
    """Post-accumulate hooks step and clear each parameter; nothing is left for later."""
    twins = Twins(TinyMLP, front, (rank, world), inner=_INNER, strategy=strategy)
    optimizers = {p: torch.optim.AdamW([p], lr=0.02) for p in twins.model.parameters()}
    fired: list[int] = []

    def step(parameter: nn.Parameter) -> None:
        fired.append(id(parameter))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in twins.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    reference = torch.optim.AdamW(twins.plain.parameters(), lr=0.02)
    for number in range(3):
        fired.clear()
        twins.backward(number)
        assert sorted(fired) == sorted(id(p) for p in optimizers)
        assert all(p.grad is None for p in optimizers)
        reference.step()
        reference.zero_grad()
        twins.check_parameters()


@ranks(2)
def test_the_page_runs() -> None:
    exec(compile(script_of("docs/communication.md"), "communication.md", "exec"), {"__name__": "page"})
