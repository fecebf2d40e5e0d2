"""U99 with processes that really come, leave and die: new process groups of other sizes, and no file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import checkpoint, fully_shard
from shardwise.checkpoint import streams
from shardwise.errors import CheckpointError, CommunicationError
from tests.bed.checkpoints import assert_alike
from tests.bed.models import TinyMLP, loss, points

_PATIENCE_S = 120.0
Run = tuple[nn.Module, torch.optim.Optimizer]


def _join(folder: Path, chapter: int, rank: int, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{chapter}", rank=rank, world_size=world)


def _run(seed: int = 9, **mesh: object) -> Run:
    model = TinyMLP(seed=seed)
    for module in (model.middle, model):
        fully_shard(module, **mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _step(run: Run, rank: int, number: int) -> float:
    model, optimizer = run
    optimizer.zero_grad()
    value = loss(model, points(rank, number))
    value.backward()
    dist.barrier()  # either all ranks step, or none does
    optimizer.step()
    return value.item()


def _again(path: Path, held: checkpoint.MemoryCheckpoint | None) -> Run:
    """The run, loaded from memory, which is what files give as well."""
    runs = [_run(), _run()]
    checkpoint.load(path, *runs[0])
    assert checkpoint.load_from_memory(held, *runs[1]) in ("three", "two", None)
    assert_alike(*runs)
    return runs[1]


def _leave_and_come(rank: int, folder: Path) -> None:
    """3 ranks, then two of them, then these and a new one."""
    run, held, staying = None, None, [0, 2]
    if rank < 3:
        _join(folder, 1, rank, 3)
        run = _run(seed=0)
        _step(run, rank, 0)
        checkpoint.save(folder / "three", *run)
        held = checkpoint.save_to_memory(*run, "three", holders=staying)
        dist.destroy_process_group()
    if rank in staying:
        _join(folder, 2, staying.index(rank), 2)
        run = _again(folder / "three", held)
        _step(run, rank, 1)
        checkpoint.save(folder / "two", *run)
        held = checkpoint.save_to_memory(*run, "two")
        dist.destroy_process_group()
    if rank != 1:
        _join(folder, 3, [0, 2, 3].index(rank), 3)
        run = _again(folder / "two", held)
        assert run[1].state[run[0].inward.weight]["step"] == 2
        _step(run, rank, 2)
        dist.destroy_process_group()


def test_u99_ranks_leave_and_come(tmp_path: Path) -> None:
    """U99: 3 -> 2 -> 3; the last one is a new process."""
    assert _exit_codes(_leave_and_come, 4, tmp_path) == [0] * 4, _told(tmp_path)


def _lose_one(rank: int, folder: Path) -> None:
    """Two replicas of two ranks; the last rank dies in step 2. The others go on as three."""
    _join(folder, 1, rank, 4)
    run = _run(seed=0, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    done, kept = 0, None
    with suppress(CommunicationError):
        while done < 10:
            if (rank, done) == (3, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            _step(run, rank, done)
            done += 1
            checkpoint.save(folder / f"step-{done}", *run)
            kept = checkpoint.save_to_memory(*run, copies=2)
    dist.destroy_process_group()
    _join(folder, 2, rank, 3)
    steps = [None] * 3
    dist.all_gather_object(steps, done)
    assert steps == [2, 2, 2]
    for held in (checkpoint.save_to_memory(*run), kept):  # from the live replica; from the last checkpoint
        _step(_again(folder / "step-2", held), rank, 2)
    dist.destroy_process_group()


def test_u99_survivors_go_on(tmp_path: Path) -> None:
    """U99: a rank is killed; the survivors have a whole replica, and a checkpoint in memory in two copies."""
    assert _exit_codes(_lose_one, 4, tmp_path) == [0, 0, 0, -signal.SIGKILL], _told(tmp_path)


def _die_in_the_middle(rank: int, folder: Path) -> None:
    """Rank 1 dies as values are about to move."""
    _join(folder, 1, rank, 2)
    run = _run(seed=0)
    _step(run, rank, 0)
    before = [p.detach().clone() for p in run[0].parameters()]
    if rank == 1:
        streams._Pairs.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoint.save_to_memory(*run)
    except CheckpointError as error:
        assert "saving a checkpoint to memory failed (rank 0): got rank 1 " in str(error), error
        assert all(torch.equal(p, value) for p, value in zip(run[0].parameters(), before, strict=True))
        os._exit(7)


def test_u99_a_rank_that_dies_in_a_save_is_named(tmp_path: Path) -> None:
    """U99: the others are told; model and optimizer are as they were."""
    assert _exit_codes(_die_in_the_middle, 2, tmp_path) == [7, -signal.SIGKILL], _told(tmp_path)


# ---------------------------------------------------------------------- processes
def _told(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("error-*")))


def _one(life: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    try:
        life(rank, folder)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _exit_codes(life: Callable[[int, Path], None], count: int, folder: Path) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "tests.bed.checkpoints"])
    processes = [context.Process(target=_one, args=(life, rank, folder)) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE_S)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
