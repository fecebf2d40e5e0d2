"""Host time for each unit and step: many tiny units on a simulated group of 64, contenders interleaved.

``--calls`` counts function calls of one step instead of seconds. The count does not depend on how busy
the machine is, and the run fails when it exceeds ``CALLS_PER_UNIT``. ``--profile FILE`` writes where the functions of
a step spend their time, by a profiler that makes small ones look slower than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.models import CONTENDERS, Tiny, TinyBlock
from shardwise.bench.meter import count_calls

#: Python and C calls for each unit and step (forward and backward) beyond the plain module's
CALLS_PER_UNIT = 262
MARK = 0.15


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _timed(names: list[str], units: int, rounds: int) -> dict[str, dict[str, float]]:
    x, runs = torch.randn(2, 16), {}
    for name in names:
        torch.manual_seed(0)
        began = time.perf_counter()
        model = CONTENDERS[name](Tiny(units), TinyBlock)
        wrap = time.perf_counter() - began
        runs[name] = (model, torch.optim.SGD(model.parameters(), lr=1e-5), wrap, [], [])
    for number in range(rounds + 3):
        for model, optimizer, _, passes, steps in runs.values():
            began = time.perf_counter()
            _step(model, x)
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 3:
                passes.append(middle - began)
                steps.append(time.perf_counter() - middle)
    base = min(runs["local"][3])
    return {
        name: {"per_unit_us": (min(passes) - base) / units * 1e6, "pass_ms": statistics.median(passes) * 1e3,
               "optimizer_ms": min(steps) * 1e3, "wrap_ms": wrap * 1e3}
        for name, (_, _, wrap, passes, steps) in runs.items()
    }


def _calls(name: str, units: int) -> int:
    """Calls made in one forward and backward."""
    torch.manual_seed(0)
    model, x = CONTENDERS[name](Tiny(units), TinyBlock), torch.randn(2, 16)
    for _ in range(3):
        _step(model, x)
        model.zero_grad()
    return count_calls(lambda: _step(model, x))


def _count(names: list[str], units: int) -> int:
    plain = _calls("local", units)
    worst = 0.0
    for name in names:
        if name != "local":
            each = (_calls(name, units) - plain) / units
            print(f"{name:12s} {each:7.1f} calls for each unit and step")
            worst = max(worst, each if name in ("wrapper", "fully_shard") else 0.0)
    print(f"budget {CALLS_PER_UNIT}")
    return 0 if worst <= CALLS_PER_UNIT else 1


def _profile(name: str, units: int, rounds: int) -> str:
    """Functions of a step: calls, and microseconds of their own, for each unit and step."""
    torch.manual_seed(0)
    model, x, profiler = CONTENDERS[name](Tiny(units), TinyBlock), torch.randn(2, 16), cProfile.Profile()
    for number in range(rounds + 3):
        if number >= 3:
            profiler.enable()
        _step(model, x)
        profiler.disable()
        model.zero_grad()
    stats: Any = pstats.Stats(profiler)
    rows = sorted(((own, calls, f"{'/'.join(Path(file).parts[-2:])}:{function}")
                   for (file, _, function), (_, calls, own, _, _) in stats.stats.items()), reverse=True)
    each = units * rounds
    lines = [f"{calls / each:7.2f} {own / each * 1e6:8.2f}  {function}\n" for own, calls, function in rows[:60]]
    return f"{name}, {units} units: calls and microseconds of their own, for each unit and step\n" + "".join(lines)


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contenders", default="local,fsdp1,fsdp2,wrapper,fully_shard")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.world, store=FakeStore())
    names = options.contenders.split(",")
    if options.calls:
        return _count(names, options.units)
    if options.profile:
        options.profile.write_text("\n".join(_profile(name, options.units, options.rounds) for name in names))
        return 0
    found = _timed(names, options.units, options.rounds)
    for name, row in found.items():
        print(f"{name:12s} " + "  ".join(f"{key} {value:9.1f}" for key, value in row.items()))
    ratios = {f"{ours}/{peer}": found[ours]["per_unit_us"] / found[peer]["per_unit_us"]
              for ours in ("wrapper", "fully_shard") for peer in ("fsdp1", "fsdp2")
              if ours in found and peer in found}
    print("  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), f"(mark {MARK})")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "found": found, "ratios": ratios},
                                           indent=2) + "\n")
    return 0 if all(ratio <= MARK for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
