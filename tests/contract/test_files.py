"""Checkpoint files: what a save writes, and what any number of ranks loads from it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from shardwise import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, checkpoint
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, first_ranks, odd, over, train, values
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import OddTransformer
from tests.bed.parity import assert_same_tensors

TIED = "head.weight"


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_files_are_what_everyone_reads(front: str, rank: int, tmp_path: Path) -> None:
    """U77, A9, A10, B11, C9: safetensors with original names, full shapes, exact values."""
    model = odd(front)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    expected = values(model)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    assert sorted(f.name for f in (tmp_path / "saved").iterdir()) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert TIED not in found
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", TIED: "embedding.weight"}
    rank0 = [expected]
    dist.broadcast_object_list(rank0)  # batch norm's running means differ between ranks; rank 0's count
    assert_same_tensors({name: found[name] for name in rank0[0]}, rank0[0], bitwise=True)
    bare = OddTransformer(seed=5, blocks=2)
    load_model(bare, tmp_path / "saved" / "model.safetensors")
    whole = rank0[0] | {TIED: found["embedding.weight"]}
    assert_same_tensors(bare.state_dict(), {name: whole[name] for name in bare.state_dict()}, bitwise=True)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_optimizer_state_by_name(front: str, rank: int, tmp_path: Path) -> None:
    """U76, A27: ``<fqn>.exp_avg`` in full shape, equal to the bare optimizer's."""
    model, bare = odd(front), OddTransformer(blocks=2)
    ours, theirs = adamw(model), adamw(bare)
    for one, optimizer in ((model, ours), (bare, theirs)):
        torch.manual_seed(0)
        optimizer.zero_grad()
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    checkpoint.save(tmp_path / "saved", model, ours)
    found = load_file(tmp_path / "saved" / "optimizer.safetensors")
    names = [name for name, parameter in bare.named_parameters() if parameter.requires_grad]
    by_name = dict(bare.named_parameters())
    expected = {f"{name}.{key}": theirs.state[by_name[name]][key] for name in names
                for key in ("exp_avg", "exp_avg_sq")}
    assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)
    assert found.keys() == expected.keys()
    state = json.loads((tmp_path / "saved" / "state.json").read_text())["optimizer"]
    assert state["state"]["last.weight"]["step"] == {"value": {"$scalar": ["float32", 1.0]}}
    assert sorted(name for group in state["groups"] for name in group["params"]) == sorted(names)


@ranks(4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (2, 4), (4, 2)])
def test_another_number_of_ranks(front: str, before: int, after: int, rank: int, tmp_path: Path) -> None:
    """U75, C9: values and optimizer state are the same at any world size; training goes on alike."""
    groups = {count: first_ranks(count, 4) for count in (1, 2, 3, 4)}
    path, losses = tmp_path / "saved", []
    if rank < before:
        model = odd(front, **over(front, groups[before]))
        optimizer = adamw(model)
        train(model, optimizer, 0, range(2))
        checkpoint.save(path, model, optimizer, process_group=groups[before])
        torch.save(values(model), tmp_path / f"values-{rank}")
        losses = train(model, optimizer, 0, range(2, 4))
    dist.barrier()
    if rank < after:
        model = odd(front, blank=True, **over(front, groups[after]))
        optimizer = adamw(model)
        checkpoint.load(path, model, optimizer, process_group=groups[after])
        expected = torch.load(tmp_path / "values-0")
        assert_same_tensors(values(model), expected, bitwise=True)
        checkpoint.save(tmp_path / "again", model, optimizer, process_group=groups[after])
        for name in ("model", "optimizer"):
            old, new = (load_file(tmp_path / f / f"{name}.safetensors") for f in ("saved", "again"))
            assert_same_tensors(new, old, bitwise=True)
        again = train(model, optimizer, 0, range(2, 4))  # the same data on all ranks: the same losses
        if rank < before:
            assert again == pytest.approx(losses, rel=1e-5)


