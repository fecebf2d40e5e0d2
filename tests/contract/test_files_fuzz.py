"""Damaged and hostile files: the values that were written, or one clear error; nothing else, and nothing is run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise import checkpoint
from shardwise.checkpoint.inspection import inspect, verify
from shardwise.errors import CheckpointError
from tests.bed.models import TinyMLP
from tests.bed.parity import assert_same_tensors


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """A checkpoint with everything in it, and a folder as others write it."""
    folder = Path(tempfile.mkdtemp())
    model = TinyMLP()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(folder / "ours", model, optimizer, {"tensor": torch.arange(9), "pair": (1, 2)},
                    max_shard_bytes=200)
    (folder / "others").mkdir()
    save_file(model.state_dict(), folder / "others" / "model.safetensors")
    torch.save(model.state_dict(), folder / "values")
    yield folder
    shutil.rmtree(folder)


def read_all(path: Path, values: Path) -> None:
    """Everything that reads files. Success means the values that were written."""
    model = TinyMLP(seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ours = (path / "manifest.json").exists()
    try:
        checkpoint.load(path, model, torch.optim.AdamW(model.parameters()) if ours else None)
    except CheckpointError as error:
        assert "failed" in str(error) and "\n" not in str(error)
        assert_same_tensors(model.state_dict(), before, bitwise=True)
    else:
        if ours:
            assert_same_tensors(model.state_dict(), torch.load(values), bitwise=True)
    for look in (inspect, verify):
        try:
            look(path)
        except CheckpointError:
            continue


@pytest.mark.fuzz
@given(data=st.data())
def test_bytes(data: Any, saved: Path) -> None:
    """Flipped, cut off, put in, in any file of either kind of folder."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "copy"
        kind = data.draw(st.sampled_from(["ours", "others"]))
        shutil.copytree(saved / kind, path)
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        change = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "zeros"]))
        if change == "remove":
            file.unlink()
        else:
            if change == "flip":
                content[at] ^= data.draw(st.integers(1, 255))
            elif change == "cut":
                del content[at:]
            elif change == "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            else:
                content[at:] = bytes(len(content) - at)
            file.write_bytes(content)
        read_all(path, saved / "values")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**30) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)


@pytest.mark.fuzz
@given(name=st.sampled_from(["dtype", "shape", "data_offsets", "tensor", "__metadata__", "file"]), value=anything)
def test_headers(name: str, value: Any, saved: Path) -> None:
    """Headers that are JSON and make no sense."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        content = (saved / "others" / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        table: Any = json.loads(content[8 : 8 + length])
        if name == "file":
            table = value
        elif name == "__metadata__":
            table[name] = value
        elif name == "tensor":
            table["middle.weight"] = value
        else:
            table["middle.weight"][name] = value
        header = json.dumps(table).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
        read_all(path, saved / "values")


@pytest.mark.fuzz
@given(value=anything, whole=st.booleans())
def test_indexes(value: Any, whole: bool, saved: Path) -> None:
    """Index files that are JSON and make no sense."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "copy"
        shutil.copytree(saved / "others", path)
        index = value if whole else {"weight_map": value}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        read_all(path, saved / "values")


def test_an_index_stays_in_its_folder(saved: Path, tmp_path: Path) -> None:
    """Files of other folders are not read for it."""
    shutil.copytree(saved / "others", tmp_path / "secret")
    (tmp_path / "shown").mkdir()
    weights = dict.fromkeys(TinyMLP().state_dict(), "../secret/model.safetensors")
    (tmp_path / "shown" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CheckpointError, match=r"the index is damaged.*names of files in this folder"):
        checkpoint.load(tmp_path / "shown", TinyMLP())
