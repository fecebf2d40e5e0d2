"""The configurations that the marks are about, each with ``shardwise bench`` on ranks of its own.

Writes ``bench-NAME.json`` and ``.png`` for each into a folder, and judges the ratios. Run it on a
quiet machine; all of it takes some minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["CONFIGURATIONS", "MARKS", "command", "verdicts"]

#: step time of either front end over that of the peer, at most
MARKS = {"ddp": 1.00, "fsdp1": 0.70, "fsdp2": 0.55}
_HEAVY = ["--width", "768", "--layers", "8", "--heads", "12", "--batch", "4", "--context", "256"]

#: name -> (ranks, options of ``shardwise bench``); without options it is the small GPT
CONFIGURATIONS: dict[str, tuple[int, list[str]]] = {
    "small-fp32-2": (2, ["--rounds", "15"]),
    "small-bf16-2": (2, ["--rounds", "15", "--precision", "bf16"]),
    "heavy-fp32-2": (2, ["--rounds", "5", *_HEAVY]),
    "heavy-bf16-2": (2, ["--rounds", "5", *_HEAVY, "--precision", "bf16"]),
    "small-fp32-4": (4, ["--rounds", "9"]),
    "small-accumulate-2": (2, ["--rounds", "7", "--accumulate", "4"]),
}


def command(name: str, folder: Path) -> list[str]:
    """What runs one configuration."""
    ranks, options = CONFIGURATIONS[name]
    picture = ["--picture", str(folder / f"bench-{name}.png")] if importlib.util.find_spec("matplotlib") else []
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "-m", "shardwise", "bench", *options, "--json", str(folder / f"bench-{name}.json"), *picture]


def verdicts(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(ours/peer, median of the ratios of each round, mark) for what is in ``report``."""
    seconds = {row["name"]: row["seconds"] for row in report["rows"]}

    def ratio(ours: str, peer: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[ours], seconds[peer], strict=True))

    return [(f"{ours}/{peer}", ratio(ours, peer), mark)
            for ours in ("wrapper", "fully_shard") for peer, mark in MARKS.items()
            if ours in seconds and peer in seconds]


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    holds = True
    for name in options.configurations.split(","):
        print(f"\n{name}", flush=True)
        holds &= subprocess.run(command(name, options.folder), check=False).returncode == 0
        report = json.loads((options.folder / f"bench-{name}.json").read_text())
        holds &= not report["left_out"]
        for pair, ratio, mark in verdicts(report):
            print(f"{pair:20s} {ratio:.2f} (mark {mark:.2f}){'' if ratio <= mark else '  short'}", flush=True)
            holds &= ratio <= mark
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
