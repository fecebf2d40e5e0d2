"""Train a small GPT with its parameters, gradients and optimizer state sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --reference

Runs on CPU processes, or with one GPU per process where there are GPUs; on several nodes start it with
torchrun's own options or with `srun`. Copy what you need: `shard` is all that sharding takes, the rest is
a plain PyTorch loop. Ctrl-C or SIGTERM stops all ranks together after a step, with a checkpoint. With
`--save-every N`, and `--max-restarts` for torchrun, a run whose rank dies goes on from its last checkpoint;
with `--total-batch` also on another number of ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from gpt import GPT, Block
from launch import Job, parse, refuse, start
from measure import state_bytes, unsharded_bytes
from picture import Recorder
from report import Run, Screen, finish
from text import VOCABULARY, decode, encode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
import shardwise.checkpoint
from shardwise import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from shardwise.errors import CheckpointError
from shardwise.wrap import ModuleWrapPolicy


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Make each block a unit: gathered just before it is used, freed right after."""
    low = torch.bfloat16 if args.precision == "bf16" else None
    if args.front_end == "fully_shard":
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        reshard = args.strategy == "full_shard"
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
        return fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[args.strategy.upper()],
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32),
        device_id=device if device.type == "cuda" else None,
        use_orig_params=True,
    )


def train(job: Job, screen: Screen, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on from step ``len(run.losses)``; stop early, all ranks together, when one was asked to."""
    args, first, began = job.args, len(run.losses), time.perf_counter()
    with screen.progress(run.name, first, args.steps) as show:
        while len(run.losses) < args.steps and not job.stopped:
            run.recorder.begin()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(len(run.losses), args.lr)
            loss = forward_backward(model, *job.batch(len(run.losses)), args.accumulate, run.recorder)
            run.recorder.phase("optimizer")
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            run.recorder.phase("end")
            run.held = state_bytes(model, optimizer)
            optimizer.zero_grad()

            mean, memory = job.share(loss, run.held.total + run.recorder.peak())
            run.losses.append(mean)
            speed = job.rows * args.context * (len(run.losses) - first) / (time.perf_counter() - began)
            show(len(run.losses), loss=mean, speed=speed, memory=memory)
            if args.save_every and len(run.losses) % args.save_every == 0 and run.name == "sharded":
                save(job, model, optimizer, run.losses)


def learning_rate(step: int, peak: float) -> float:
    """A short warm-up, then a slow decay; it knows no last step, so a longer run begins the same."""
    return peak * min(1.0, (step + 1) / 8) / math.sqrt(1 + step / 32)


def forward_backward(model: nn.Module, ids: Tensor, targets: Tensor, pieces: int, note: Recorder) -> Tensor:
    """Gradients of the mean loss; the ranks exchange them once, with the last piece of the batch."""
    total = torch.zeros((), device=ids.device)
    for number, (some, wanted) in enumerate(zip(ids.chunk(pieces), targets.chunk(pieces), strict=True), 1):
        with exchange(model, number == pieces):
            note.phase("forward")
            loss = model(some, wanted) / pieces
            note.phase("backward")
            loss.backward()
        total += loss.detach()
    return total


def exchange(model: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Exchange gradients now, or let them add up on each rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else model.no_sync()


@torch.no_grad()
def evaluate(job: Job, model: nn.Module, batches: int = 4) -> float:
    """The mean loss on files that training never sees."""
    total = sum(model(*job.held_out_batch(index)) for index in range(batches))
    dist.all_reduce(total)
    return total.item() / (batches * job.world)


@torch.no_grad()
def sample(job: Job, model: nn.Module, prompt: str = "def ", length: int = 120) -> str:
    """Continue ``prompt``. Every rank runs every forward, since each holds only a part of the model."""
    dice = torch.Generator().manual_seed(job.args.seed)
    ids = encode(prompt)
    for _ in range(length):
        logits = model(ids[None, -job.args.context :].to(job.device))[0, -1].cpu()
        ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(0), 1, generator=dice)])
    return decode(ids)


def save(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    extra = {"losses": losses, "settings": job.settings()}
    shardwise.checkpoint.save(job.args.out / "checkpoint", model, optimizer, extra=extra)


def resume(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    try:
        extra = shardwise.checkpoint.load(job.args.out / "checkpoint", model, optimizer)
    except CheckpointError as error:  # raised on all ranks alike
        refuse(str(error))
    job.check(extra["losses"], extra["settings"])
    return extra["losses"]


def build(job: Job) -> GPT:
    """The same first weights on every rank and in every run of the same seed."""
    args = job.args
    torch.manual_seed(args.seed)
    return GPT(VOCABULARY, args.context, args.width, args.depth, args.heads).to(job.device)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def run_sharded(job: Job, screen: Screen) -> Run:
    model = shard(build(job), job.args, job.device)
    optimizer = adamw(model, job.args.lr)
    run = Run("sharded", Recorder(model))
    if job.args.resume:
        run.losses = resume(job, model, optimizer)
    with shardwise.observe(model, run.recorder):
        train(job, screen, run, model, optimizer)
    save(job, model, optimizer, run.losses)
    if not job.stopped:
        run.held_out = evaluate(job, model)
        screen.sample(sample(job, model))
    return run


def run_unsharded(job: Job, screen: Screen) -> Run:
    """The same run with the whole model on every rank, by torch's own data parallelism."""
    model = DistributedDataParallel(build(job), gradient_as_bucket_view=True)
    optimizer = adamw(model, job.args.lr)
    run = Run("unsharded", Recorder())
    train(job, screen, run, model, optimizer)
    if not job.stopped:
        run.held_out = evaluate(job, model)
    return run


def main() -> int:
    job = start(parse())
    screen = Screen(job.rank)
    whole = unsharded_bytes(build(job))
    screen.header(job, whole.parameters // 4)
    sharded = run_sharded(job, screen)
    unsharded = run_unsharded(job, screen) if job.args.reference and not job.stopped else None
    if job.stopped:
        screen.say(f"stopped; the checkpoint is at step {len(sharded.losses)}, --resume goes on from there")
    else:
        finish(job, screen, sharded, unsharded, whole)
    dist.destroy_process_group()
    return 128 + job.stopped if job.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
