"""What goes wrong on any rank is one clear error on every rank, and nothing is half done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint import ranged_io, writing
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.checkpoints import adamw, odd, train, values
from tests.bed.fronts import shard
from tests.bed.models import TinyMLP
from tests.bed.parity import assert_same_tensors


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def edit_json(path: Path) -> None:
    path.write_text(path.read_text().replace("weight", "weighs", 1))


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda f: os.truncate(f / MODEL, 3000), "was cut or altered: .*model.safetensors.*got 3000"),
    "one byte of a weight": (lambda f: flip(f / MODEL, -5), "was altered: .*another checksum of bytes"),
    "one byte of the optimizer": (lambda f: flip(f / OPTIMIZER, -5), "was altered: .*optimizer"),
    "header": (lambda f: flip(f / MODEL, 3), "damaged|altered"),
    "missing": (lambda f: (f / MODEL).unlink(), "a file of the checkpoint is missing: .*model.saf"),
    "state": (lambda f: edit_json(f / "state.json"), "was altered: .*state.json"),
    "manifest": (lambda f: flip(f / "manifest.json", 40), "the manifest is damaged"),
    "all": (shutil.rmtree, "there is no checkpoint at"),
}


@ranks(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, rank: int, tmp_path: Path) -> None:
    """One error on every rank; model and optimizer untouched."""
    change, text = DAMAGES[damage]
    model = odd("orig")
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    if rank == 0:
        change(tmp_path / "saved")
    dist.barrier()
    other = odd("fully_shard", seed=3)
    second = adamw(other)
    before = values(other)
    whole = f"(?s)loading .*saved failed: got on rank .*({text}).*as it was"
    with pytest.raises(CheckpointError, match=whole):
        checkpoint.load(tmp_path / "saved", other, second)
    assert_same_tensors(values(other), before, bitwise=True)
    assert not second.state


@ranks(2)
def test_damage_that_one_rank_sees(rank: int, tmp_path: Path) -> None:
    """Each rank reads its own ranges only; all raise for the one that finds the fault."""
    model = shard(nn.Linear(64, 64, bias=False), "orig")
    checkpoint.save(tmp_path / "saved", model)
    if rank == 0:
        flip(tmp_path / "saved" / "model.safetensors", -1)  # the last row: rank 1's
    dist.barrier()
    with pytest.raises(CheckpointError, match="got on rank 1: a file of the checkpoint was altered"):
        checkpoint.load(tmp_path / "saved", model)


@ranks(2)
def test_missing_numbered_file(rank: int, tmp_path: Path) -> None:
    """Of several files one is gone."""
    model = odd("orig")
    checkpoint.save(tmp_path / "saved", model, max_shard_bytes=4000)
    if rank == 0:
        next((tmp_path / "saved").glob("model-00002-of-*")).unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"missing: .*model-00002-of-"):
        checkpoint.load(tmp_path / "saved", model)


@ranks(2)
def test_another_model(rank: int, tmp_path: Path) -> None:
    """Names, shapes and dtypes; ``strict=False`` loads what fits."""
    tiny = TinyMLP()
    expected = {name: value.clone() for name, value in tiny.state_dict().items()}
    checkpoint.save(tmp_path / "saved", shard(tiny, "orig"))
    other = TinyMLP(seed=1)
    other.extra = nn.Linear(2, 2)
    del other.middle
    before = {name: value.clone() for name, value in other.state_dict().items()}
    text = (r"does not fit the model: expected the same names, got 2 missing "
            r"\('extra.weight', 'extra.bias'\), 2 unexpected \('middle.weight'")
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "saved", other)
    assert_same_tensors(other.state_dict(), before, bitwise=True)
    checkpoint.load(tmp_path / "saved", other, strict=False)
    assert torch.equal(other.inward.weight, expected["inward.weight"])
    assert torch.equal(other.extra.weight, before["extra.weight"])
    other = TinyMLP()
    other.middle = nn.Linear(7, 4)
    text = r"another shape \(parameter 'middle.weight'\): expected \(4, 7\), got \(3, 7\)"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "saved", other)
    with pytest.raises(CheckpointError, match=r"another dtype .*expected torch.float64, got torch.float32"):
        checkpoint.load(tmp_path / "saved", TinyMLP(dtype=torch.float64))
    with pytest.raises(CheckpointError, match="there is no optimizer state in"):
        checkpoint.load(tmp_path / "saved", tiny, torch.optim.SGD(tiny.parameters(), 0.1))


@ranks(2)
def test_other_optimizers(rank: int, tmp_path: Path) -> None:
    """An optimizer of other parameters, or whose groups were mixed."""
    model = shard(TinyMLP(), "orig")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:4]}])
    checkpoint.save(tmp_path / "saved", model, optimizer)
    text = r"other parameters than the saved one.*new: \['outward.weight'"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "saved", model, torch.optim.AdamW(parameters))
    with pytest.raises(CheckpointError, match="groups with other options"):
        checkpoint.load(tmp_path / "saved", model, torch.optim.AdamW(parameters[:4]))
    with pytest.raises(CheckpointError, match="parameter 0 of group 0 of the optimizer is not a parameter"):
        checkpoint.save(tmp_path / "other", model, torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1))
    assert not (tmp_path / "other").exists()


@ranks(2)
def test_full_disk_on_one_rank(rank: int, tmp_path: Path) -> None:
    """Every rank raises, the old checkpoint stays whole, and the next save is clean."""
    model, real = odd("orig"), os.pwrite
    expected = values(model)
    checkpoint.save(tmp_path / "saved", model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    if rank == 1:
        os.pwrite = full
    try:
        text = (r"saving .*saved failed: got on rank 1: OSError: \[Errno 28\] No "
                r"space left on device. No half of it is left there")
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path / "saved", model)
    finally:
        os.pwrite = real
    dist.barrier()
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]
    other = odd("orig", blank=True)
    checkpoint.load(tmp_path / "saved", other)
    assert_same_tensors(values(other), expected, bitwise=True)
    checkpoint.save(tmp_path / "saved", model)
    checkpoint.load(tmp_path / "saved", other)
    assert not any(value.any() for name, value in values(other).items() if name.endswith("weight"))


@ranks(2)
def test_folders_that_cannot_be_written(rank: int, tmp_path: Path) -> None:
    """A file in the way, other people's files, a parent that is no folder."""
    model = shard(TinyMLP(), "orig")
    if rank == 0:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "thesis.txt").write_text("mine")
    dist.barrier()
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match="something else than a checkpoint of ours at"):
            checkpoint.save(tmp_path / name, model)
    with pytest.raises(CheckpointError, match="on rank 0: FileExistsError"):
        checkpoint.save(tmp_path / "file" / "below", model)
    with (patch.object(os, "mkdir", side_effect=PermissionError(13, "Read-only file system")),
          pytest.raises(CheckpointError, match=r"on rank 0: PermissionError: \[Errno 13\] Read-only")):
        checkpoint.save(tmp_path / "new", model)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "folder"]


