"""A rank of a small training run that comes to harm at a chosen point; a script for the tests of faults.

    python -m tests.bed.faulty <rank> <world> <folder> <transport> <victim> <fault> <point>

Faults: ``kill``, ``stop`` (SIGSTOP), ``exit``, ``raise``, and such as scripts also meet: ``terminate`` (SIGTERM),
``interrupt`` (Ctrl-C), ``memory`` (an out-of-memory exception), ``oom`` (the kernel's own kill, in the control group
whose folder is written in the file ``cgroup``). With ``stand`` (SIGSTOP too) the process group has
torch's own time limit, of half an hour, and ranks look for each other (``SHARDWISE_LOST_AFTER``); so they do with
``catch`` and ``rest``, where the rank catches its exception, and goes on with the next batch, or waits in a barrier.
Points: ``wrap``, ``forward``, ``backward``, ``step``, ``save``. A survivor writes how many seconds after the fault it
stopped, and its error, to ``said-<rank>``. Each rank writes what it listened to when the fault came to ``ears-<rank>``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
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

__all__ = ["CAUGHT", "FAULTS", "LIMIT_S", "LOST_AFTER_S", "MORE_FAULTS", "OOM_LIMIT", "POINTS", "listening", "run"]

FAULTS = ("kill", "stop", "exit", "raise")
MORE_FAULTS = ("terminate", "interrupt", "memory", "stand")
CAUGHT = ("catch", "rest")
POINTS = ("wrap", "forward", "backward", "step", "save")
LIMIT_S = 6
#: where there is no such limit
LOST_AFTER_S = 0.8
OOM_LIMIT = 64 << 20
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "stand": signal.SIGSTOP,
            "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_UNLIMITED = ("stand", *CAUGHT)


def _harm(fault: str, folder: Path) -> None:
    if fault in ("raise", *CAUGHT):
        raise ValueError("the data of this rank are damaged")
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault == "exit":
        os._exit(3)
    if fault == "oom":
        (Path((folder / "cgroup").read_text()) / "cgroup.procs").write_text(str(os.getpid()))
        bytearray(256 << 20)
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


def _train(rank: int, folder: Path, fault: str, at: Callable[[str], None]) -> None:
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
        try:
            model(torch.full((2, 64), float(rank + number))).square().sum().backward()
        except ValueError:
            if fault not in CAUGHT:
                raise
            if fault == "rest":
                dist.barrier()
            continue
        at("step")
        optimizer.step()
        optimizer.zero_grad()
        at("save")
        checkpoint.save(folder / f"saved-{number}", model, optimizer)


def listening(process: int | None = None) -> set[str]:
    """The inodes of sockets that listen, of all processes or of one."""
    tables = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    every = {row[9] for row in tables if row[3] == "0A"}
    if process is None:
        return every
    own = set[str]()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            own.add(os.readlink(descriptor))
    return {inode for inode in every if f"socket:[{inode}]" in own}


def run(place: tuple[int, int], folder: Path, over: str, victim: int, harm: tuple[str, str]) -> None:
    """One rank's life; ``harm`` is (fault, point). A survivor writes seconds and text to ``said-<rank>``."""
    (rank, world), (fault, point) = place, harm
    torch.set_num_threads(1)
    os.setpgid(0, 0)  # whatever it starts can be told by that
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a script
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if over == "group":
        mesh.collectives_for = lambda group, device, **_: collectives_for(group, device, shared_memory=False)
    if fault in _UNLIMITED:
        os.environ.setdefault("SHARDWISE_LOST_AFTER", str(LOST_AFTER_S))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                            timeout=None if fault in _UNLIMITED else timedelta(seconds=LIMIT_S))
    began, left = [0.0], [0 if point == "wrap" else 1]  # the fault comes when its point is passed again

    def at(here: str) -> None:
        if here == point:
            left[0] -= 1
            if left[0] < 0 and not began[0]:
                began[0] = time.monotonic()
                (folder / f"ears-{rank}").write_text(" ".join(listening(os.getpid())))
                if rank == victim:
                    _harm(fault, folder)

    try:
        _train(rank, folder, fault, at)
    except (CommunicationError, CheckpointError) as error:
        (folder / f"said-{rank}").write_text(f"{time.monotonic() - began[0]:.2f} {error}")
        os._exit(7)
    except (ValueError, KeyboardInterrupt, torch.OutOfMemoryError):  # as a script would end, not multiprocessing
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


if __name__ == "__main__":
    _rank, _world, _folder, _over, _victim, _fault, _point = sys.argv[1:]
    run((int(_rank), int(_world)), Path(_folder), _over, int(_victim), (_fault, _point))
