"""Two hosts, as two network namespaces of this machine: shared memory inside, the network across; and a cut between.

A link that is down, and one whose packets get lost without a word: each end then knows a hardware address
of the other that nobody has.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.contract.hosts_cut_script import LIMIT_S

_SCRIPT = Path(__file__).with_name("hosts_script.py")
_CUT_SCRIPT = Path(__file__).with_name("hosts_cut_script.py")
_GRACE_S = 9.0  # on a machine with more to do than cores
_ROOT = Path(__file__).resolve().parents[2]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces that reach each other as 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the program ip")
    names = [f"shardwise-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"sw{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [f"{name} {link}" for name, link in zip(names, links, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_hosts_of_two_ranks_train_with_the_bits_of_gloo(hosts: list[str]) -> None:
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(4):
        name, link = hosts[rank // 2].split()
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29711",
            "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, sys.executable, str(_SCRIPT)], env=environment,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=80)
            assert process.returncode == 0, errors
            assert "HierarchicalCollectives same" in output
    finally:
        for process in ranks:
            process.kill()


def _cut(hosts: list[str], how: str) -> None:
    for number, host in enumerate(hosts):
        name, link = host.split()
        if how == "down":
            _ip("-n", name, "link", "set", link, "down")
        else:
            _ip("-n", name, "neigh", "replace", f"10.77.0.{2 - number}", "lladdr", "02:00:00:00:00:99", "dev", link,
                "nud", "permanent")


def _heal(hosts: list[str]) -> None:
    for host in hosts:
        name, link = host.split()
        _ip("-n", name, "link", "set", link, "up")
        subprocess.run(["ip", "-n", name, "neigh", "flush", "dev", link, "nud", "permanent"], check=True)


def _start_hosts(
    stack: ExitStack, hosts: list[str], folder: Path, variables: dict[str, str]
) -> list[subprocess.Popen[str]]:
    started: list[subprocess.Popen[str]] = []
    for number, host in enumerate(hosts):
        name, link = host.split()
        environment = os.environ | variables | {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1",
                                                "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"}
        command = ["ip", "netns", "exec", name, sys.executable, str(_CUT_SCRIPT), str(number), str(folder)]
        process = stack.enter_context(subprocess.Popen(command, env=environment, text=True, bufsize=1,
                                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                       start_new_session=True))
        stack.callback(_end, process)
        started.append(process)
    return started


def _end(process: subprocess.Popen[str]) -> None:
    """The host and the ranks that it may still have."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _line(process: subprocess.Popen[str], limit_s: float = 40.0) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    assert ready, "no word from a host"
    return process.stdout.readline().strip()


def _tell(processes: list[subprocess.Popen[str]], text: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(text + "\n")


@pytest.mark.parametrize(("how", "point", "limit"), [("down", "step", ""), ("lost", "save", ""), ("lost", "step", "2")])
def test_A19_a_network_is_cut_and_heals(
    hosts: list[str], tmp_path: Path, how: str, point: str, limit: str
) -> None:
    """Every rank stops within the time limit of the group, or, where that is torch's own, within ``limit``; the run
    goes on from its checkpoint, bit by bit."""
    left = sorted(Path("/dev/shm").iterdir())
    with ExitStack() as stack:
        processes = _start_hosts(stack, hosts, tmp_path, {"SHARDWISE_LOST_AFTER": limit} if limit else {})
        _tell(processes, f"29711 until-cut {point}")
        assert _line(processes[0]) == "now"
        _cut(hosts, how)
        cut = time.monotonic()
        assert [_line(process) for process in processes] == ["7 7", "7 7"]  # and no process is left
        for rank in range(4):
            moment, text = (tmp_path / f"said-{rank}").read_text().split(" ", 1)
            print(f"rank {rank} after {float(moment) - cut:.1f} s: {text}")
            assert float(moment) - cut < LIMIT_S + _GRACE_S
            assert re.search(r"ranks? \d", text)
            assert not limit or "no sign of life" in text or "closed" in text or "left the group" in text, text
        assert sorted(Path("/dev/shm").iterdir()) == left
        _heal(hosts)
        _tell(processes, "29712 resume")
        assert [_line(process) for process in processes] == ["0 0", "0 0"]
        for rank in range(4):
            resumed, calm = json.loads((tmp_path / f"losses-{rank}").read_text())
            assert len(resumed) >= 3 and resumed == calm
    assert sorted(Path("/dev/shm").iterdir()) == left
