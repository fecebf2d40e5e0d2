"""C8, A19: a rank that comes to harm anywhere ends every rank within the group's time limit, with a reason.

What was saved before is whole, and nothing is left in shared memory. The rest of the table is searched
by ``make fuzz``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import shardwise
from shardwise import checkpoint
from tests.bed import ranks
from tests.bed.faulty import CAUGHT, FAULTS, LIMIT_S, MORE_FAULTS, OOM_LIMIT, POINTS, listening, run

_GRACE_S = 9.0  # on a machine with more to do than cores
_SUITE = [("kill", "wrap", "shared"), ("raise", "forward", "shared"), ("exit", "backward", "group"),
          ("kill", "step", "shared"), ("stop", "backward", "shared"), ("raise", "save", "shared"),
          ("kill", "forward", "group"), ("memory", "backward", "shared"), ("stand", "forward", "shared"),
          ("stand", "backward", "group"), ("catch", "forward", "shared"), ("rest", "backward", "shared")]
_SOME_POINTS = {**dict.fromkeys(FAULTS, POINTS), **dict.fromkeys(CAUGHT, ("forward", "backward")),
                **dict.fromkeys(MORE_FAULTS, ("forward", "backward", "step"))}
_REST = [(fault, point, over) for fault, points in _SOME_POINTS.items() for point in points
         for over in ("shared", "group") if (fault, point, over) not in _SUITE]
_STATE = {"kill": "died", "exit": "died", "stop": "is stopped", "stand": "is stopped (for ",
          "oom": "died", "raise": "raised ValueError: the data of this rank",
          "catch": "left pass", "rest": "left pass", "terminate": "died",
          "interrupt": "raised KeyboardInterrupt", "memory": "raised OutOfMemoryError: CUDA out"}


def _lives(world: int, victim: int, folder: Path, over: str, harm: tuple[str, str]) -> list[int | None]:
    """Run all ranks until the survivors have ended; the exit codes. Nothing that they started or opened is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise", "pytest"])
    processes = [context.Process(target=run, args=((rank, world), folder, over, victim, harm)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(60)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join(60)
    assert not _in_groups({process.pid for process in processes})
    for rank in range(world):
        ears = (folder / f"ears-{rank}").read_text().split()
        assert ears and not set(ears) & listening(), "a port is left"
    return codes


def _in_groups(groups: set[int | None]) -> list[Path]:
    """The processes that belong to one of these groups of processes."""
    found: list[Path] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) in groups:
                found.append(process)
    return found


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


@pytest.fixture
def small_group(tmp_path: Path) -> Iterator[None]:
    """A control group with little memory, whose folder is written in the file ``cgroup``."""
    for top, sign, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.limit_in_bytes"),
                             ("/sys/fs/cgroup", "cgroup.controllers", "memory.max")):
        folder = Path(top) / f"shardwise-{os.getpid()}"
        with suppress(OSError):
            if not (Path(top) / sign).exists():
                continue
            folder.mkdir()
            try:
                (folder / limit).write_text(str(OOM_LIMIT))
                (tmp_path / "cgroup").write_text(str(folder))
                yield
            finally:
                folder.rmdir()
            return
    pytest.skip("no control groups for memory here")


@pytest.mark.usefixtures("small_group")
@pytest.mark.parametrize(("point", "over"), [("backward", "shared"), ("forward", "group")])
def test_A19_the_kernel_kills_a_rank_that_is_out_of_memory(tmp_path: Path, point: str, over: str) -> None:
    _check(tmp_path, 2, "oom", point, over)


def _losses(model: torch.nn.Module, rank: int, at: Callable[[int], None]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters()), list[float]()
    for number in range(4):
        loss = model(torch.full((2, 64), float(rank + number))).square().mean()
        at(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_A19_a_rank_that_is_stopped_and_woken_in_time(rank: int, world: int) -> None:
    """The others look at it, and go on waiting; the losses are those of a run that nothing disturbed."""
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return shardwise.fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))

    def pause(number: int) -> None:
        if (number, rank) == (2, 1):
            with subprocess.Popen(["sh", "-c", f"sleep 1.4; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)

    with patch.dict(os.environ, SHARDWISE_LOST_AFTER="6"):
        assert _losses(model(), rank, pause) == _losses(model(), rank, lambda _: None)


@pytest.mark.fuzz
@pytest.mark.parametrize(("fault", "point", "over"), _REST)
def test_A19_a_fault_anywhere(
    request: pytest.FixtureRequest, tmp_path: Path, fault: str, point: str, over: str
) -> None:
    if request.config.getoption("--hypothesis-profile") != "fuzz":
        pytest.skip("for make fuzz")
    _check(tmp_path, 2, fault, point, over)
