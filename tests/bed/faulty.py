"""A rank of a small training run that comes to harm at a chosen point; a script for the tests of faults.

    python -m tests.bed.faulty <rank> <world> <folder> <transport> <victim> <fault> <point>

Faults: ``kill``, ``stop`` (SIGSTOP), ``exit``, ``raise``, and such as scripts also meet: ``terminate`` (SIGTERM),
``interrupt`` (Ctrl-C), ``memory`` (an out-of-memory exception). With ``stand`` (SIGSTOP too) the process group has
torch's own time limit, of half an hour, and ranks look for each other (``SHARDWISE_LOST_AFTER``).

Points: ``wrap``, ``forward``, ``backward``, ``step``,
``save``. A survivor writes how many seconds after the fault it stopped, and its error, to ``said-<rank>``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import checkpoint
from shardwise.comm import mesh
from shardwise.comm.choose import collectives_for
from shardwise.errors import CheckpointError, CommunicationError

__all__ = ["FAULTS", "LIMIT_S", "MORE_FAULTS", "POINTS", "run"]

FAULTS = ("kill", "stop", "exit", "raise")
MORE_FAULTS = ("terminate", "interrupt", "memory", "stand")
POINTS = ("wrap", "forward", "backward", "step", "save")
LIMIT_S = 6
#: where there is no such limit
LOST_AFTER_S = 0.8
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "stand": signal.SIGSTOP,
            "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_UNLIMITED = ("stand",)


def _harm(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the data of this rank are damaged")
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault == "exit":
        os._exit(3)
    os.kill(os.getpid(), _SIGNALS[fault])


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, harm: Callable[[], None]) -> torch.Tensor:
        ctx.harm = harm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.harm()
        return gradient, None


def _train(rank: int, folder: Path, at: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    at("wrap")
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    model[1].register_forward_hook(lambda *_: at("forward"))
    model[1].register_forward_hook(lambda _m, _a, output: _Trap.apply(output, lambda: at("backward")))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(4):
        model(torch.full((2, 64), float(rank + number))).square().sum().backward()
        at("step")
        optimizer.step()
        optimizer.zero_grad()
        at("save")
        checkpoint.save(folder / f"saved-{number}", model, optimizer)


def run(place: tuple[int, int], folder: Path, over: str, victim: int, harm: tuple[str, str]) -> None:
    """One rank's life; ``harm`` is (fault, point). A survivor writes seconds and text to ``said-<rank>``."""
    (rank, world), (fault, point) = place, harm
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a script
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if over == "group":
        mesh.collectives_for = lambda group, device, **_: collectives_for(group, device, shared_memory=False)
    if fault in _UNLIMITED:
        os.environ["SHARDWISE_LOST_AFTER"] = str(LOST_AFTER_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                            timeout=None if fault in _UNLIMITED else timedelta(seconds=LIMIT_S))
    began, left = [0.0], [0 if point == "wrap" else 1]  # the fault comes when its point is passed again

    def at(here: str) -> None:
        if here == point:
            left[0] -= 1
            if left[0] < 0 and not began[0]:
                began[0] = time.monotonic()
                if rank == victim:
                    _harm(fault)

    try:
        _train(rank, folder, at)
    except (CommunicationError, CheckpointError) as error:
        (folder / f"said-{rank}").write_text(f"{time.monotonic() - began[0]:.2f} {error}")
        os._exit(7)
    except (ValueError, KeyboardInterrupt, torch.OutOfMemoryError):  # as a script would end, not multiprocessing
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


if __name__ == "__main__":
    _rank, _world, _folder, _over, _victim, _fault, _point = sys.argv[1:]
    run((int(_rank), int(_world)), Path(_folder), _over, int(_victim), (_fault, _point))
