"""``convert``: weights and optimizer state of other formats, each read as it was written, without running it."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardwise import checkpoint
from shardwise.checkpoint.conversion import convert, kind_of
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def stepped(model: nn.Module, rank: int = 0) -> torch.optim.AdamW:
    """An optimizer with two groups after two steps."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95), amsgrad=True)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, points(rank, step)).backward()
        optimizer.step()
    return optimizer


def assert_same_state(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """In whatever order."""
    assert_same_tensors(sorted(ours.items()), sorted(theirs.items()), bitwise=True)


def assert_resumes(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A blank model and optimizer that load ``path`` are equal to these."""
    other = TinyMLP(seed=9)
    second = stepped(other, rank=5)
    checkpoint.load(path, other, second)
    assert_same_tensors(other.state_dict(), model.state_dict(), bitwise=True)
    ours, theirs = second.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for number, values in theirs["state"].items():
        assert_same_state(ours["state"][number], values)


@pytest.mark.parametrize("through", ["dcp", "torch", "safetensors"])
def test_there_and_back(through: str, tmp_path: Path) -> None:
    """C30: nothing is lost on the way."""
    model = TinyMLP()
    optimizer = stepped(model)
    checkpoint.save(tmp_path / "ours", model, optimizer, max_shard_bytes=200)
    convert(tmp_path / "ours", tmp_path / "other", through)
    assert kind_of(tmp_path / "other") == through
    done = convert(tmp_path / "other", tmp_path / "back", "safetensors")
    assert (done.tensors, done.has_optimizer, done.left_out) == (6 * 4, True, ())
    assert_resumes(tmp_path / "back", model, optimizer)


def test_without_the_optimizer(tmp_path: Path) -> None:
    model = TinyMLP()
    checkpoint.save(tmp_path / "ours", model, stepped(model), {"epoch": 3})
    done = convert(tmp_path / "ours", tmp_path / "full.pt", "torch", optimizer=False)
    assert done.left_out == ("extra", "the optimizer's state")
    assert_same_tensors(torch.load(tmp_path / "full.pt"), model.state_dict(), bitwise=True)


@ranks(2)
@pytest.mark.parametrize("peer", ["fsdp2-dcp", "fsdp1-dcp", "fsdp1-full"])
def test_what_the_peers_wrote(peer: str, rank: int, tmp_path: Path) -> None:
    """C30: sharded through DCP, and full through torch.save, with their optimizers' states."""
    import torch.distributed.checkpoint.state_dict as theirs
    from torch.distributed import fsdp

    plain = TinyMLP(seed=2)
    if peer == "fsdp2-dcp":
        model: Any = fsdp.fully_shard(plain, mesh=dist.init_device_mesh("cpu", (2,)))
    else:
        model = fsdp.FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    loss(model, points(rank, 0)).backward()
    optimizer.step()
    full = theirs.StateDictOptions(full_state_dict=True)
    expected, state = theirs.get_state_dict(model, optimizer, options=full)
    if peer == "fsdp1-full":
        if rank == 0:
            torch.save({"model": expected, "optim": state}, tmp_path / "theirs")
    else:
        sharded = theirs.get_state_dict(model, optimizer)
        dcp.save({"model": sharded[0], "optim": sharded[1], "epoch": 3}, checkpoint_id=tmp_path / "theirs")
    dist.barrier()
    if rank == 0:
        done = convert(tmp_path / "theirs", tmp_path / "ours", "safetensors")
        assert done.left_out == (() if peer == "fsdp1-full" else ("epoch",))
    dist.barrier()
    ours = TinyMLP()
    second = torch.optim.AdamW(ours.parameters())
    checkpoint.load(tmp_path / "ours", ours, second)
    assert_same_tensors(ours.state_dict(), expected, bitwise=True)
    assert second.param_groups[0]["lr"] == 0.03
    for name, parameter in ours.named_parameters():
        assert_same_state(second.state[parameter], state["state"][name])


# ---------------------------------------------------------------------- DeepSpeed
WORLD = 2


def write_zero(folder: Path, stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The files of two ranks, with objects of classes that are not here when they are read."""
    fake = types.ModuleType("deepspeed_that_is_not_here")
    for name in ("LossScaler", "Stage"):
        kind = type(name, (), {"__init__": lambda self, value=0: None, "__module__": fake.__name__,
                               "__reduce__": lambda self: (type(self), (stage,))})
        setattr(fake, name, kind)
    sys.modules[fake.__name__] = fake
    try:
        named = {id(p): n for n, p in model.named_parameters()}
        groups = [[(named[id(p)], p) for p in g["params"]] for g in optimizer.param_groups]
        where = folder / "global_step2"
        where.mkdir(parents=True)
        (folder / "latest").write_text("global_step2")
        shapes = [OrderedDict((n, p.shape) for n, p in group) for group in groups]
        module = {n: v.half() for n, v in model.state_dict().items()}
        torch.save({"module": module, "buffer_names": [], "param_shapes": shapes, "shared_params": {},
                    "ds_version": "0.16", "scaler": fake.LossScaler()},
                   where / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3
                            else "mp_rank_00_model_states.pt"))
        options = [{k: v for k, v in g.items() if k != "params"} | {"params": [0]} for g in optimizer.param_groups]
        for rank in range(WORLD):
            cut = part_of_each if stage == 3 else part_of_all
            state = {i: {key: cut([optimizer.state[p][key] for _, p in group], rank)
                         for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
                     | {"step": optimizer.state[group[0][1]]["step"]} for i, group in enumerate(groups)}
            base = {"state": state, "param_groups": options}
            flat = [cut([p.detach() for _, p in group], rank) for group in groups]
            named_so = ({"fp32_flat_groups": flat, "optimizer_state_dict": base} if stage == 3 else
                        {"single_partition_of_fp32_groups": flat, "base_optimizer_state": base})
            torch.save({"optimizer_state_dict": {"zero_stage": fake.Stage(), "partition_count": WORLD,
                                                 "loss_scaler": fake.LossScaler(), **named_so}},
                       where / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    finally:
        del sys.modules[fake.__name__]


def part_of_all(values: list[Tensor], rank: int) -> Tensor:
    """Stages 1 and 2: everything behind each other, padded, and cut into as many parts as ranks."""
    flat = torch.cat([value.reshape(-1) for value in values])
    each = -(-flat.numel() // (2 * WORLD)) * 2
    return torch.cat([flat, flat.new_zeros(each * WORLD - flat.numel())])[rank * each : (rank + 1) * each].clone()


def part_of_each(values: list[Tensor], rank: int) -> Tensor:
    """Stage 3: of each value a part."""
    parts = []
    for value in values:
        each = -(-value.numel() // WORLD)
        padded = torch.cat([value.reshape(-1), value.new_zeros(each * WORLD - value.numel())])
        parts.append(padded[rank * each : (rank + 1) * each])
    return torch.cat(parts)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage: int, tmp_path: Path) -> None:
    """fp32 weights and optimizer state from the ranks' flat parts; DeepSpeed is not needed."""
    model = TinyMLP()
    optimizer = stepped(model)
    write_zero(tmp_path / "zero", stage, model, optimizer)
    assert kind_of(tmp_path / "zero") == "deepspeed"
    done = convert(tmp_path / "zero", tmp_path / "ours", "safetensors")
    assert done.has_optimizer
    assert_resumes(tmp_path / "ours", model, optimizer) if stage < 3 else assert_resumes_as_one(tmp_path, model)
    next((tmp_path / "zero" / "global_step2").glob("*rank_1*optim*")).unlink()
    with pytest.raises(CheckpointError, match=r"not the files of one ZeRO run.*expected 2 files.*got 1"):
        convert(tmp_path / "zero", tmp_path / "again", "safetensors")


def assert_resumes_as_one(path: Path, model: nn.Module) -> None:
    """Stage 3 does not say which parameters were in which group."""
    other = TinyMLP(seed=9)
    optimizer = torch.optim.AdamW(other.parameters(), amsgrad=True)
    checkpoint.load(path / "ours", other, optimizer)
    assert_same_tensors(other.state_dict(), model.state_dict(), bitwise=True)
    reference = TinyMLP()
    expected = stepped(reference)
    for ours, theirs in zip(other.parameters(), reference.parameters(), strict=True):
        assert_same_state(optimizer.state[ours], expected.state[theirs])


# ---------------------------------------------------------------------- files that would run something
MARK = Path("/tmp/shardwise-was-here")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARK}",)


class Sly:
    """The same through a class that nobody blocks by name."""

    def __reduce__(self) -> Any:
        return subprocess.Popen, (["touch", str(MARK)],)


def evil_dcp(path: Path, where: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a": torch.ones(2)}, "optim": {"state": {"a": {"x": torch.ones(2)}}, "param_groups": [
            {"lr": Evil() if where == "value" else 0.1, "params": ["a"]}]}}, checkpoint_id=path, no_dist=True)
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    if where == "layout":  # a helper of the format, asked for something else
        call = b"ctorch.serialization\n_get_layout\n(Vtorch.load\ntR(Vx\ntR."
        (path / ".metadata").write_bytes(call)


