"""The demo: its data, its options, its figures, and a short run of it under torchrun."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("rich", reason="the demo prints with rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # the examples import each other as scripts do

import launch  # noqa: E402
import measure  # noqa: E402
import picture  # noqa: E402
import report  # noqa: E402
import text  # noqa: E402
from gpt import GPT  # noqa: E402
from rich.console import Console  # noqa: E402

MB = 1_000_000


# ---------------------------------------------------------------------- data
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ninety files of 20,000 bytes, each of one line that names it."""
    for number in range(90):
        line = f"# this is line of file {number:02}\n"
        (tmp_path / f"module_{number:02}.py").write_text((line * 1000)[:20_000])
    return tmp_path


def test_every_file_is_either_for_training_or_held_out(folder: Path) -> None:
    corpus = text.read_corpus(folder)
    train, held_out = bytes(corpus.train.tolist()), bytes(corpus.held_out.tolist())
    assert corpus.files == 90 and len(held_out) > 0
    for number in range(90):
        line = f"file {number:02}\n".encode()
        assert (line in train) != (line in held_out)
        assert (line in held_out) == text.is_held_out(f"module_{number:02}.py")


def test_another_file_moves_no_file_to_the_other_side(folder: Path) -> None:
    before = text.read_corpus(folder)
    (folder / "a_new_one.py").write_text("x = 1\n" * 1000)
    after = text.read_corpus(folder)
    assert not text.is_held_out("a_new_one.py")
    assert torch.equal(before.held_out, after.held_out)
    assert before.digest != after.digest


def test_tests_and_installed_packages_are_passed_over(folder: Path) -> None:
    before = text.read_corpus(folder)
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "module.py").write_text("y = 2\n")
    assert text.read_corpus(folder).digest == before.digest


def test_a_batch_depends_on_seed_and_step_only(folder: Path) -> None:
    corpus = text.read_corpus(folder)
    ids, targets = corpus.batch(seed=3, step=7, rows=4, context=16)
    again, _ = text.read_corpus(folder).batch(seed=3, step=7, rows=4, context=16)
    assert ids.shape == targets.shape == (4, 16)
    assert torch.equal(ids, again)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert not torch.equal(ids, corpus.batch(3, 8, 4, 16)[0])
    assert not torch.equal(ids, corpus.batch(4, 7, 4, 16)[0])


def test_a_folder_with_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"holds only \d+ bytes of them in 1 files\. Point --text at"):
        text.read_corpus(tmp_path)


def test_text_survives_encoding() -> None:
    assert text.decode(text.encode("def naïve():")) == "def naïve():"


# ---------------------------------------------------------------------- model
def test_no_position_sees_a_later_one() -> None:
    model = GPT(vocabulary=16, context=8, width=8, depth=2, heads=2)
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5] = 15
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


