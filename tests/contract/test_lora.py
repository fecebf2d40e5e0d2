"""Adapters beside a frozen base, in one unit (rows C20, U13, U92)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import MixedPrecision, MixedPrecisionPolicy
from tests.bed import ranks
from tests.bed.fronts import FRONTS, counted, shard, units, unsynced
from tests.bed.training import Twins

_PADDING = 256  #: bytes to which each rank's chunk is rounded up


class Adapted(nn.Module):
    """A frozen matrix in bf16 with two narrow ones in fp32 beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


class Adapters(nn.Module):
    """Two of them; the whole is one unit."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.one, self.two = Adapted(40, 3), Adapted(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))

    def adapters(self) -> list[nn.Parameter]:
        return [layer.weight for part in (self.one, self.two) for layer in (part.down, part.up)]


def _run(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * step + rank)
    return model(torch.randn(6, 40, generator=generator)).float().square().mean()


def _adapter_bytes(world: int) -> tuple[int, int]:
    exact = sum(p.numel() * p.element_size() for p in Adapters().adapters())
    return exact, exact + world * (_PADDING + 4 * 32)  # and each span begins at a multiple of 32 bytes


class _OnlyAdapters(Twins):
    @staticmethod
    def _sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_U13_U92_gradient_bytes_are_the_adapters_only(front: str, rank: int, world: int) -> None:
    with counted() as traffic:
        twins = _OnlyAdapters(Adapters, front, (rank, world), run=_run)
    frozen = {name: p.detach().clone() for name, p in twins.model.named_parameters() if not p.requires_grad}
    unit, (exact, bound) = units(twins.model)[""], _adapter_bytes(world)
    for step in range(2):
        traffic.clear()
        twins.backward(step)
        scattered = [call for call in traffic.calls if call.operation == "reduce_scatter"]
        assert [call.dtype for call in scattered] == [torch.float32]
        assert exact <= scattered[0].numel * 4 <= bound
        assert traffic.count("all_gather") <= 2, "base and adapters travel together"
        twins.check_gradients(rtol=1e-4)
        twins.update()
    twins.check_parameters(rtol=1e-4)
    held = sum(storage.layout.flat_numel for storage in unit.collector.live) * 4
    assert held <= bound, "the frozen base has no place in the gradient buffer"
    for name, parameter in twins.model.named_parameters():
        if name in frozen:
            assert parameter.grad is None and torch.equal(parameter, frozen[name])


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_unsent_gradients_are_the_adapters_only(front: str, rank: int, world: int) -> None:
    twins = _OnlyAdapters(Adapters, front, (rank, world), run=_run)
    collector = units(twins.model)[""].collector
    with unsynced(twins.model, front):
        twins.backward(0)
        assert 0 < collector.nbytes <= _adapter_bytes(world)[1]
    twins.backward(1)
    twins.check_gradients(rtol=1e-4)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_a_narrow_wire_for_the_adapters(front: str, rank: int, world: int) -> None:
    precision: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16)}
    if front == "fully_shard":
        precision = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
    with counted() as traffic:
        model = shard(Adapters(), front, **precision)
        _run(model, rank, 0).backward()
    scattered = [call for call in traffic.calls if call.operation == "reduce_scatter"]
    assert [call.dtype for call in scattered] == [torch.bfloat16]
    assert scattered[0].numel * 2 <= _adapter_bytes(world)[1] // 2 + world * _PADDING
    assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


@ranks(2)
def test_C20_the_base_stays_gathered_while_gradients_add_up(rank: int, world: int) -> None:
    with counted() as traffic:
        twins = _OnlyAdapters(Adapters, "fully_shard", (rank, world), run=_run)
    twins.model.set_reshard_after_backward(False)
    for step in range(2):
        traffic.clear()
        with unsynced(twins.model, "fully_shard"):
            twins.backward(3 * step)
            twins.backward(3 * step + 1)
        twins.backward(3 * step + 2)
        assert traffic.count("all_gather") == 1
        twins.check_gradients(rtol=1e-4)
        twins.update()
        twins.model.reshard()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_C20_peft_on_a_transformers_model(front: str, rank: int, world: int) -> None:
    """With the libraries that people use, where they are installed."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def build() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
            base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            model = peft.get_peft_model(base, peft.LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def layers(model: Any) -> list[nn.Module]:
        return list(model.base_model.model.model.layers)

    def run(model: Any, rank: int, step: int) -> Tensor:
        tokens = torch.arange(10).view(2, 5) + 7 * rank + step
        return model(input_ids=tokens, labels=tokens).loss

    exact = sum(p.numel() * 4 for p in build().parameters() if p.requires_grad)
    with counted() as traffic:
        twins = _OnlyAdapters(build, front, (rank, world), inner=layers, run=run)
    twins.backward(0)
    scattered = sum(call.numel * call.dtype.itemsize for call in traffic.calls
                    if call.operation == "reduce_scatter")
    assert exact <= scattered <= exact + 2 * world * (_PADDING + 8 * 32)
    twins.check_gradients(rtol=1e-2, atol=1e-4)
