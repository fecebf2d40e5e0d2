"""A19, C8: a rank that is stuck says in what, for how long, and where, on a signal or after a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import shardwise
from shardwise.comm.agreement import Call, Kind
from shardwise.comm.underway import Waiting
from shardwise.engine import stuck
from shardwise.engine.stuck import stuck_report
from shardwise.errors import ConfigurationError

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import os, sys, torch, torch.distributed as dist, shardwise
rank, folder, over = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
from shardwise.comm import mesh
from shardwise.comm.choose import collectives_for
if over == "group":
    mesh.collectives_for = lambda group, device, **_: collectives_for(group, device, shared_memory=False)
if "UNASKED_S" in os.environ:
    from shardwise.engine import stuck
    stuck._UNASKED_S = float(os.environ["UNASKED_S"])
elif "SHARDWISE_STUCK_AFTER" not in os.environ:
    shardwise.report_stuck()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
shardwise.fully_shard(net[1])
shardwise.fully_shard(net)
net(torch.ones(1, 64))
print("trained", flush=True)
def step():
    return net(torch.ones(1, 64))  # the line
if rank == 0:
    step()
sys.stdin.read()  # rank 1 never comes
"""


def _launch(stack: ExitStack, folder: Path, over: str, **variables: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables,
                   "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    ranks = [stack.enter_context(subprocess.Popen(
        [sys.executable, str(script), str(rank), str(folder), over], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)) for rank in range(2)]
    for process in ranks:
        stack.callback(process.kill)
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
    return ranks


def _report(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if line.startswith("[shardwise]"))


@pytest.mark.parametrize("over", ["shared", "group"])
def test_A19_a_signal_tells_what_each_rank_does(tmp_path: Path, over: str) -> None:
    with ExitStack() as stack:
        ranks = _launch(stack, tmp_path, over)
        text = ""
        while "gather of" not in text:  # it may not have come to its collective yet
            ranks[0].send_signal(signal.SIGUSR1)
            text = _report(ranks[0])
        assert text.startswith("[shardwise] rank 0 waits ")
        assert " s in gather of '(root)' in the group of ranks 0, 1" in text
        assert ("(rank 1 has not come)" in text) == (over == "shared")
        assert "; forward of '(root)'; at " in text
        assert text.endswith("in step: return net(torch.ones(1, 64))  # the line\n")
        ranks[1].send_signal(signal.SIGUSR1)
        text = _report(ranks[1])
        assert text.startswith("[shardwise] rank 1 waits in no collective; no model runs; at ")
        assert "sys.stdin.read()" in text


def test_A19_a_time_limit_tells_once_without_a_signal(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = _launch(stack, tmp_path, "shared", SHARDWISE_STUCK_AFTER="0.2")
        text = _report(ranks[0])
        assert "rank 0 waits 0." in text and "(rank 1 has not come)" in text


def test_A19_a_long_wait_is_told_of_unasked(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = _launch(stack, tmp_path, "shared", UNASKED_S="0.2")
        text = _report(ranks[0])
        assert "in gather of '(root)' in the group of ranks 0, 1 (rank 1 has not come); forward of '(root)'" in text
        assert text.endswith("(told unasked, on one rank; SHARDWISE_STUCK_AFTER=<seconds> tells more, "
                             "SHARDWISE_STUCK_AFTER=0 nothing)\n")


@pytest.mark.parametrize(("rank", "missing", "speaks"), [
    (0, [2], True), (1, [2], False), (1, [0], True), (2, [], False)])
def test_A19_one_rank_speaks_unasked_and_later_only_of_longer_waits(
    rank: int, missing: list[int], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stuck, "_rank", lambda: rank)
    wait = Waiting(Call(Kind.BARRIER), None, (0, 1, 2), lambda: missing)
    wait.since -= 60
    reporter = stuck._Reporter(60.0, None, unasked=True)
    reporter._tell(wait)
    assert bool(capsys.readouterr().err) == speaks
    assert reporter.after_s is not None and reporter.after_s >= 120
    reporter.start()
    reporter.stop()


@pytest.mark.parametrize(("value", "threads"), [("", 1), ("0", 0), ("30", 1)])
def test_A19_the_environment_turns_reports_off(
    value: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_STUCK_AFTER", value)
    monkeypatch.setattr(stuck._Kept, "reporter", None)
    stuck._report_by_environment()
    reporter = stuck._Kept.reporter
    assert (reporter is not None) == bool(threads)
    if reporter is not None:
        assert reporter.unasked == (not value) and (reporter.number is None) == (not value)
        reporter.stop()


def test_A19_reports_can_be_ended_and_bad_times_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"not positive: expected seconds, or None, got 0\."):
        shardwise.report_stuck(0)
    before = len(os.listdir("/proc/self/fd"))
    shardwise.report_stuck(30, on_signal=False)
    shardwise.report_stuck(None, on_signal=False)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "waits in no collective" in stuck_report()


def test_U94_the_line_is_the_users_where_a_context_manager_of_ours_waits() -> None:
    """A save waits at the end of a block, in the standard library's code for it."""
    said: list[str] = []
    pull = map(said.append, iter(stuck_report, None))
    with ExitStack() as stack:
        stack.callback(next, pull)
    assert "contextlib" not in said[0] and "test_stuck.py" in said[0]
