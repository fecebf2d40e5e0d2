"""What ``shardwise doctor`` looks at: this machine, and the launch that this process belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["FAIL", "OK", "WARN", "Finding", "examine", "examine_launch"]

OK, WARN, FAIL = "ok", "warning", "failure"
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHARED_BYTES = 1 << 30
_SKEW_S = 1.0


class Finding(NamedTuple):
    """One thing that was looked at: ``remedy`` says what to mend where it is not ok."""

    check: str
    level: str
    text: str
    remedy: str = ""


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Everything that one process can see."""
    checks: tuple[Callable[[Mapping[str, str]], Iterator[Finding]], ...] = (
        _versions, _backends, _launch, _port, _interfaces, _shared_memory, _limits, _clock, _nccl, _gpus)
    return [finding for check in checks for finding in check(environment)]


def _versions(_: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    recent = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)
    yield Finding("torch", OK if recent else FAIL, torch.__version__, "" if recent else "Install torch 2.11 or newer.")
    for name in ("numpy", "safetensors"):
        try:
            yield Finding(name, OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, FAIL, "not installed", f"pip install {name}")


def _backends(_: Mapping[str, str]) -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("backend", FAIL, "this torch has no torch.distributed", "Install a build of torch with it.")
        return
    found = [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    lacking = torch.cuda.is_available() and "nccl" not in found
    yield Finding("backend", FAIL if lacking or not found else OK, ", ".join(found) or "none",
                  "Install a build of torch with NCCL." if lacking else "")


def _launch(environment: Mapping[str, str]) -> Iterator[Finding]:
    there = [name for name in _LAUNCH if name in environment]
    if not there:
        yield Finding("launch", OK, "not under a launcher (start it with torchrun to check a launch)")
        return
    if missing := [name for name in _LAUNCH if name not in environment]:
        yield Finding("launch", FAIL, f"{', '.join(there)} set, but not {', '.join(missing)}",
                      "Start with torchrun, or set all four.")
        return
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", 0))
    except ValueError as error:
        yield Finding("launch", FAIL, str(error), "RANK, LOCAL_RANK and WORLD_SIZE are numbers.")
        return
    if not 0 <= rank < world:
        yield Finding("launch", FAIL, f"RANK {rank} is outside of WORLD_SIZE {world}", "Ranks count from 0.")
    elif torch.cuda.is_available() and local >= torch.cuda.device_count():
        yield Finding("launch", FAIL, f"LOCAL_RANK {local}, but {torch.cuda.device_count()} GPUs",
                      "Start as many processes on a node as it has GPUs.")
    else:
        yield Finding("launch", OK, f"rank {rank} of {world}")


def _port(environment: Mapping[str, str]) -> Iterator[Finding]:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if address is None:
        return
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        yield Finding("port", FAIL, f"MASTER_ADDR {address!r} is unknown here ({error})",
                      "Give an address, or a name that every node can look up.")
        return
    if not (port.isdigit() and 0 < int(port) < 65536):
        yield Finding("port", FAIL, f"MASTER_PORT {port!r}", "Give a port between 1024 and 65535.")
        return
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent or environment.get("RANK") != "0":
        yield Finding("port", OK, f"{address}:{port}")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
            yield Finding("port", OK, f"{port} is free")
        except OSError as error:
            yield Finding("port", FAIL, f"{port} cannot be had ({error.strerror})",
                          "Choose another MASTER_PORT, or end what uses this one.")


def _interfaces(environment: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    yield Finding("interfaces", OK, ", ".join(names))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [name.lstrip("^=") for name in environment.get(variable, "").split(",") if name]
        if unknown := [name for name in wanted if not any(known.startswith(name) for known in names)]:
            yield Finding("interfaces", FAIL, f"{variable} names {', '.join(unknown)}, which is not here",
                          f"Set it to one of {', '.join(names)}, or unset it.")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield Finding("interfaces", WARN if environment.get("GLOO_SOCKET_IFNAME") else FAIL,
                      f"the host's own name {socket.gethostname()!r} cannot be looked up, which gloo does",
                      "Add it to /etc/hosts, or set GLOO_SOCKET_IFNAME.")


def _shared_memory(_: Mapping[str, str]) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        yield Finding("shared memory", WARN, "there is no /dev/shm", "Ranks talk over gloo or NCCL all the same.")
        return
    little = free < _SHARED_BYTES
    yield Finding("shared memory", WARN if little else OK, f"/dev/shm has {free / 2**30:.1f} GiB free",
                  "Start the container with --shm-size=8g or --ipc=host." if little else "")
    if sys.platform == "linux":
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            yield Finding("shared memory", WARN, f"no pidfd ({error.strerror}): CPU ranks talk over gloo",
                          "Use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open.")


def _limits(environment: Mapping[str, str]) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 1024
    yield Finding("limits", WARN if few else OK, f"{files} open files", "ulimit -n 65536" if few else "")
    threads = environment.get("OMP_NUM_THREADS")
    if threads is None and int(environment.get("LOCAL_WORLD_SIZE", 1)) > 1:
        yield Finding("limits", WARN, "OMP_NUM_THREADS is not set: every rank takes all cores",
                      "Set it to the cores of a node divided by its ranks.")


def _clock(_: Mapping[str, str]) -> Iterator[Finding]:
    sane = time.time() > 1.7e9
    yield Finding("clock", OK if sane else FAIL, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                  "" if sane else "Set the clock: certificates and checkpoints' times depend on it.")


_NCCL_DOUBTS = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node do not talk directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node do not share memory"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used"),
    "NCCL_DEBUG": ("TRACE", "every call is written out, which is slow"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a lost rank is never noticed"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits in every collective"),
}