@ranks(2)
@pytest.mark.parametrize("saved_by", FRONTS)
@pytest.mark.parametrize("loaded_by", FRONTS)
def test_between_front_ends(saved_by: str, loaded_by: str, rank: int, tmp_path: Path) -> None:
    """U75, A27: files do not tell who wrote them."""
    model = odd(saved_by)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    train(model, optimizer, 0, range(2))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    other = odd(loaded_by, blank=True)
    second = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=5.0)
    checkpoint.load(tmp_path / "saved", other, second)
    assert_same_tensors(values(other), values(model), bitwise=True)
    assert {group["lr"] for group in second.param_groups} == {2e-3}
    checkpoint.save(tmp_path / "again", other, second)
    old, new = (load_file(tmp_path / f / "optimizer.safetensors") for f in ("saved", "again"))
    assert_same_tensors({name: new[name] for name in old}, old, bitwise=True)
    assert train(other, second, 0, range(2, 4)) == train(model, optimizer, 0, range(2, 4))


@ranks(2)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies(strategy: str, rank: int, tmp_path: Path) -> None:
    """U68, U76: one replica writes each tensor, and all of it is there."""
    model = odd("orig", strategy=strategy)
    optimizer = adamw(model)
    train(model, optimizer, 0, range(2))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    other = odd("orig", blank=True, strategy=strategy)
    second = adamw(other)
    checkpoint.load(tmp_path / "saved", other, second)
    assert_same_tensors(values(other), values(model), bitwise=True)
    assert train(other, second, 0, range(2, 3)) == train(model, optimizer, 0, range(2, 3))


@ranks(4)
@pytest.mark.parametrize("front", ["orig", "fully_shard"])
def test_hybrid(front: str, rank: int, tmp_path: Path) -> None:
    """U68: two replicas share the writing; a plain model reads it."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = {"strategy": "HYBRID_SHARD", "device_mesh": mesh} if front == "orig" else {"mesh": mesh}
    model = odd(front, **hybrid)
    optimizer = adamw(model)
    train(model, optimizer, 0, range(1))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    bare = OddTransformer(seed=8, blocks=2)
    checkpoint.load(tmp_path / "saved", bare)
    found, expected = bare.state_dict(), values(model)
    assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)


class Holder(nn.Module):
    """Takes any parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@ranks(2)
def test_shapes_that_do_not_divide(rank: int, tmp_path: Path) -> None:
    """U75, C9, C17: odd shapes, 0-d, empty, channels-last, several dtypes, small numbered files."""
    for seed in range(6):
        source = random.Random(seed)
        shapes = [[source.randint(0, 7) for _ in range(source.randint(0, 4))] for _ in range(6)]

        def build(fill: bool, shapes: list[list[int]] = shapes, seed: int = seed) -> nn.Module:
            torch.manual_seed(seed)
            model = Holder()
            for number, shape in enumerate(shapes):
                dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
                value = (torch.randn if fill else torch.zeros)(shape, dtype=dtype)
                if value.dim() == 4:
                    value = value.contiguous(memory_format=torch.channels_last)
                model.register_parameter(f"p{number}", nn.Parameter(value))
            return model

        bare = build(True)
        path = tmp_path / f"saved-{seed}"
        checkpoint.save(path, shard(build(True), "orig"), max_shard_bytes=500)
        files = [load_file(file) for file in path.glob("model*.safetensors")]
        found = {name: tensor for file in files for name, tensor in file.items()}
        assert_same_tensors({name: found[name] for name, _ in bare.named_parameters()},
                            dict(bare.named_parameters()), bitwise=True)
        blank = build(False)
        checkpoint.load(path, blank)
        assert_same_tensors(blank.named_parameters(), bare.named_parameters(), bitwise=True)
        sharded = shard(build(False), "fully_shard")
        checkpoint.load(path, sharded)
        checkpoint.save(tmp_path / f"again-{seed}", sharded)
        again = load_file(tmp_path / f"again-{seed}" / "model.safetensors")
        assert_same_tensors({name: again[name] for name, _ in bare.named_parameters()},
                            dict(bare.named_parameters()), bitwise=True)