@ranks(2)
def test_different_models_on_the_ranks(rank: int, tmp_path: Path) -> None:
    """Seen before anything is written."""
    with pytest.raises(CheckpointError, match="the ranks hold different models"):
        checkpoint.save(tmp_path / "saved", nn.Linear(2 + rank, 2))
    assert not (tmp_path / "saved").exists()


@ranks(2)
def test_crash_between_the_renames(rank: int, tmp_path: Path) -> None:
    """The replaced checkpoint is read while the new one is not in its place, and put back by a save."""
    model = shard(TinyMLP(), "orig")
    checkpoint.save(tmp_path / "saved", model, extra="first")
    dist.barrier()
    if rank == 0:
        (tmp_path / "saved").rename(tmp_path / ".old-saved")
        (tmp_path / ".tmp-saved").mkdir()
    dist.barrier()
    assert checkpoint.load(tmp_path / "saved", model) == "first"
    checkpoint.save(tmp_path / "saved", model, extra="second")
    assert checkpoint.load(tmp_path / "saved", model) == "second"
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]


@ranks(2)
def test_memory_is_bounded(rank: int, tmp_path: Path) -> None:
    """C9, U72: one buffer for a shard of any size; it does not grow with the model."""
    limit = 64 * 1024
    model = shard(nn.Linear(700, 1300, bias=False), "orig")  # 3.6 MB, rows of 2,800 bytes
    seen: list[int] = []

    class Watched(ranged_io.Staging):
        def __init__(self) -> None:
            super().__init__(limit)

        def _take(self, count: int) -> torch.Tensor:
            seen.append(count)
            return super()._take(count)

    expected = model.weight.full_tensor()
    real = writing.SaveJob.__dataclass_fields__["staging"].default_factory
    assert real is ranged_io.Staging
    job_init = writing.SaveJob.__init__

    def with_watched(self: Any, *arguments: Any) -> None:
        job_init(self, *arguments, staging=Watched())

    writing.SaveJob.__init__ = with_watched
    try:
        checkpoint.save(tmp_path / "saved", model, dtype=torch.bfloat16)
    finally:
        writing.SaveJob.__init__ = job_init
    assert limit // 2 < max(seen) <= limit
    assert sum(seen) == model.weight.numel() * 2
    assert ranged_io.BUFFER_BYTES <= 32 * 2**20
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["weight"], expected.bfloat16())


@ranks(2)
def test_parts_where_ranks_share_no_disk(rank: int, tmp_path: Path) -> None:
    """Each rank writes its own folder; together they make the standard files."""
    from shardwise.checkpoint.consolidation import consolidate

    model = odd("orig")
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    mine = tmp_path / f"disk-{rank}" / "saved"
    for _ in range(2):  # the second replaces the first
        checkpoint.save(mine, model, optimizer, {"rank": rank}, shared_disk=False, max_shard_bytes=9000)
    assert [f.name for f in mine.iterdir()] == [f"part-0000{rank + 1}-of-00002"]
    checkpoint.save(tmp_path / "direct", model, optimizer, {"rank": rank}, max_shard_bytes=9000)
    with pytest.raises(CheckpointError, match=r"in the parts that its ranks wrote.*consolidate"):
        checkpoint.load(mine, model)
    if rank == 0:
        text = r"not all parts of one save.*expected 2 parts, got 1 \(of ranks 0\)"
        with pytest.raises(CheckpointError, match=text):
            consolidate([mine], tmp_path / "joined")
        consolidate([mine, tmp_path / "disk-1" / "saved"], tmp_path / "joined")
        for file in (tmp_path / "direct").iterdir():
            if file.name not in ("manifest.json", "state.json"):
                assert file.read_bytes() == (tmp_path / "joined" / file.name).read_bytes(), file.name
        assert json.loads((tmp_path / "joined" / "state.json").read_text())["extra"]["same"] is False
    dist.barrier()
    assert checkpoint.load(tmp_path / "joined", model, optimizer) == {"rank": rank}
    if rank == 0:
        flip(mine / "part-00001-of-00002" / "data.bin", 100)
        with pytest.raises(CheckpointError, match=r"was altered: .*data.bin"):
            consolidate([mine, tmp_path / "disk-1" / "saved"], tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
