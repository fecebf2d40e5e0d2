"""C8, A19: a rank that comes to harm anywhere ends every rank within the group's time limit, with a reason.

What was saved before is whole, and nothing is left in shared memory. The rest of the table is searched
by ``make fuzz``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from tests.bed.faulty import FAULTS, LIMIT_S, MORE_FAULTS, POINTS, run

_GRACE_S = 9.0  # on a machine with more to do than cores
_SUITE = [("kill", "wrap", "shared"), ("raise", "forward", "shared"), ("exit", "backward", "group"),
          ("kill", "step", "shared"), ("stop", "backward", "shared"), ("raise", "save", "shared"),
          ("kill", "forward", "group"), ("memory", "backward", "shared"), ("stand", "forward", "shared")]
_REST = [(fault, point, over) for fault in (*FAULTS, *MORE_FAULTS) for point in POINTS for over in ("shared", "group")
         if (fault, point, over) not in _SUITE and (fault in FAULTS or point in ("forward", "backward", "step"))]
_STATE = {"kill": "died", "exit": "died", "stop": "is stopped", "stand": "is stopped (for ",
          "raise": "raised ValueError: the data of this rank",
          "terminate": "died", "interrupt": "raised KeyboardInterrupt", "memory": "raised OutOfMemoryError: CUDA out"}


def _lives(world: int, victim: int, folder: Path, over: str, harm: tuple[str, str]) -> list[int | None]:
    """Run all ranks until the survivors have ended; the exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise", "pytest"])
    processes = [context.Process(target=run, args=((rank, world), folder, over, victim, harm)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(200)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join(60)
    return codes


def _check(folder: Path, world: int, fault: str, point: str, over: str) -> None:
    victim, left, others = world - 1, sorted(Path("/dev/shm").iterdir()), multiprocessing.active_children()
    codes = _lives(world, victim, folder, over, (fault, point))
    assert codes[:victim] == [7] * victim, codes
    for rank in range(victim):
        seconds, text = (folder / f"said-{rank}").read_text().split(" ", 1)
        print(f"{fault} in {point}, {over}: rank {rank} after {seconds} s: {text}")  # pytest -s
        assert float(seconds) < LIMIT_S + _GRACE_S, text
        assert f"rank {victim}" in text, text
        if point != "wrap":  # before that nobody has met
            assert _STATE[fault] in text, text
    assert sorted(Path("/dev/shm").iterdir()) == left
    assert set(multiprocessing.active_children()) <= set(others) and None not in codes[:victim]
    _require_whole(folder)


def _require_whole(folder: Path) -> None:
    """Every checkpoint that is there loads."""
    for saved in sorted(folder.glob("saved-*")):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        checkpoint.load(saved, model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(("fault", "point", "over"), _SUITE)
def test_A19_a_fault_ends_every_rank(tmp_path: Path, fault: str, point: str, over: str) -> None:
    _check(tmp_path, 2, fault, point, over)


@pytest.mark.parametrize(("fault", "point"), [("raise", "backward")])
def test_A19_a_fault_ends_four_ranks(tmp_path: Path, fault: str, point: str) -> None:
    _check(tmp_path, 4, fault, point, "shared")


@pytest.mark.fuzz
@pytest.mark.parametrize(("fault", "point", "over"), _REST)
def test_A19_a_fault_anywhere(
    request: pytest.FixtureRequest, tmp_path: Path, fault: str, point: str, over: str
) -> None:
    if request.config.getoption("--hypothesis-profile") != "fuzz":
        pytest.skip("for make fuzz")
    _check(tmp_path, 2, fault, point, over)