@ranks(2)
def test_compute_dtype_and_exact_buffers(rank: int, tmp_path: Path) -> None:
    """B1, B11, C5: buffers bit for bit under mixed precision; parameters in the dtype asked for."""
    bare = OddTransformer(blocks=2)
    bf16 = torch.bfloat16
    model = odd("orig", mixed_precision=MixedPrecision(param_dtype=bf16, buffer_dtype=bf16))
    model.eval()
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert model.gain_fp32.dtype is torch.bfloat16
    checkpoint.save(tmp_path / "saved", model, dtype=torch.bfloat16)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    parameters = {name for name, p in bare.named_parameters() if p.is_floating_point()}
    expected = {name: value.bfloat16() if name in parameters else value
                for name, value in bare.state_dict().items() if name != TIED}
    assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)
    with pytest.raises(CheckpointError, match=r"another dtype .*dtype_map=\{torch.bfloat16: torch.float32\}"):
        checkpoint.load(tmp_path / "saved", model)
    with torch.no_grad():
        model.gain_fp32.zero_()
    checkpoint.load(tmp_path / "saved", model, dtype_map={torch.bfloat16: torch.float32})
    assert torch.equal(model.gain_fp32, bare.gain_fp32.bfloat16())
    checkpoint.save(tmp_path / "again", model)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["gain_fp32"], bare.gain_fp32)


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_meta_model_reads_a_pretrained_folder(front: str, rank: int, tmp_path: Path) -> None:
    """U80, C9: a folder of numbered files written by others, other names, another dtype."""
    bare = OddTransformer(seed=4, blocks=2)
    if rank == 0:
        write_pretrained(bare, tmp_path)
    dist.barrier()
    with torch.device("meta"):
        model = OddTransformer(blocks=2)
    if front == "fully_shard":
        model = shard(model, front, model.units())
        text = r"on the meta device are not in the checkpoint .*'place'.*materialise\(model\)"
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(tmp_path, model, strict=False)
        assert model.last.weight.is_meta
    else:  # the wrapper gives values in its constructor
        model.to_empty(device="cpu")
        model.head.weight = model.embedding.weight  # to_empty unties
        model = shard(model, front, model.units())
    checkpoint.load(tmp_path, model, name_map=lambda name: f"model.{name}",
                    dtype_map={torch.bfloat16: torch.float32})
    for name, value in values(model).items():
        assert torch.equal(value, narrowed(bare.state_dict()[name]).to(value.dtype)), name


def narrowed(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.dtype is torch.float32 else value


def write_pretrained(bare: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    named = {f"model.{name}": narrowed(value).contiguous()
             for name, value in bare.state_dict().items() if name != TIED}
    names, where = list(named), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: named[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_plain_meta_model(tmp_path: Path) -> None:
    """U80: without any group; objects stay, so ties and optimizers do."""
    bare = OddTransformer(seed=4, blocks=2)
    checkpoint.save(tmp_path / "saved", bare)
    with torch.device("meta"):
        model = OddTransformer(blocks=2)
    before = dict(model.named_parameters())
    checkpoint.load(tmp_path / "saved", model)
    assert_same_tensors({n: v for n, v in model.state_dict().items()}, bare.state_dict(), bitwise=True)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert model.head.weight is model.embedding.weight


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_full_tensors_in_buckets(front: str, dtype: torch.dtype | None, rank: int) -> None:
    """C26: every tensor once, full, in buckets of bounded size."""
    bare, model = OddTransformer(blocks=2), odd(front)
    buckets = list(checkpoint.iter_full_tensors(model, 4000, dtype))
    assert len(buckets) > 5
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.numel() * t.element_size() for _, t in bucket) <= 4000
    found = {name: tensor for bucket in buckets for name, tensor in bucket}
    assert len(found) == sum(map(len, buckets))
    parameters = {name for name, p in bare.named_parameters() if p.is_floating_point()}
    expected = {name: value.to(dtype) if dtype and name in parameters else value
                for name, value in bare.state_dict().items() if name != TIED}
    assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)
    assert found.keys() == expected.keys()


@ranks(2)
def test_checkpoint_wrappers_leave_no_trace(rank: int, tmp_path: Path) -> None:
    """A10: nor do wrappers at any depth."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = OddTransformer(blocks=2)
    names = {name for name in model.state_dict() if name != TIED}
    for number in range(2):
        model.blocks[number] = checkpoint_wrapper(FullyShardedDataParallel(model.blocks[number]))
    model = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    checkpoint.save(tmp_path / "saved", model)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == names


@ranks(2)
def test_ignored_parts(rank: int, tmp_path: Path) -> None:
    """U68: ignored parameters are saved as they are, by one rank."""
    model = OddTransformer(blocks=2)
    expected = {name: value.clone() for name, value in model.state_dict().items() if name != TIED}
    sharded = FullyShardedDataParallel(model, ignored_modules=[model.blocks[0]])
    checkpoint.save(tmp_path / "saved", sharded)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same_tensors({name: found[name] for name in expected}, expected, bitwise=True)
