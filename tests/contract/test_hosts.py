"""Two hosts, as two network namespaces of this machine: shared memory inside, the network across."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("hosts_script.py")
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