# ---------------------------------------------------------------------- options
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("line", "complaint"), [
    ("--front-end fully_shard --strategy no_shard", "--strategy no_shard needs --front-end wrapper"),
    ("--front-end ddp", "invalid choice: 'ddp'"),
    ("--width 30 --heads 4", "--width 30 cannot be divided over --heads 4"),
    ("--batch 8 --accumulate 3", "--batch 8 cannot be cut into --accumulate 3 equal pieces"),
    ("--steps 0", "--steps: must be 1 or more, got 0"),
    ("--steps many", "--steps: invalid whole number value: 'many'"),
    ("--clip -1", "--clip: must be above 0, got -1"),
    ("--out nowhere --resume", "nothing to resume: there is no nowhere"),
    ("--text nowhere", "--text nowhere is not a folder"),
])
def test_bad_options_are_refused_with_a_reason(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        launch.parse(line.split())
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as refused:
        launch.parse(["--steps", "0"])
    assert refused.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("alone")
def test_the_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        launch.parse(["--help"])
    assert shown.value.code == 0
    page = capsys.readouterr().out
    for option in vars(launch.parse([])):
        assert "--" + option.replace("_", "-") in page


# ---------------------------------------------------------------------- the run
def job(folder: Path, rank: int = 0, options: str = "--batch 2 --context 16") -> launch.Job:
    return launch.Job(launch.parse(options.split()), text.read_corpus(folder), rank, 2, torch.device("cpu"),
                      launch.Stop())


@pytest.fixture
def handlers_kept() -> object:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("alone", "handlers_kept")
def test_the_ranks_share_a_batch_out(folder: Path) -> None:
    parts = [job(folder, rank).batch(5)[0] for rank in (0, 1)]
    whole, _ = text.read_corpus(folder).batch(seed=0, step=5, rows=4, context=16)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("handlers_kept")
def test_a_signal_only_asks_and_the_first_counts() -> None:
    stop = launch.Stop()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGTERM


@pytest.mark.usefixtures("alone", "handlers_kept")
def test_a_checkpoint_of_another_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = job(folder)
    here.check([1.0] * 63, here.settings())
    with pytest.raises(SystemExit):
        here.check([1.0], here.settings() | {"sequences per step": 8})
    assert "made with sequences per step 8, this run has 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        here.check([1.0] * 64, here.settings())
    assert "at step 64 already; ask for more with --steps" in capsys.readouterr().err


# ---------------------------------------------------------------------- figures
def test_the_computed_bytes_are_those_of_a_real_step() -> None:
    model = GPT(vocabulary=16, context=8, width=8, depth=1, heads=2)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(8)[None]
    model(ids, ids).backward()
    optimizer.step()
    assert measure.state_bytes(model, optimizer) == measure.unsharded_bytes(model)


def test_a_span_is_one_figure_where_ranks_agree() -> None:
    assert measure.span([2 * MB, 2 * MB + 10]) == "2.0 MB"
    assert measure.span([3 * MB, 2 * MB]) == "2.0 to 3.0 MB"


def recorded() -> picture.Recorder:
    recorder = picture.Recorder()
    recorder.begin()
    start = recorder.begun
    recorder.phase("forward")
    recorder("gather", "root", 1 * MB, start + 1_000)
    for event, at in (("gather", 2), ("free", 3), ("gather", 5), ("reduce", 6), ("free", 7)):
        recorder(event, "block", 4 * MB, start + at * 1_000)
    recorder.phase("end")
    recorder("gather", "block", 4 * MB, start + 10**12)
    return recorder


def test_the_recorder_knows_when_each_unit_was_gathered() -> None:
    recorder = recorded()
    bands = recorder.bands()
    assert bands["block"] == [(0.002, 0.003, 4 * MB), (0.005, 0.007, 4 * MB)]
    (begun, freed, size), = bands["root"]
    assert (begun, size) == (0.001, 1 * MB)
    assert freed == recorder.phases[-1][0] / 1e6, "still gathered: until the end of the step"


def test_begin_forgets_the_step_before() -> None:
    recorder = recorded()
    recorder.begin()
    assert recorder.bands() == {} and recorder.peak() == 0


@pytest.mark.filterwarnings("default")  # matplotlib's own
def test_the_picture_appears_whole(tmp_path: Path) -> None:
    held, whole = measure.Bytes(MB, MB, 2 * MB), measure.Bytes(2 * MB, 2 * MB, 4 * MB)
    curves = {"sharded": [3.0, 2.0], "unsharded": [3.0, 2.0]}
    picture.draw(tmp_path / "demo.png", recorded(), held, whole, curves)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_replaced_whole(tmp_path: Path) -> None:
    for value in (1, 2):
        report.write_json(tmp_path / "demo.json", {"value": value})
    assert json.loads((tmp_path / "demo.json").read_text()) == {"value": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


# ---------------------------------------------------------------------- the screen
def screen(width: int = 100, terminal: bool = False) -> tuple[report.Screen, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
    return report.Screen(0, console, every=8), written


def test_without_a_terminal_there_is_a_plain_line_now_and_then() -> None:
    shown, written = screen()
    with shown.progress("sharded", 0, 20) as show:
        for step in range(1, 21):
            show(step, loss=2.5, speed=1000.0, memory=[MB, MB])
    lines = written.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "8/20", "16/20", "20/20"]
    assert lines[0] == "sharded  1/20  loss 2.5000  1,000 tokens/s  model memory 1.0 MB per rank"


@pytest.mark.parametrize(("width", "seen", "dropped"), [
    (130, ["loss 2.5000", "tokens/s", "per rank"], []),
    (60, ["loss 2.5000"], ["tokens/s", "per rank"]),
])
def test_a_narrow_terminal_keeps_the_loss(width: int, seen: list[str], dropped: list[str]) -> None:
    shown, written = screen(width, terminal=True)
    with shown.progress("sharded", 0, 2) as show:
        show(2, loss=2.5, speed=1000.0, memory=[MB, MB])
    for part in seen:
        assert part in written.getvalue()
    for part in dropped:
        assert part not in written.getvalue()


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = report.Screen(1)
    quiet.say("nothing")
    with quiet.progress("sharded", 0, 1) as show:
        show(1, loss=2.5, speed=1.0, memory=[MB])
    assert capsys.readouterr().out == ""


def test_the_tables_compare_sharded_and_unsharded() -> None:
    shown, written = screen()
    held = [measure.Bytes(MB, MB, 2 * MB), measure.Bytes(MB, MB, 2 * MB)]
    shown.console.print(report.size_table(held, measure.Bytes(2 * MB, 2 * MB, 4 * MB), measured=True))
    one = report.Run("sharded", picture.Recorder(), [2.0], held_out=3.0)
    two = report.Run("unsharded", picture.Recorder(), [2.5], held_out=3.0)
    shown.console.print(report.loss_table(one, two))
    rows = [line.replace("│", " ").split() for line in written.getvalue().splitlines()]
    assert ["optimizer", "2.0", "MB", "4.0", "MB", "0.50"] in rows
    assert ["total", "4.0", "MB", "8.0", "MB", "0.50"] in rows
    assert ["last", "training", "step", "2.000000", "2.500000", "2.0e-01"] in rows
    assert ["held-out", "files", "3.000000", "3.000000", "0.0e+00"] in rows


# ---------------------------------------------------------------------- all of it
def run_demo(out: Path, *options: str) -> dict[str, dict[str, dict[str, object]]]:
    return launch_demo(out, 2, EXAMPLES / "train_gpt.py", (), "--batch=2", "--reference", *options)


def launch_demo(
    out: Path, ranks: int, script: Path, launcher: Sequence[str], *options: str
) -> dict[str, dict[str, dict[str, object]]]:
    small = ["--width=32", "--depth=2", "--heads=2", "--context=32"]
    command = [sys.executable, str(EXAMPLES / "torchrun.py"), "--standalone", f"--nproc-per-node={ranks}", *launcher,
               str(script), *small, "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if not launcher:
        assert "Traceback" not in done.stderr
    return json.loads((out / "demo.json").read_text())


def test_two_ranks_train_resume_and_agree_with_the_unsharded_run(tmp_path: Path) -> None:
    """The second command goes on at step 3; its reference starts anew, so it proves the resumed steps."""
    first = run_demo(tmp_path, "--steps", "2")
    second = run_demo(tmp_path, "--steps", "4", "--resume")
    sharded, unsharded = (second["runs"][name]["losses"] for name in ("sharded", "unsharded"))
    assert sharded[:2] == first["runs"]["sharded"]["losses"]
    assert len(sharded) == 4
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(unsharded), rtol=1e-6, atol=0.0)
    per_rank = [rank["parameters"] for rank in second["bytes per rank"]]
    assert sum(per_rank) == second["bytes unsharded"]["parameters"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "demo.json", "demo.png"}


KILLED_ONCE = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_gpt
rate = train_gpt.learning_rate
def learning_rate(step, peak):
    if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(step, peak)
train_gpt.learning_rate = learning_rate
sys.exit(train_gpt.main())
"""


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_loss_differs(
    tmp_path: Path, folder: Path
) -> None:
    """A19, C25: torchrun restarts, and the run resumes by itself; then it goes on with one rank less."""
    script = tmp_path / "killed_once.pyw"  # not among the texts to learn from
    script.write_text(KILLED_ONCE.format(examples=str(EXAMPLES)))
    broken, calm = tmp_path / "broken", tmp_path / "calm"
    options = ("--total-batch=4", "--save-every=2", f"--text={folder}")
    first = launch_demo(broken, 2, script, ("--max-restarts=1",), *options, "--steps=4")
    second = launch_demo(broken, 1, EXAMPLES / "train_gpt.py", (), *options, "--steps=6", "--resume")
    undisturbed = launch_demo(calm, 1, EXAMPLES / "train_gpt.py", (), *options, "--steps=6")
    losses, expected = (run["runs"]["sharded"]["losses"] for run in (second, undisturbed))
    assert losses[:4] == first["runs"]["sharded"]["losses"] and len(losses) == 6
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0.0)
