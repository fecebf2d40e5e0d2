"""``shardwise doctor``: what it finds, what it says to mend, JSON, exit codes; alone and under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.app import app
from shardwise.cli.machine import FAIL, OK, WARN, _differences, examine

_ROOT = Path(__file__).resolve().parents[2]


def of(check: str, **environment: str) -> list[tuple[str, str]]:
    found = [finding for finding in examine(environment) if finding.check == check]
    assert all(finding.remedy for finding in found if finding.level != OK), "says what to mend"
    return [(finding.level, finding.text) for finding in found]


def test_a_machine_that_runs_these_tests_is_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == 0, plain.output
    assert "torch" in plain.output and "/dev/shm has" in plain.output and "not under a launcher" in plain.output
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert found["ok"] is True
    assert {"check", "level", "text", "remedy"} == set(found["findings"][0])


@pytest.mark.parametrize(("variables", "text"), [
    ({"RANK": "0"}, "RANK set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 is outside of WORLD_SIZE 2"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "invalid literal for int() with base 10: 'x'"),
])
def test_a_wrong_launch(variables: dict[str, str], text: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if len(variables) > 1 else {}
    assert of("launch", **variables, **place) == [(FAIL, text)]


def test_a_port_that_is_taken_or_no_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        [(level, text)] = of("port", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0")
    assert level == FAIL and text.startswith(f"{port} cannot be had")
    assert of("port", MASTER_ADDR="127.0.0.1", MASTER_PORT="70000") == [(FAIL, "MASTER_PORT '70000'")]
    [(level, text)] = of("port", MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500")
    assert level == FAIL and "'no-such-host.invalid' is unknown here" in text


def test_an_interface_that_is_not_there_and_doubtful_variables() -> None:
    assert (FAIL, "GLOO_SOCKET_IFNAME names nope0, which is not here") in of("interfaces", GLOO_SOCKET_IFNAME="nope0")
    assert of("NCCL", NCCL_P2P_DISABLE="1", NCCL_ALGO="Ring") == [
        (WARN, "NCCL_P2P_DISABLE=1: GPUs of a node do not talk directly"), (OK, "NCCL_ALGO=Ring")]
    assert (WARN, "OMP_NUM_THREADS is not set: every rank takes all cores") in of("limits", LOCAL_WORLD_SIZE="8")


def test_ranks_that_differ() -> None:
    card = {"host": "a", "time": 100.0, "torch": "2.13", "python": "3.11", "variables": {}}
    assert list(_differences([card, card])) == []
    found = list(_differences([card, card | {"torch": "2.12", "time": 103.0}]))
    assert [(f.level, f.text) for f in found] == [
        (FAIL, "torch of rank 1 differs from rank 0's: 2.12 and 2.13"), (WARN, "clocks differ by 3.0 s")]


def test_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "failure" in result.output and "or unset it." in result.output


def test_under_a_launcher_the_ranks_meet() -> None:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "shardwise.cli", "doctor", "--json"],
        env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert any(f["text"].startswith("2 on 1 hosts met in") for f in found["findings"]), found
