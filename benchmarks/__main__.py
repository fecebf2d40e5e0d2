"""``python -m benchmarks [calls|checkpoint|host-time|scale|step] ...``; without a name, all of them."""

from __future__ import annotations

import subprocess
import sys

_RUNS = {
    "calls": [sys.executable, "-m", "benchmarks.host_time", "--calls"],
    "checkpoint": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "-m", "benchmarks.checkpoint"],
    "host-time": [sys.executable, "-m", "benchmarks.host_time"],
    "scale": [sys.executable, "-m", "benchmarks.scale"],
    "step": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "benchmarks.step"],
}


def main(arguments: list[str]) -> int:
    """Run the named benchmark, or all; the worst exit code."""
    names = arguments[:1] if arguments and arguments[0] in _RUNS else list(_RUNS)
    rest = arguments[1:] if arguments and arguments[0] in _RUNS else arguments
    return max(subprocess.run([*_RUNS[name], *rest], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
