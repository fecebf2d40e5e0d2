"""The device check rehearsed on the CPU: every section runs, and tells when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import device_check, device_parity
from benchmarks.device_check import SECTIONS, Check, check_allocator, main, on_two_ranks, run, streams_in
from tests.bed import ranks


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_rehearsal_runs_every_section(section: str, tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--sections", section, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rehearsal"] and list(found["sections"]) == [section] and found["sections"][section]["ok"]


@ranks(2)
def test_two_ranks_train_as_one_on_both_batches(rank: int, world: int) -> None:
    assert on_two_ranks(torch.device("cpu"))["ok"]


def test_what_goes_wrong_is_told_and_ends_nothing_else() -> None:
    def breaks(check: Check) -> Any:
        raise RuntimeError("no such kernel")

    check = Check(torch.device("cpu"), True, Path("unused"))
    with patch.dict(SECTIONS, {"parity": breaks}):
        found = run(check, ["parity", "allocator"], budget_s=60)
    assert not found["parity"]["ok"] and found["parity"]["problem"] == "RuntimeError: no such kernel"
    assert found["allocator"]["ok"]
    late = run(check, ["allocator"], budget_s=-1)
    assert not late["allocator"]["ok"] and "not run" in late["allocator"]["problem"]


def test_parity_sees_another_number() -> None:
    verdict = device_parity._compared([1.0, 2.0], [1.0, 2.5], torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert not verdict["bitwise"] and verdict["largest_difference"] >= 0.5


def test_streams_are_counted_in_a_profilers_trace() -> None:
    events = [{"cat": "kernel", "args": {"stream": 7}}, {"cat": "kernel", "args": {"stream": 7}},
              {"cat": "gpu_memcpy", "args": {"stream": 20}}, {"cat": "cpu_op", "args": {"stream": 9}}, {"ph": "M"}]
    assert streams_in({"traceEvents": events}) == {"7": 2, "20": 1}


def test_retries_of_the_allocator_are_a_fault() -> None:
    class Api:
        @staticmethod
        def memory_stats(device: torch.device) -> dict[str, int]:
            return {"num_alloc_retries": 1, "num_ooms": 0}

    with patch.object(device_check.torch, "get_device_module", lambda device: Api):
        found = check_allocator(Check(torch.device("cuda", 0), True, Path("unused")))
    assert found == {"ok": False, "num_alloc_retries": 1, "num_ooms": 0}
