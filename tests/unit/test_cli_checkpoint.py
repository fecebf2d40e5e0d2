"""``shardwise checkpoint``: output, JSON, exit codes, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from shardwise import checkpoint
from shardwise.cli.app import app, main
from tests.bed.models import TinyMLP


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = TinyMLP()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer, max_shard_bytes=200)
    return tmp_path / "saved"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and error output of the program itself."""
    with patch.object(sys, "argv", ["shardwise", "checkpoint", *map(str, arguments)]), \
            pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0), capsys.readouterr().err


def test_inspect(saved: Path) -> None:
    text = run("inspect", saved).output
    assert "written by ranks: 1" in text
    assert "tensors: 18, 840 bytes" in text
    line = next(line for line in text.splitlines() if line.startswith("inward.weight "))
    assert line.split()[1:6] == ["F32", "7", "×", "5", "140"]
    assert len(line.split()[-1]) == 8
    found = json.loads(run("inspect", saved, "--json").output)
    assert found["facts"]["written by ranks"] == 1
    weight = next(t for t in found["tensors"] if t["name"] == "middle.weight")
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("F32", [3, 7], 84)
    assert found["bytes"] == sum(t["nbytes"] for t in found["tensors"])


def test_verify(saved: Path) -> None:
    result = run("verify", saved)
    assert result.exit_code == 0
    assert "every checksum is right" in result.output
    file = sorted(saved.glob("model-*"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    result = run("verify", saved)
    assert result.exit_code == 1
    assert f"damaged: a file of the checkpoint was altered: {file}" in result.output
    found = json.loads(run("verify", saved, "--json").output)
    assert not found["ok"]
    assert len(found["faults"]) == 1


def test_verify_files_of_others(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "no checksums" in run("verify", tmp_path).output
    assert json.loads(run("inspect", tmp_path / "model.safetensors", "--json").output)["tensors"][0]["name"] == "a"


@pytest.mark.parametrize("through", ["dcp", "torch", "safetensors"])
def test_convert_there_and_back(saved: Path, tmp_path: Path, through: str) -> None:
    assert run("convert", saved, tmp_path / "other", "--to", through).exit_code == 0
    result = run("convert", tmp_path / "other", tmp_path / "back", "--json")
    assert json.loads(result.output) == {"path": str(tmp_path / "back"), "format": "safetensors", "tensors": 18,
                                         "bytes": 840, "optimizer": True, "left_out": []}
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = TinyMLP()
    checkpoint.load(saved, expected)
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    assert run("verify", tmp_path / "back").exit_code == 0


def test_convert_a_training_script_s_file(tmp_path: Path) -> None:
    """A full FSDP1 state dict beside other things; nothing but tensors is read."""
    state = nn.Linear(2, 3).state_dict()
    torch.save({"model": state, "epoch": 3}, tmp_path / "full.pt")
    result = run("convert", tmp_path / "full.pt", tmp_path / "out")
    assert "left out 1: epoch" in result.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_errors_are_one_line(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = error_of(capsys, "inspect", tmp_path)
    assert code == 1
    assert text.startswith("error: there are no safetensors files in ")
    assert len(text.splitlines()) == 1
    (tmp_path / "bad.pt").write_bytes(b"not a pickle")
    code, text = error_of(capsys, "convert", tmp_path / "bad.pt", tmp_path / "out")
    assert code == 1
    assert text.startswith(f"error: not a file of tensors that torch.save wrote: {tmp_path}/bad.pt")
    assert len(text.splitlines()) == 1
    code, text = error_of(capsys, "convert", saved, tmp_path / "out", "--to", "onnx")
    assert "no such format: expected safetensors or dcp or torch, got onnx" in text
    code, text = error_of(capsys, "inspect", tmp_path / "nothing")
    assert code == 2
    code, text = error_of(capsys, "consolidate", tmp_path / "out", tmp_path)
    assert code == 1
    assert "there are not all parts of one save" in text


def test_consolidate(tmp_path: Path) -> None:
    model = TinyMLP()
    checkpoint.save(tmp_path / "parts", model, shared_disk=False)
    result = run("consolidate", tmp_path / "whole", tmp_path / "parts")
    assert result.output == f"wrote {tmp_path / 'whole'}: 6 tensors, 280 bytes\n"
    assert run("verify", tmp_path / "whole").exit_code == 0


def test_the_program_runs_as_a_module(saved: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "shardwise.cli", "checkpoint", "verify", str(saved)],
                            capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ok: ")
