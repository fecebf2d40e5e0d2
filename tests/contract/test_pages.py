"""The code on the pages of the docs runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.bed import ranks
from tests.bed.pages import script_of


@ranks(2)
@pytest.mark.parametrize("page", [
    "docs/life-of-a-parameter.md", "docs/choosing-units.md", "docs/performance.md", "docs/whole-matrices.md",
    "docs/reliability.md", "docs/offload.md", "docs/elastic.md"])
def test_page_runs_on_two_ranks(rank: int, world: int, page: str) -> None:
    script = script_of(page)
    assert script.count("\n") > 10
    exec(compile(script, page, "exec"), {"__name__": "page"})


@ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch.distributed.checkpoint's
def test_checkpoints_page(rank: int, world: int, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        exec(compile(script_of("docs/checkpoints.md"), "docs/checkpoints.md", "exec"), {"__name__": "page"})
        assert {"step-1", "step-2", "dcp", "ours"} <= {folder.name for folder in Path("runs").iterdir()}
        dist.barrier()


@ranks(2)
def test_readme_example_trains(rank: int, world: int) -> None:
    script = script_of("README.md", without=r"process_group|^from shardwise(\.wrap)? import|^model = Fully")
    names: dict[str, Any] = {"__name__": "page"}
    exec("from shardwise import fully_shard\nimport torch\nimport torch.distributed as dist\n"
         "from torch import nn\n" + script, names)
    assert float(names["loss"].detach()) > 0
    assert all(p.grad is None for p in names["model"].parameters())
