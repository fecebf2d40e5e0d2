"""What one accelerator has to show, in one run of a few minutes; ``make device-check``.

    parity      one rank, NCCL: the same bits as the plain module
    speed       a GPT of about 1 B parameters in bf16: step and memory beside plain, FSDP1, FSDP2
    host        the host's time for each unit, with next to no arithmetic
    streams     a traced step: gathers and reductions on streams of their own
    allocator   no retries, nothing out of memory
    two ranks   two processes on the one device over gloo, where that works

Without an accelerator everything runs on the CPU at tiny sizes: a rehearsal, which says nothing of speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import shardwise
from benchmarks.device_parity import Net, gathered_bytes_are_kept, parity, train
from benchmarks.models import Tiny, TinyBlock
from shardwise import fully_shard
from shardwise.bench.contenders import Contender, Setup, Trainer, contenders_for
from shardwise.bench.measuring import Rounds, measure
from shardwise.bench.results import spread
from shardwise.bench.workload import Workload, built_in

RESULTS = Path(__file__).parent / "results"
Found = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Where, and how large."""

    device: torch.device
    tiny: bool
    trace: Path
    memory: float = 0.0  #: bytes of the device

    @property
    def workload(self) -> Workload:
        """A GPT of 1.14 B parameters, of fewer layers where five of it do not fit, or next to nothing."""
        if self.tiny:
            return built_in(width=32, layers=2, heads=2, context=16, vocabulary=64, batch=2)
        share = min(1.0, self.memory / 115e9)
        return built_in(width=2048, layers=max(2, int(20 * share)), heads=16, context=1024, vocabulary=32_000, batch=4)

    @property
    def rounds(self) -> Rounds:
        return Rounds(timed=2, warmup=1) if self.tiny else Rounds(timed=7, warmup=2)

    @property
    def setup(self) -> Setup:
        return Setup(self.workload.kinds, self.device, torch.bfloat16)


class _Plain(nn.Module):
    """fp32 parameters, bf16 arithmetic, no sharding."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self._device = model, device.type

    def forward(self, *batch: Any) -> Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            return self.model(*batch)


def _contenders() -> dict[str, Contender]:
    def plain(model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(_Plain(model, setup.device) if setup.compute is not None else model, setup)
    return {"plain": plain} | contenders_for(["wrapper", "fully_shard", "fsdp1", "fsdp2"])


# ---------------------------------------------------------------------- sections
def check_parity(check: Check) -> Found:
    """All bitwise, or how far apart."""
    found = parity(check.device)
    return {"ok": all(verdict["bitwise"] for verdict in found.values()), "cases": found}


def check_speed(check: Check) -> Found:
    """Step, peak memory, host time of a step."""
    report = measure(check.workload, _contenders(), check.setup, check.rounds)
    rows = {row.name: {"step_ms": 1e3 * spread(row.seconds).median, "of_plain": report.ratio(row.name, "plain").median,
                       "peak_MB": row.peak_bytes / 1e6, "loss": row.losses[-1],
                       "issue_ms": 1e3 * spread(row.issue_seconds or row.seconds).median} for row in report.rows}
    return {"ok": report.agrees and not report.left_out, "rows": rows, "samples": report.as_dict()}


def check_host(check: Check) -> Found:
    """Microseconds of the host for each unit and step beyond the plain module, of many tiny units."""
    units = 4 if check.tiny else 64

    class Loss(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    workload = Workload("tiny units", lambda: Loss(units), lambda rank, number: (torch.ones(2, 16),), (TinyBlock,))
    report = measure(workload, _contenders(), Setup((TinyBlock,), check.device), Rounds(3 if check.tiny else 15, 3))
    best = {row.name: min(row.issue_seconds or row.seconds) for row in report.rows}
    each = {name: (seconds - best["plain"]) / units * 1e6 for name, seconds in best.items() if name != "plain"}
    return {"ok": report.agrees and not report.left_out, "us_per_unit": each}


def check_streams(check: Check) -> Found:
    """A trace of one step, and the streams on which kernels ran."""
    model = check.workload.build().to(check.device)
    policy = shardwise.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in check.setup.blocks(model):
        fully_shard(module, mp_policy=policy)
    batch = [value.to(check.device) for value in check.workload.batch(0, 0)]
    for _ in range(2):
        model(*batch).backward()
    with shardwise.trace(check.trace) as traced:
        model(*batch).backward()
    lanes = {kind: sorted({span.lane for span in traced.spans if span.kind == kind})
             for kind in ("compute", "copy", "gather", "reduce")}
    streams = _streams(lambda: model(*batch).backward(), check.device)
    ok = check.device.type == "cpu" or len(streams) >= 3
    return {"ok": ok, "lanes": lanes, "kernels_by_stream": streams, "not_hidden": traced.summary.share,
            "trace": str(traced.path)}


def _streams(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """How many kernels and copies ran on each stream of the device."""
    if device.type == "cpu":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.accelerator.synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return streams_in(json.loads(Path(file.name).read_text()))


def streams_in(recorded: dict[str, Any]) -> dict[str, int]:
    """Stream -> kernels and copies, of a profiler's trace."""
    counts: dict[str, int] = {}
    for event in recorded["traceEvents"]:
        stream = event.get("args", {}).get("stream") if event.get("cat") in ("kernel", "gpu_memcpy") else None
        if stream is not None:
            counts[str(stream)] = counts.get(str(stream), 0) + 1
    return counts


