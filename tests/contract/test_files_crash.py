"""kill -9 of any rank at any moment: the last good checkpoint loads, and the next save is clean."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch import nn

from shardwise import checkpoint, fully_shard
from shardwise.checkpoint.inspection import verify
from shardwise.comm.peers import Peers
from shardwise.errors import CheckpointError

WORLD, DEADLINE = 2, 60.0
#: a victim dies before or after one of its calls of these
MOMENTS = ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir", "open")


def build(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 50))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def die_at(call: int, *, after: bool) -> None:
    """Kill this process at its ``call``-th call from now on of a function that a save uses."""
    left = [call]

    def deadly(function: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return called

    for name in MOMENTS:
        setattr(os, name, deadly(getattr(os, name)))
    Peers.gather = deadly(Peers.gather)  # type: ignore[method-assign]


def serve(rank: int, folder: Path, step: int, victim: int, call: int, after: bool) -> None:
    """One rank: a good save of ``step``, and one of ``step + 1`` in which the victim dies."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{step}", rank=rank, world_size=WORLD)
    model, path = build(step), folder / "run" / "saved"
    fully_shard(model)
    checkpoint.save(path, model, extra=step)
    assert [f.name for f in path.parent.iterdir()] == ["saved"]
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step + 1)
    if rank == victim:
        die_at(call, after=after)
    try:
        checkpoint.save(path, model, extra=step + 1)
    except CheckpointError as error:
        assert "failed" in str(error)
    os._exit(0)


def kill_and_check(folder: Path, rounds: int, seed: int) -> None:
    source = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise"])
    outcomes: Counter[str] = Counter()
    for number in range(rounds):
        step, victim = 10 * number, source.randrange(WORLD)
        arguments = (folder, step, victim, source.randint(1, 60 if victim == 0 else 9), source.random() < 0.5)
        processes = [context.Process(target=serve, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes[1 - victim] == 0, (arguments, codes)
        assert codes[victim] in (0, -signal.SIGKILL), (arguments, codes)
        model = build(-1)
        found = checkpoint.load(folder / "run" / "saved", model)
        assert found in (step, step + 1), arguments
        assert all(bool((parameter == found).all()) for parameter in model.parameters()), arguments
        assert not verify(folder / "run" / "saved").faults
        died, kept = codes[victim] != 0, "old" if found == step else "new"
        outcomes[f"rank {victim} {'died' if died else 'lived'}, the {kept} checkpoint is there"] += 1
    print(dict(outcomes))  # pytest -s
    assert any("died" in outcome for outcome in outcomes)


def test_a_rank_dies_during_a_save(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 10, seed=0)


@pytest.mark.fuzz
@pytest.mark.skipif(settings().max_examples < 1000, reason="long: run by make fuzz")
def test_a_rank_dies_during_one_of_fifty_saves(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 50, seed=1)