@pytest.mark.parametrize("where", ["metadata", "value", "layout", "torch", "zero"])
def test_nothing_is_run(where: str, tmp_path: Path) -> None:
    """One clear error, or an object that does nothing; never what the file asks to call."""
    MARK.unlink(missing_ok=True)
    path = tmp_path / "theirs"
    if where == "torch":
        torch.save({"model": {"a": torch.ones(2)}, "x": Evil()}, path)
    elif where == "zero":
        model = TinyMLP()
        write_zero(path, 2, model, stepped(model))
        file = next((path / "global_step2").glob("*rank_1*optim*"))
        torch.save(torch.load(file, pickle_module=_ignoring(), weights_only=False) | {"x": Sly()}, file)
    else:
        evil_dcp(path, where)
    if where == "zero":
        convert(path, tmp_path / "ours", "safetensors")
    else:
        with pytest.raises(CheckpointError, match=r"run code|damaged"):
            convert(path, tmp_path / "ours", "safetensors")
        assert not (tmp_path / "ours").exists()
    assert not MARK.exists()


class _Anything:
    def __init__(self, *_: Any) -> None:
        pass


def _ignoring() -> Any:
    """A pickle module that reads classes that are gone as nothing in particular."""
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            return _Anything if module.startswith("deepspeed") else super().find_class(module, name)

    return types.SimpleNamespace(Unpickler=Unpickler, load=pickle.load, UnpicklingError=pickle.UnpicklingError,
                                 loads=pickle.loads, dumps=pickle.dumps, io=io, __name__="ignoring")


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_damaged_metadata(cut: int, tmp_path: Path) -> None:
    evil_dcp(tmp_path / "theirs", "nowhere")
    file = tmp_path / "theirs" / ".metadata"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"the metadata is damaged: .*\.metadata"):
        convert(tmp_path / "theirs", tmp_path / "ours", "safetensors")
