"""A rank that dies, leaves or does not come is an error on the others that names it; nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import rendezvous
from shardwise.comm.arena import Arena
from shardwise.comm.choose import collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.comm.shared_memory import SharedMemoryCollectives
from shardwise.errors import CommunicationError, PeerError
from tests.bed import ranks

_CPU = torch.device("cpu")
_CLASS = {"process group": "MatchedCollectives", "shared memory": "SharedMemoryCollectives"}
_PATIENCE_S = 200.0
every_transport = pytest.mark.parametrize("transport", list(_CLASS))


def _join(rank: int, world: int, folder: Path, transport: str) -> tuple[Collectives, Tensor, Tensor]:
    """Become a rank of a new world, which has run one gather: its transport, the input, the output."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    group = collectives_for(dist.group.WORLD, _CPU, shared_memory=transport == "shared memory")
    assert type(group).__name__ == _CLASS[transport]
    shard, out = group.allocate(1000, torch.float32, _CPU).fill_(rank), torch.empty(1000 * world)
    group.all_gather(out, shard).wait()
    return group, shard, out


def _gather_until_a_peer_is_lost(rank: int, world: int, folder: Path, transport: str, victim: int) -> None:
    group, shard, out = _join(rank, world, folder, transport)
    group.describe_tag = "layers.{}".format
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.all_gather(out, shard, tag=4).wait()
    except PeerError as error:
        (folder / f"error-{rank}").write_text(str(error))
    os._exit(7)


def _errors_after_a_kill(folder: Path, transport: str, world: int, victim: int) -> list[str]:
    """What each survivor says."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
    processes = [context.Process(target=_gather_until_a_peer_is_lost,
                                 args=(rank, world, folder, transport, victim)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE_S)
        assert [process.exitcode for process in processes] == [
            -signal.SIGKILL if rank == victim else 7 for rank in range(world)]
    finally:
        for process in processes:
            process.kill()
    return [(folder / f"error-{rank}").read_text() for rank in range(world) if rank != victim]


@every_transport
def test_a_killed_rank_is_an_error_that_says_where(tmp_path: Path, transport: str) -> None:
    left = sorted(Path("/dev/shm").iterdir())
    [text] = _errors_after_a_kill(tmp_path, transport, world=2, victim=1)
    assert "during gather of 'layers.4' in the group of ranks 0, 1" in text
    assert sorted(Path("/dev/shm").iterdir()) == left


def test_all_survivors_name_the_dead_rank_and_not_each_other(tmp_path: Path) -> None:
    for text in _errors_after_a_kill(tmp_path, "shared memory", world=4, victim=2):
        assert text.startswith("shardwise: rank 2 died during gather of 'layers.4'")


def _linger_after_a_loss(rank: int, world: int, folder: Path) -> None:
    """Ranks 0 and 1 believe that they share a host, and so do 2 and 3. No survivor ends before all know."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    rendezvous.host_name = lambda: f"host {rank // 2}"
    group = collectives_for(dist.group.WORLD, _CPU)
    assert type(group).__name__ == "HierarchicalCollectives"
    out = torch.empty(1000)
    try:
        while True:
            group.reduce_scatter(out, torch.ones(1000 * world), tag=4).wait()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommunicationError as error:
        (folder / f"error-{rank}").write_text(str(error))
    while len(list(folder.glob("error-*"))) < world - 1:
        time.sleep(0.05)
    os._exit(7)


def test_a_killed_rank_is_heard_of_on_other_hosts_too(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
    processes = [context.Process(target=_linger_after_a_loss, args=(rank, 4, tmp_path)) for rank in range(4)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE_S)
        assert [process.exitcode for process in processes] == [7, -signal.SIGKILL, 7, 7]
    finally:
        for process in processes:
            process.kill()
    assert "rank 1 died during" in (tmp_path / "error-0").read_text()
    for rank in (2, 3):
        text = (tmp_path / f"error-{rank}").read_text()
        assert any(words in text for words in ("rank 1 died", "left the group", "does not answer")), text


_SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
from shardwise.comm.choose import close_all
from tests.contract.test_lost_ranks import _join
group, shard, out = _join(int(sys.argv[1]), 2, Path(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize(("ending", "codes", "told"), [
    ("", [0, 0], ["", ""]),
    ("close_all(); dist.destroy_process_group(); close_all()", [0, 0], ["", ""]),
    ("dist.destroy_process_group()", [0, 0], ["", ""]),
    ("1 / dist.get_rank(); group.barrier()", [1, 1],
     ["ZeroDivisionError", "PeerError: shardwise: rank 0 (left the group|died).* during barrier"]),
], ids=["just ends", "closes", "destroys the group", "raises"])
@every_transport
def test_an_interpreter_may_end_in_any_way(
    tmp_path: Path, transport: str, ending: str, codes: list[int], told: list[str]
) -> None:
    left = sorted(Path("/dev/shm").iterdir())
    script = [sys.executable, "-W", "error", "-c", _SCRIPT + ending]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    with ExitStack() as running:
        processes = [running.enter_context(subprocess.Popen(
            [*script, str(rank), str(tmp_path), transport], env=environment, text=True, stderr=subprocess.PIPE))
            for rank in range(2)]
        for process in processes:
            running.callback(process.kill)
        errors = [process.communicate(timeout=_PATIENCE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == codes, errors
    for error, pattern in zip(errors, told, strict=True):
        assert re.search(pattern, error) if pattern else error == "", error
    assert sorted(Path("/dev/shm").iterdir()) == left


@ranks(2)
def test_a_rank_that_does_not_come_is_named(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    group = SharedMemoryCollectives(dist.group.WORLD, timeout_s=0.2)
    if rank == 0:
        with pytest.raises(PeerError, match=r"rank 1 did not arrive within 0\.2 s during gather with tag 6"):
            group.all_gather(torch.empty(2), torch.empty(1), tag=6)
        with pytest.raises(CommunicationError, match=r"is closed, .* no barrier .*rank 1 did not arrive"):
            group.barrier()
    dist.barrier()
    if rank == 1:
        with pytest.raises(PeerError, match="rank 0 left the group during gather"):
            group.all_gather(torch.empty(2), torch.empty(1), tag=6)


@ranks(2)
def test_a_rank_that_closed_its_transport_is_named(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    group = SharedMemoryCollectives(dist.group.WORLD)
    if rank == 1:
        group.close()
        group.close()
        with pytest.raises(CommunicationError, match=r"ranks 0, 1 is closed, .* \(it was closed\)"):
            group.barrier()
    else:
        with pytest.raises(PeerError, match="rank 1 left the group during barrier"):
            group.barrier()


@ranks(2)
def test_a_rank_without_memory_is_an_error_and_no_hang(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    group = SharedMemoryCollectives(dist.group.WORLD, Arena(16384 if rank else 1 << 24))
    buffer = group.allocate(100_000, torch.float32, _CPU)  # private on rank 1
    told = (CommunicationError, r"no shared memory left for 400000 bytes \(rank 1\)") if rank else (
        PeerError, "rank 1 left the group")
    with pytest.raises(told[0], match=told[1]):
        group.all_gather(torch.empty(200_000), buffer)
    dist.barrier()


@ranks(2)
def test_a_group_that_is_closed_leaves_no_descriptor(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    SharedMemoryCollectives(dist.group.WORLD).close()  # what is imported late is open by now
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        group = SharedMemoryCollectives(dist.group.WORLD)
        group.barrier()
        group.close()
        del group
    assert len(os.listdir("/proc/self/fd")) == before
