"""Saving and loading a model against the peers, interleaved in one run; start it with torchrun.

Every contender saves the same values, loads them into a model that begins on the meta device, and must get
them back. Time is that of the slowest rank, from the call to the return (for loading: from the building of
the model on). Bytes are those that the files hold and those that the ranks sent to the disk. Extra memory is
the most that any rank's resident memory was above what it was before the save, or is after the load.
Files just written are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint_ways import WAYS, Way
from benchmarks.models import GPT

#: ours against FSDP2 with DCP
SAVE_MARK, LOAD_MARK, MEMORY_MARK_MIB = 1.0, 1.0, 64.0

Row = dict[str, float]


def _status(name: str) -> int:
    """Bytes of one line of this process's status."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) * 1024


def _sent_to_disk() -> int:
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("write_bytes")).split()[1])


def _worst(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _sum(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def _measured(what: Callable[[], Any]) -> tuple[Any, Row]:
    """What it returned, and seconds, bytes sent to the disk, and the peak above the memory before and after."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    sent, before = _sent_to_disk(), _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    began = time.perf_counter()
    result = what()
    seconds = time.perf_counter() - began
    gc.collect()
    peak, after = _status("VmHWM"), _status("VmRSS")
    return result, {"seconds": _worst(seconds), "sent": _sum(_sent_to_disk() - sent),
                    "above_before": _worst(peak - before), "above_after": _worst(peak - after)}


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _round(way: Way, model: nn.Module, build: Callable[[], nn.Module], path: Path) -> dict[str, Row]:
    _, saved = _measured(lambda: way.save(model, path))
    size = _file_bytes(path)
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    loaded_model, loaded = _measured(lambda: way.load(build, path))
    for (name, ours), theirs in zip(way.local_values(loaded_model).items(), way.local_values(model).values(),
                                    strict=True):
        if not torch.equal(ours, theirs):
            raise SystemExit(f"{way.name} does not get back what it saved: {name}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    return {
        "save": {"seconds": saved["seconds"], "file_bytes": size, "sent_bytes": saved["sent"],
                 "extra_mib": saved["above_before"] / 2**20},
        "load": {"seconds": loaded["seconds"], "extra_mib": loaded["above_after"] / 2**20},
    }


def _measure(names: list[str], build: Callable[[], nn.Module], folder: Path, rounds: int
             ) -> dict[str, list[dict[str, Row]]]:
    models = {}
    for name in names:
        way = WAYS[name]
        kind = way.shards
        models.setdefault(kind, way.filled(build))
    found: dict[str, list[dict[str, Row]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            row = _round(WAYS[name], models[WAYS[name].shards], build, folder / f"{name}-{number}")
            if number:  # the first is a warm-up
                found[name].append(row)
    return found


def _medians(rows: list[dict[str, Row]]) -> dict[str, Row]:
    return {call: {key: statistics.median(row[call][key] for row in rows) for key in rows[0][call]}
            for call in rows[0]}


def _judge(medians: dict[str, dict[str, Row]]) -> list[tuple[str, float, float]]:
    """(what, measured, mark)"""
    judged: list[tuple[str, float, float]] = []
    if "shardwise" in medians:
        ours = medians["shardwise"]
        if "fsdp2-dcp" in medians:
            peer = medians["fsdp2-dcp"]
            judged += [("save / fsdp2-dcp", ours["save"]["seconds"] / peer["save"]["seconds"], SAVE_MARK),
                       ("load / fsdp2-dcp", ours["load"]["seconds"] / peer["load"]["seconds"], LOAD_MARK)]
        judged += [(f"extra memory of {call}, MiB", ours[call]["extra_mib"], MEMORY_MARK_MIB)
                   for call in ("save", "load")]
    return judged


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", default=",".join(WAYS))
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"), help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: freed memory goes back, so all that is taken counts
    dist.init_process_group("gloo")
    options.folder.mkdir(parents=True, exist_ok=True)

    def build() -> nn.Module:
        return GPT(width=options.width, layers=options.layers, heads=16)

    with torch.device("meta"):
        numel = sum(p.numel() for p in build().parameters())
    found = _measure(options.contenders.split(","), build, options.folder, options.rounds)
    medians = {name: _medians(rows) for name, rows in found.items()}
    judged = _judge(medians)
    if dist.get_rank() == 0:
        _print(numel, medians, judged)
        if options.json:
            options.json.write_text(json.dumps({
                "torch": torch.__version__, "ranks": dist.get_world_size(), "parameters": numel, "rounds": found,
                "medians": medians, "marks": judged}, indent=2) + "\n")
    dist.destroy_process_group()
    return 0 if all(value <= mark for _, value, mark in judged) else 1


def _print(numel: int, medians: dict[str, dict[str, Row]], judged: list[tuple[str, float, float]]) -> None:
    print(f"{numel / 1e6:.0f} M parameters, fp32, {dist.get_world_size()} ranks")
    for name, row in medians.items():
        save, load = row["save"], row["load"]
        print(f"{name:18s} save {save['seconds']:6.2f} s, files {save['file_bytes'] / 1e6:7.0f} MB, "
              f"to disk {save['sent_bytes'] / 1e6:7.0f} MB, extra {save['extra_mib']:7.1f} MiB   "
              f"load {load['seconds']:6.2f} s, extra {load['extra_mib']:7.1f} MiB")
    for what, value, mark in judged:
        print(f"{what:28s} {value:7.2f} (mark {mark:g})")


if __name__ == "__main__":
    sys.exit(main())
