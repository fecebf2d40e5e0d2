"""Time of one training step against DDP and the peers, interleaved in one run; start it with torchrun."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.models import CONTENDERS, GPT, Block

MARKS = {"ddp": 1.00, "fsdp1": 0.70, "fsdp2": 0.55}


def _measure(names: list[str], shape: dict[str, int], batch: int, rounds: int) -> dict[str, list[float]]:
    rank, runs = dist.get_rank(), {}
    for name in names:
        torch.manual_seed(0)
        model = CONTENDERS[name](GPT(**shape), Block)
        runs[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    ids = torch.randint(256, (batch, shape["context"]), generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for number in range(rounds + 2):
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            began = time.perf_counter()
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= 2:
                times[name].append(time.perf_counter() - began)
            losses[name] = float(loss.detach())
    sharded = [losses[name] for name in names if name != "local"]
    if max(sharded) - min(sharded) > 1e-4:
        raise SystemExit(f"the contenders do not compute the same: {losses}")
    return times


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contenders", default="local,ddp,fsdp1,fsdp2,wrapper,fully_shard")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = {"width": options.width, "layers": options.layers, "context": options.context}
    times = _measure(options.contenders.split(","), shape, options.batch, options.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {f"{ours}/{peer}": medians[ours] / medians[peer]
              for ours in ("wrapper", "fully_shard") for peer in MARKS if ours in medians and peer in medians}
    holds = all(ratio <= MARKS[name.split("/")[1]] for name, ratio in ratios.items())
    if dist.get_rank() == 0:
        for name, values in times.items():
            spread = statistics.quantiles(values, n=4) if len(values) > 1 else values
            print(f"{name:12s} median {medians[name] * 1e3:8.1f} ms  quartiles "
                  + " ".join(f"{value * 1e3:.1f}" for value in spread))
        for name, ratio in ratios.items():
            print(f"{name:22s} {ratio:.2f} (mark {MARKS[name.split('/')[1]]})")
        if options.json:
            options.json.write_text(json.dumps({"torch": torch.__version__, **vars(options), "json": None,
                                                "seconds": times, "ratios": ratios}, indent=2) + "\n")
    dist.destroy_process_group()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
