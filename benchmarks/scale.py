"""Large worlds in one process: published shapes on the meta device, one rank of a simulated group.

Nothing is computed or sent; every plan, hook, buffer and collective is there, with its real size.
The run fails when the host's work for a step depends on the world size, or grows faster than the
number of units. Function calls are counted, so that a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.shapes import SHAPES, build
from shardwise.bench.meter import count_calls
from shardwise.comm.collectives import Handle
from shardwise.comm.simulated import SimulatedCollectives
from shardwise.engine import unit as unit_module
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.reduce import Groups
from shardwise.engine.unit import Unit
from shardwise.plan.packing import pack

META = torch.device("meta")


class Counted(SimulatedCollectives):
    """Counts collectives, and the bytes that one rank receives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: Counter[str] = Counter()
        self.wire = 0

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = 0) -> Handle:
        return self._note("gather", out) or super().all_gather(out, shard, tag=tag)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = 0) -> Handle:
        return self._note("reduce", full) or super().reduce_scatter(out, full, tag=tag)

    def _note(self, kind: str, full: Tensor) -> None:
        self.calls[kind] += 1
        self.wire += full.numel() * full.element_size() // self.size * (self.size - 1)


@dataclass
class Row:
    """One model at one world size; bytes are those of one rank."""

    model: str
    layers: int
    world: int
    parameters: int
    tensors: int
    units: int
    wrap_s: float
    shard_bytes: int
    largest_unit_bytes: int
    padding: float
    gathers: int
    reductions: int
    wire_bytes: int
    calls: int  #: of functions in a step, those of the plain module taken off
    step_s: float


def _step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.zeros(1, 4, dtype=torch.long, device=META)).sum().backward()


def plain_calls(name: str, layers: int) -> int:
    """Calls of a step of the module itself."""
    model = build(name, layers)
    _step(model)
    return count_calls(lambda: _step(model))


def measure(name: str, layers: int, world: int, plain: int) -> Row:
    """Shard and step the model as rank 0 of ``world``."""
    model, comm = build(name, layers), Counted(0, world)
    tensors, numel = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    pack.cache_clear()
    began = time.perf_counter()
    units = [build_unit([module], Choices(Groups(comm), META)) for module in (*model.layers, model)]
    wrap = time.perf_counter() - began
    # nothing is computed, so it does not matter that the parameters have no values
    with patch.object(unit_module, "require_values", lambda *values: None):
        _step(model)
        comm.calls.clear()
        comm.wire = 0
        began = time.perf_counter()
        _step(model)
        seconds = time.perf_counter() - began
        calls, wire = comm.calls.copy(), comm.wire
        host = count_calls(lambda: _step(model)) - plain
    return Row(name, layers, world, numel, tensors, len(units), wrap, _bytes_at_rest(units), _largest(units),
               _padding(units), calls["gather"], calls["reduce"], wire, host, seconds)


def _bytes_at_rest(units: list[Unit]) -> int:
    return sum(s.shard.numel() * s.shard.element_size() for u in units for s in u.storages)


def _largest(units: list[Unit]) -> int:
    return max(sum(s.layout.flat_numel * s.compute_dtype.itemsize for s in u.storages) for u in units)


def _padding(units: list[Unit]) -> float:
    layouts = [s.layout for u in units for s in u.storages]
    padding = sum(layout.padding for layout in layouts)
    return padding / (sum(layout.flat_numel for layout in layouts) - padding)


def _show(row: Row) -> None:
    print(f"| {row.model} | {row.world:,} | {row.units} | {row.tensors:,} | {row.wrap_s:.2f} | "
          f"{row.shard_bytes / 1e9:.3f} | {row.largest_unit_bytes / 1e9:.2f} | {row.padding:.2%} | "
          f"{row.gathers} + {row.reductions} | {row.wire_bytes / 1e9:.1f} | {row.calls:,} |", flush=True)


def faults(rows: list[Row]) -> list[str]:
    """What grows that must not."""
    found: list[str] = []
    for name in {row.model for row in rows}:
        mine = [row for row in rows if row.model == name]
        full = [row for row in mine if row.layers == max(other.layers for other in mine)]
        least = min(row.calls for row in full)
        found += [f"{name}: {row.calls} calls at {row.world} ranks, {least} elsewhere"
                  for row in full if row.calls > 1.01 * least]
        for part in (row for row in mine if row.layers < full[0].layers):
            whole = next(row for row in full if row.world == part.world)
            if whole.calls / whole.tensors > 1.05 * part.calls / part.tensors:
                found.append(f"{name}: calls grow faster than parameters, {part.layers} to {whole.layers} layers")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--worlds", default="8,64,512,4096")
    parser.add_argument("--layers", type=int, help="only the first so many of each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    print("| model | ranks | units | tensors | wrap s | at rest GB | largest unit GB | padding | "
          "gathers + reductions | received GB | host calls |\n|" + "---|" * 11)
    for name in options.models.split(","):
        layers, worlds = options.layers or SHAPES[name][0], [int(world) for world in options.worlds.split(",")]
        half = max(1, layers // 2)
        rows.append(measure(name, half, worlds[0], plain_calls(name, half)))
        plain = plain_calls(name, layers)
        for world in worlds:
            rows.append(measure(name, layers, world, plain))
            _show(rows[-1])
    wrong = faults(rows)
    print("\n".join(wrong) or "host calls do not depend on the world size, and grow with the parameters at most")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "machine": platform.platform(),
                                            "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
