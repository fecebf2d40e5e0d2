"""A host of two ranks for test_hosts: for each line on its input it starts both and says how they ended.

    python hosts_cut_script.py <host> <folder>        lines: <port> until-cut <step|save>, or <port> resume

The ranks are forks, so a host imports torch once. A rank that stops by an error writes the moment and the
text to ``said-<rank>``; one that has resumed writes its losses, and those of a run that nothing disturbed,
to ``losses-<rank>``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import checkpoint
from shardwise.comm.choose import close_all
from shardwise.errors import CheckpointError, CommunicationError

LIMIT_S = 6
_BEFORE = 4  # steps until the test is told to cut


class _Run:
    """A small model in training."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        for layer in self.model:
            shardwise.fully_shard(layer)
        shardwise.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.saved, self.losses = folder / "saved", list[float]()

    def step(self) -> None:
        """The data depend on rank and step."""
        source = torch.Generator().manual_seed(1000 * len(self.losses) + dist.get_rank())
        loss = self.model(torch.randn(4, 32, generator=source)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save(self) -> None:
        checkpoint.save(self.saved, self.model, self.optimizer, {"losses": self.losses})

    def load(self) -> None:
        """Go on from the last checkpoint; each rank keeps the losses that rank 0 had."""
        self.losses = list(checkpoint.load(self.saved, self.model, self.optimizer)["losses"])


def _until_cut(folder: Path, point: str) -> None:
    run, rank = _Run(folder), dist.get_rank()
    while True:
        run.step()
        if len(run.losses) % 2 == 0 and len(run.losses) <= _BEFORE:
            run.save()
        if len(run.losses) == _BEFORE and rank == 0:
            print("now", flush=True)
        while point == "save" and len(run.losses) == _BEFORE:
            run.save()


def _resume(folder: Path) -> None:
    rank = dist.get_rank()
    calm, resumed = _Run(folder / "calm"), _Run(folder)
    resumed.load()
    begun = len(resumed.losses)
    for _ in range(3):
        resumed.step()
    for _ in resumed.losses:
        calm.step()
    known = begun if rank else 0  # the losses of the run that was cut are those of rank 0
    (folder / f"losses-{rank}").write_text(json.dumps([resumed.losses[known:], calm.losses[known:]]))


def _live(rank: int, folder: Path, port: str, phase: str, *point: str) -> int:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port}
    limit = None if "SHARDWISE_LOST_AFTER" in os.environ else timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", timeout=limit)
    try:
        if phase == "resume":
            _resume(folder)
        else:
            _until_cut(folder, *point)
    except (CommunicationError, CheckpointError) as error:
        (folder / f"said-{rank}").write_text(f"{time.monotonic()} {error}")
        return 7
    dist.barrier()
    close_all()
    dist.destroy_process_group()
    return 0


def main(host: int, folder: Path) -> None:
    """Start two ranks for each line, wait for them, print their exit codes."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        children: list[int] = []
        for rank in (2 * host, 2 * host + 1):
            child = os.fork()
            if child == 0:
                sys.exit(_live(rank, folder, *line.split()))  # as a script ends, destructors and all
            children.append(child)
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
