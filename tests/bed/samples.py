"""What the bed's own tests send to the ranks: functions that end in every way a test can."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

__all__: list[str] = []


def passes(rank: int, world: int, extra: int) -> None:
    total = torch.tensor(rank + extra)
    dist.all_reduce(total)
    assert total.item() == sum(range(world)) + world * extra


def rank_one_fails(rank: int) -> None:
    secret = 40 + rank
    print("printed by rank", rank)
    assert secret == 40, "the secret is off"


def leaves_others_waiting(rank: int) -> None:
    dist.barrier()  # rank 1 is here when rank 0 goes
    if rank == 0:
        raise ValueError("rank 0 went away")
    dist.barrier()


def hangs(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        raise ValueError("rank 0 went away")
    while True:
        time.sleep(0.01)


def dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def skips() -> None:
    pytest.skip("not here")


def warns() -> None:
    warnings.warn("something odd", UserWarning, stacklevel=1)


def changes_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def fails_in_thread() -> None:
    def fail() -> None:
        raise ValueError("nobody hears this")

    thread = threading.Thread(target=fail, name="quiet")
    thread.start()
    thread.join()


def is_seeded() -> None:
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