def _nccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (value, meaning) in _NCCL_DOUBTS.items():
        if environment.get(name) == value:
            yield Finding("NCCL", WARN, f"{name}={value}: {meaning}", f"Unset {name} unless you mean it.")
    others = sorted(name for name in environment if name.startswith("NCCL_") and name not in _NCCL_DOUBTS)
    if others:
        yield Finding("NCCL", OK, ", ".join(f"{name}={environment[name]}" for name in others))


def _gpus(_: Mapping[str, str]) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPUs", OK, "none: CPU ranks")
        return
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    yield Finding("GPUs", OK if len(names) == 1 else WARN, f"{count}: {', '.join(sorted(names))}",
                  "" if len(names) == 1 else "Ranks are as fast as the slowest GPU.")
    apart = [(a, b) for a in range(count) for b in range(count)
             if a != b and not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        yield Finding("GPUs", WARN, f"no direct access between {len(apart)} pairs, {apart[0]} for one",
                      "See nvidia-smi topo -m; in a virtual machine or with ACS on, PCIe goes through the host.")


# ---------------------------------------------------------------------- all ranks together
def examine_launch(timeout_s: float) -> list[Finding]:
    """Meet the other ranks and compare: versions, variables, clocks. A collective.

    The process group is made from the launcher's variables and destroyed at the end.
    """
    began = time.monotonic()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        return [Finding("ranks", FAIL, f"could not meet: {str(error).splitlines()[0]}",
                        "Look at MASTER_ADDR and MASTER_PORT, at firewalls, and whether all ranks were started.")]
    try:
        dist.barrier()
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, _card())
    except RuntimeError as error:
        return [Finding("ranks", FAIL, f"could not talk: {str(error).splitlines()[0]}",
                        "Set GLOO_SOCKET_IFNAME to an interface that reaches the other nodes.")]
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    hosts = {card["host"] for card in said}
    met = Finding("ranks", OK, f"{len(said)} on {len(hosts)} hosts met in {time.monotonic() - began:.1f} s")
    return [met, *_differences(said)]


def _card() -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    return {"host": socket.gethostname(), "time": time.time(), "torch": torch.__version__,
            "python": platform.python_version(), "variables": variables}


def _differences(cards: list[dict[str, Any]]) -> Iterator[Finding]:
    for name in ("torch", "python", "variables"):
        odd = [rank for rank, card in enumerate(cards) if card[name] != cards[0][name]]
        if odd:
            yield Finding("ranks", WARN if name == "python" else FAIL,
                          f"{name} of rank {odd[0]} differs from rank 0's: {cards[odd[0]][name]} and {cards[0][name]}",
                          "Use the same environment on every node.")
    times = [card["time"] for card in cards]
    if max(times) - min(times) > _SKEW_S:
        yield Finding("ranks", WARN, f"clocks differ by {max(times) - min(times):.1f} s",
                      "Synchronise them (chrony, ntp): logs of the ranks cannot be compared.")
