"""``python -m benchmarks [NAME] ...``: the benchmark of that name (below); without one, the short ones."""

from __future__ import annotations

import subprocess
import sys

_RUNS = {
    "calls": [sys.executable, "-m", "benchmarks.host_time", "--calls"],
    "checkpoint": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "-m", "benchmarks.checkpoint"],
    "checks": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "benchmarks.checks"],
    "compare": [sys.executable, "-m", "benchmarks.compare"],
    "gloo": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "benchmarks.gloo"],
    "host-time": [sys.executable, "-m", "benchmarks.host_time"],
    "scale": [sys.executable, "-m", "benchmarks.scale"],
    "step": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "benchmarks.step"],
}
_LONG = {"checkpoint", "checks", "compare", "gloo", "scale"}  # minutes


def main(arguments: list[str]) -> int:
    """Run the named benchmark, or all short ones; the worst exit code."""
    names = arguments[:1] if arguments and arguments[0] in _RUNS else [n for n in _RUNS if n not in _LONG]
    rest = arguments[1:] if arguments and arguments[0] in _RUNS else arguments
    return max(subprocess.run([*_RUNS[name], *rest], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
