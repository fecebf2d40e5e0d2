"""Everything around the training loop: options, the process group, the wish to stop."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from text import Corpus, read_corpus
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

__all__ = ["Job", "parse", "refuse", "start"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options; what is wrong with them is said before any process group exists."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        usage="%(prog)s [options]   (--help explains them)",
        description="Train a small GPT on Python's own source files, sharded over all ranks. As it stands: "
        "about 10 million parameters, and under 4 minutes on 2 CPU cores. In brackets: the default.",
    )
    add = parser.add_argument_group("sharding").add_argument
    add("--front-end", choices=("wrapper", "fully_shard"), default="wrapper",
        help="FullyShardedDataParallel(model) or fully_shard(module) [%(default)s]")
    add("--strategy", choices=("full_shard", "shard_grad_op", "no_shard"), default="full_shard",
        help="free parameters after forward and backward, after backward only, or never [%(default)s]")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="dtype of computation [%(default)s]")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_count, default=64, metavar="N", help="train up to this step [%(default)s]")
    add("--batch", type=_count, default=8, metavar="N", help="sequences per rank and step [%(default)s]")
    add("--total-batch", type=_count, metavar="N",
        help="sequences per step over all ranks, however many there are [--batch each]")
    add("--accumulate", type=_count, default=1, metavar="N", help="cut a rank's batch into N [%(default)s]")
    add("--clip", type=_positive, default=1.0, metavar="X", help="largest gradient norm [%(default)s]")
    add("--lr", type=_positive, default=5e-4, metavar="X", help="peak learning rate [%(default)s]")
    add("--seed", type=int, default=0, metavar="N", help="of weights, batches and sample [%(default)s]")
    add("--text", type=Path, metavar="DIR", help="learn from the .py files here [the standard library]")
    add = parser.add_argument_group("model").add_argument
    add("--context", type=_count, default=96, metavar="N", help="bytes in a sequence [%(default)s]")
    add("--width", type=_count, default=320, metavar="N", help="numbers per position [%(default)s]")
    add("--depth", type=_count, default=8, metavar="N", help="blocks, each a unit of its own [%(default)s]")
    add("--heads", type=_count, default=5, metavar="N", help="attention heads per block [%(default)s]")
    add = parser.add_argument_group("run").add_argument
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR",
        help="where checkpoint, picture and figures go [%(default)s]")
    add("--save-every", type=_count, metavar="N", help="save every N steps too [only at the end]")
    add("--resume", action="store_true",
        help="go on from the checkpoint in --out; what torchrun has restarted does so by itself")
    add("--reference", action="store_true", help="train once more, unsharded, and compare")
    if _rank() != 0:  # all ranks refuse, one says why
        parser.error = lambda message: sys.exit(2)  # type: ignore[method-assign]
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = parser.parse_args(argv)
    if args.total_batch:
        if args.total_batch % _world():
            parser.error(f"--total-batch {args.total_batch} cannot be divided over {_world()} ranks")
        args.batch = args.total_batch // _world()
    args.resume |= _restarts() > 0 and (args.out / "checkpoint").exists()
    if complaint := _complaint(args):
        parser.error(complaint)
    return args


def _complaint(args: argparse.Namespace) -> str | None:
    """What no single option can know."""
    if args.front_end == "fully_shard" and args.strategy == "no_shard":
        return "fully_shard always shards; --strategy no_shard needs --front-end wrapper"
    if args.width % args.heads:
        return f"--width {args.width} cannot be divided over --heads {args.heads}"
    if args.batch % args.accumulate:
        return f"--batch {args.batch} cannot be cut into --accumulate {args.accumulate} equal pieces"
    if args.resume and not (args.out / "checkpoint").exists():
        return f"nothing to resume: there is no {args.out / 'checkpoint'}; run once without --resume"
    if args.text and not args.text.is_dir():
        return f"--text {args.text} is not a folder"
    return None


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


_count.__name__, _positive.__name__ = "whole number", "number"  # argparse shows these names


class Stop:
    """Ctrl-C or SIGTERM only asks; the ranks act on it together, between two steps."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


@dataclass
class Job:
    """This rank's place in the run."""

    args: argparse.Namespace
    corpus: Corpus
    rank: int
    world: int
    device: torch.device
    wish: Stop
    stopped: int = 0  # the signal that all ranks agreed to obey, 0 for none

    @property
    def rows(self) -> int:
        """Sequences per step, over all ranks."""
        return self.world * self.args.batch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of a training step."""
        return self._mine(self.corpus.batch(self.args.seed, step, self.rows, self.args.context))

    def held_out_batch(self, index: int) -> tuple[Tensor, Tensor]:
        return self._mine(self.corpus.held_out_batch(index, self.rows, self.args.context))

    def _mine(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, targets = (part.chunk(self.world)[self.rank].to(self.device) for part in batch)
        return ids, targets

    def share(self, loss: Tensor, memory: int) -> tuple[float, list[int]]:
        """One small exchange per step: the mean loss, every rank's memory, and whether to stop."""
        facts = torch.tensor([loss.item(), memory, self.wish.signal], dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(facts) for _ in range(self.world)]
        dist.all_gather(everyone, facts)
        losses, memories, signals = torch.stack(everyone).T.tolist()
        self.stopped = int(max(signals))
        return sum(losses) / self.world, [int(memory) for memory in memories]

    def settings(self) -> dict[str, object]:
        """What has to be the same for a resumed run to go on with the same model and data."""
        names = ("seed", "context", "width", "depth", "heads")
        chosen = {name: getattr(self.args, name) for name in names}
        return chosen | {"sequences per step": self.rows, "text": self.corpus.digest}

    def check(self, losses: list[float], saved: dict[str, object]) -> None:
        """Refuse to go on from a checkpoint that this command line does not continue."""
        for name, now in self.settings().items():
            if saved[name] != now:
                refuse(f"the checkpoint was made with {name} {saved[name]}, this run has {now}; "
                       "use the same, or start anew without --resume")
        if len(losses) >= self.args.steps:
            refuse(f"the checkpoint is at step {len(losses)} already; ask for more with --steps")


def start(args: argparse.Namespace) -> Job:
    """Join the process group that torchrun or srun described; alone, make a group of one."""
    env, wish = os.environ, Stop()
    try:
        corpus = read_corpus(args.text)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        refuse(str(error))
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
                   WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 10_000))
    gpus, local = torch.cuda.device_count(), int(env.get("LOCAL_RANK") or 0)
    if gpus and local >= gpus:
        refuse(f"{local + 1} processes or more on a machine with {gpus} GPUs; start one process per GPU")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(minutes=5), **_meeting())
    return Job(args, corpus, dist.get_rank(), dist.get_world_size(), device, wish)


def _meeting() -> dict[str, Any]:
    """Where the ranks find each other: as the environment says, in a group of one, or anew after a restart."""
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not (count := _restarts()):
        return {}
    store, rank, world = next(rendezvous("env://"))  # it still holds the addresses of those that died
    return {"store": dist.PrefixStore(f"restart {count}", store), "rank": rank, "world_size": world}


def refuse(reason: str) -> NoReturn:
    """End every rank; one of them says why."""
    if _rank() == 0:
        print(f"train_gpt: {reason}", file=sys.stderr, flush=True)
    sys.exit(2)


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def _restarts() -> int:
    """How often torchrun has started the ranks again after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _first_host(nodes: str) -> str:
    return subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True).split()[0]