def check_allocator(check: Check) -> Found:
    """Last of all sections on the device, for it tells of all of them."""
    if check.device.type == "cpu":
        return {"ok": True, "num_alloc_retries": 0, "num_ooms": 0}
    stats = torch.get_device_module(check.device).memory_stats(check.device)
    found = {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
    return {"ok": not any(found.values()), **found}


def check_two_ranks(check: Check) -> Found:
    """Two processes share the device; NCCL refuses that, gloo may not."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_rank, args=(str(check.device), f"{folder}/store", folder), nprocs=2, join=False)
        deadline = time.monotonic() + 90
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                return {"ok": False, "problem": "no answer within 90 s"}
        return json.loads(Path(folder, "found.json").read_text())


def _rank(rank: int, device: str, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = on_two_ranks(torch.device(device))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(device: torch.device) -> Found:
    """The same losses as unsharded training on both batches, and fp8 bytes kept. Collective."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain, model = Net().to(device), Net()
    model.load_state_dict(plain.state_dict())
    model = model.to(device)
    for module in (*model.blocks, model):
        fully_shard(module)
    both = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(device)
    expected = train(plain, list(plain.parameters()), both)
    mine = torch.tensor(train(model, list(model.parameters()), both[4 * rank : 4 * rank + 4]), device="cpu")
    losses = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(losses, mine)
    apart = float((torch.stack(losses).mean(0) - torch.tensor(expected)).abs().max())
    return {"ok": apart < 1e-5 and gathered_bytes_are_kept(device), "loss_apart": apart}


SECTIONS: dict[str, Callable[[Check], Found]] = {
    "parity": check_parity, "speed": check_speed, "host": check_host, "streams": check_streams,
    "allocator": check_allocator, "two ranks": check_two_ranks,
}


# ---------------------------------------------------------------------- running
def run(check: Check, names: list[str], budget_s: float) -> dict[str, Found]:
    """Each section, as long as there is time; what goes wrong in one is no end of the others."""
    found: dict[str, Found] = {}
    began = time.monotonic()
    for name in names:
        start = time.monotonic()
        if start - began > budget_s:
            found[name] = {"ok": False, "problem": f"not run: {budget_s:.0f} s were over"}
            continue
        try:
            found[name] = SECTIONS[name](check)
        except Exception as error:
            found[name] = {"ok": False, "problem": f"{type(error).__name__}: {error}",
                           "stack": traceback.format_exc()}
        _let_go(check.device)
        found[name]["seconds"] = time.monotonic() - start
        _show(name, found[name])
    return found


def _let_go(device: torch.device) -> None:
    """Give the memory of a section's models back, to the next section or to other processes."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _show(name: str, found: Found) -> None:
    print(f"{'ok    ' if found['ok'] else 'FAILED'} {name:10s} {found['seconds']:6.1f} s  {found.get('problem', '')}")
    for key, value in found.items():
        if isinstance(value, dict) and key != "samples":
            for label, entry in value.items():
                print(f"         {key} {label}: {_text(entry)}")
        elif key not in ("ok", "seconds", "problem", "samples"):
            print(f"         {key}: {_text(value)}")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; 0 if every section holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no section begins")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    rehearsal = device.type == "cpu"
    if rehearsal:
        print("no accelerator: a rehearsal on the CPU at tiny sizes")
    folder = RESULTS if not rehearsal else Path(tempfile.gettempdir())
    memory = 0.0 if rehearsal else float(torch.get_device_module(device).mem_get_info(device)[1])
    check = Check(device, options.tiny or rehearsal, folder / "device-trace.json", memory)
    if not rehearsal:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("gloo" if rehearsal else dist.get_default_backend_for_device(device),
                            store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = run(check, options.sections.split(","), options.budget)
    finally:
        dist.destroy_process_group()
    path = options.json or (None if rehearsal else RESULTS / "device-check.json")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = "cpu" if rehearsal else torch.get_device_module(device).get_device_name(device)
        path.write_text(json.dumps({"torch": torch.__version__, "device": name, "rehearsal": check.tiny,
                                    "sections": found}, indent=2) + "\n")
    return 0 if all(section["ok"] for section in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
