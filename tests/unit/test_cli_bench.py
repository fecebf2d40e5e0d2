"""``shardwise bench``: what it refuses, one run in one process, JSON and picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from benchmarks import compare
from shardwise.bench import contenders, picture
from shardwise.bench.contenders import contenders_for
from shardwise.bench.results import Report, Row, spread
from shardwise.bench.workload import built_in, of_user
from shardwise.cli.app import app
from shardwise.errors import ConfigurationError

TINY = ["--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--rounds", "2", "--warmup", "1"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def mine() -> tuple[Any, Any]:
    return Net, lambda rank, number: (torch.full((5, 4), float(rank + number)),)


def frozen() -> tuple[Any, Any]:
    """Only the inputs have gradients."""
    return (lambda: Net().requires_grad_(False)), lambda rank, number: (torch.ones(5, 4, requires_grad=True),)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_table_json_and_picture_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(*TINY, "--contenders", "ddp,wrapper", "--json", str(tmp_path / "b.json"),
               "--picture", str(tmp_path / "b.png"))
    assert done.exit_code == 0, done.output
    assert "× ddp" in done.output and "losses agree" in done.output
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["ddp", "wrapper"] and found["world"] == 1
    assert all(len(row["seconds"]) == 2 and len(row["losses"]) == 3 for row in found["rows"])
    assert (tmp_path / "b.png").stat().st_size > 5000


def test_a_model_of_the_users_own() -> None:
    done = run("--model", f"{__name__}:mine", "--contenders", "fully_shard", "--rounds", "1", "--accumulate", "2")
    assert done.exit_code == 0, done.output
    assert "samples/s" in done.output and "2 batches a step" in done.output


def test_a_contender_that_refuses_the_model_is_left_out_with_its_reason(tmp_path: Path) -> None:
    few = ["--model", f"{__name__}:frozen", "--rounds", "1", "--warmup", "1", "--json", str(tmp_path / "b.json")]
    with patch.object(contenders, "PEERS", "shardwise_peers_that_are_not_there"):
        done = run(*few)
    assert done.exit_code == 0, done.output  # nobody asked for it
    assert "ddp did not run: RuntimeError: DistributedDataParallel is not needed" in done.output
    assert "× wrapper" in done.output and "losses agree" in done.output
    assert "FSDP1, FSDP2 and DeepSpeed are left out: there is no module shardwise_peers_that_are" in done.output
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["wrapper", "fully_shard"]
    assert found["left_out"][0]["name"] == "ddp" and "Traceback" in found["left_out"][0]["trace"]
    asked = run(*few, "--contenders", "fully_shard,ddp")
    assert asked.exit_code == 1 and "ddp did not run" in asked.output and "left out: " not in asked.output


def test_units_of_a_users_model_are_its_repeated_blocks() -> None:
    workload = of_user(f"{__name__}:mine")
    assert workload.kinds == (nn.Linear,) and workload.items() == (5, "samples")


def test_names_that_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no contender of this name: zero9.*fsdp1.*--contender name="):
        contenders_for(["zero9"])
    with pytest.raises(ConfigurationError, match="nothing is found under 'nowhere:x'"):
        contenders_for(["ddp"], ["mine=nowhere:x"])


def test_without_the_package_of_peers_the_own_contenders_are_left() -> None:
    with patch.object(contenders, "PEERS", "shardwise_peers_that_are_not_there"):
        assert list(contenders_for([])) == ["ddp", "wrapper", "fully_shard"]
        with pytest.raises(ConfigurationError, match="Peers come from the module shardwise_peers_that"):
            contenders_for(["fsdp2"])


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with patch.object(picture.importlib.util, "find_spec", lambda name: None):
        done = run("--picture", str(tmp_path / "b.png"))
    assert "needs matplotlib" in str(done.exception) and not (tmp_path / "b.png").exists()


def test_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(ConfigurationError, match="expected a multiple of 3, got 16"):
        built_in(width=16, layers=1, heads=3, context=4, vocabulary=9, batch=1)


def test_ratios_are_of_the_same_round_and_losses_must_agree() -> None:
    report = Report("w", 10, "tokens", 2, "cpu", "float32", "", 1, 1e-3, [
        Row("a", [1.0, 2.0, 4.0], losses=[3.0, 2.0]), Row("b", [2.0, 4.0, 8.0], losses=[3.0, 2.1])])
    assert report.ratio("b", "a") == spread([2.0, 2.0, 2.0]) and report.rate("a") == 5.0
    assert not report.agrees and report.disagreement() == pytest.approx(0.05)


@pytest.mark.parametrize("name", compare.CONFIGURATIONS)
def test_configurations_of_the_comparison_are_legal(name: str, tmp_path: Path) -> None:
    """Every option is one that the command has; nothing is run."""
    run_by = compare.command(name, tmp_path)
    arguments = run_by[run_by.index("shardwise") + 2 :]
    bench_command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    parsed = bench_command.make_context("bench", list(arguments)).params
    assert parsed["to_json"] == tmp_path / f"bench-{name}.json" and not parsed["contenders"]


def test_the_comparison_judges_round_by_round() -> None:
    rows = [{"name": "ddp", "seconds": [1.0, 2.0, 9.0]}, {"name": "wrapper", "seconds": [0.5, 1.0, 9.0]}]
    assert compare.verdicts({"rows": rows}) == [("wrapper/ddp", 0.5, 1.0)]


def test_it_is_a_program() -> None:
    with patch.object(sys, "argv", ["shardwise", "bench", "--help"]), pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 0
