"""Collectives over gloo: ours, made of marked messages, and gloo's own, one of each in turn, on the same tensors.

Start it with torchrun. Ours add up in rank order; gloo has no reduce-scatter that is worth its bytes, so the
contender is an all-to-all and the same sums. Printed: medians of the slowest rank, and the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Collectives
from shardwise.comm.matched import MatchedCollectives
from shardwise.comm.process_group import ProcessGroupCollectives

SIZES = (64, 16 << 10, 256 << 10, 12 << 20)  # bytes of the full tensor


def _runs(comm: Collectives, numel: int) -> dict[str, Callable[[], None]]:
    full, shard = torch.ones(numel), torch.ones(numel // comm.size)
    return {
        "gather": lambda: comm.all_gather(full, shard).wait(),
        "reduce-scatter": lambda: comm.reduce_scatter(shard, full).wait(),
        "all-reduce": lambda: comm.all_reduce(full).wait(),
        "broadcast": lambda: comm.broadcast(full, 0).wait(),
    }


def _seconds(run: Callable[[], None]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    run()
    spent = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def main() -> int:
    """Measure, print, and judge: no worse than 1.1 anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    worst, ours = 0.0, MatchedCollectives(dist.group.WORLD)
    own = ProcessGroupCollectives(dist.group.WORLD, check_tags=False)
    for size in SIZES:
        numel = size // 4 // ours.size * ours.size
        for name, run in _runs(ours, numel).items():
            other, pairs = _runs(own, numel)[name], list[tuple[float, float]]()
            for number in range(rounds + 3):
                first = _seconds(run) if number % 2 else 0.0
                second = _seconds(other)
                pairs.append((first or _seconds(run), second))
            a, b = (1e6 * statistics.median(column) for column in zip(*pairs[3:], strict=True))
            ratio = statistics.median(x / y for x, y in pairs[3:])
            worst = max(worst, ratio)
            if dist.get_rank() == 0:
                print(f"{size:>9} B {name:14} {a:9.0f} µs, gloo's own {b:9.0f} µs: {ratio:.2f}", flush=True)
    dist.destroy_process_group()
    return 0 if worst <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
