"""What a killed or stopped worker of a sweep leaves, and how another one goes on with it."""

import math
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import runs, short
from tests.sweep.test_sweep import POISONED, folders, replaced, rows, sweep, write_sweep
from trainer.__main__ import main
from trainer.sweep import local
from trainer.sweep.folder import SweepFolder
from trainer.sweep.wave import Wave
from trainer.sweep.worker import Worker
from trainer.writers.json_files import as_json
from trainer.writers.locks import exclusive
from trainer.writers.summary import read_outcome

pytestmark = pytest.mark.usefixtures("lab")


def kill_in(phase: str, number: int, workdir: Path) -> None:
    """Starts a worker that kills itself just before the n-th file operation of a phase."""
    arguments = [str(workdir), str(workdir.with_suffix(".phase")), "1", phase, str(number)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.chaos_worker", *arguments],
        cwd=runs.ROOT,
        env=runs.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.returncode == -9, process.stderr


def results(workdir: Path) -> dict[str, Any]:
    found = folders(workdir)
    return {
        str(x.relative_to(workdir)): (rows(x), sorted(y.name for y in x.iterdir())) for x in found
    }


@pytest.fixture(scope="module")
def long(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of some hundred steps, which is computed beside the file, undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    base = replaced("steps", "400", replaced("log_every", "100"))
    base = replaced("eval_every", "100", replaced("save_every", "100", base))
    file = write_sweep(folder, base, more="checkpoints: final")
    assert sweep(file, folder / "undisturbed") == 0
    return file


@short.parametrize(("phase", "number"), [("finish", 5), ("move", 8), ("discard", 9)])
def test_a_worker_killed_at_the_end_of_a_wave_costs_nothing(tmp_path, capsys, long, phase, number):
    """The trials that it moved are not computed again, and no wave is left that blocks others."""
    workdir = tmp_path / "sweep"
    assert sweep(long, workdir, "--plan_only") == 0
    kill_in(phase, number, workdir)
    moved = {trial: (trial / "summary.json").stat().st_ino for trial in folders(workdir)}
    assert bool(moved) == (phase != "finish")
    code, said = (
        main(["sweep", "work", str(workdir), "--vocabulary=unruly"]),
        capsys.readouterr().err,
    )
    assert code == 0, said
    assert ("3 trials from" in said) == (phase == "finish")
    assert {trial: (trial / "summary.json").stat().st_ino for trial in moved} == moved
    assert not list((workdir / "waves").iterdir())
    assert results(workdir) == results(long.parent / "undisturbed")


@pytest.mark.long
def test_what_a_worker_killed_at_the_very_end_left_is_removed(tmp_path, capsys):
    file = write_sweep(tmp_path, final="null")
    workdir = tmp_path / "sweep"
    assert sweep(file, workdir, "--plan_only") == 0
    kill_in("discard", 9, workdir)
    assert list((workdir / "waves").glob(".removed-*"))
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert "Every trial" in capsys.readouterr().err
    assert not list((workdir / "waves").iterdir())


def test_a_wave_is_removed_while_no_other_worker_looks(tmp_path):
    file = write_sweep(tmp_path)
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 0
    folder = SweepFolder(tmp_path / "sweep")
    claim = folder.claim(1, lambda _: 8)
    assert claim is not None
    thread = threading.Thread(target=folder.remove, args=(claim,))
    with exclusive(folder.path):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and claim.file.exists()
    thread.join()
    assert not claim.file.exists()


@pytest.mark.long
def test_a_trial_that_diverges_after_a_stop_has_the_metrics_from_before_it(tmp_path):
    base = replaced("data", POISONED.replace("4", "7"), replaced("steps_per_call", "1"))
    file = write_sweep(tmp_path, base)
    found = []
    for after in (1000, 8):  # of which the second comes after step 7: rows are of 3, 5 and 6
        workdir = tmp_path / str(after)
        assert sweep(file, workdir, "--plan_only") == 0
        code = Worker(workdir, 1, runs.Signals(after), print).run()  # type: ignore[arg-type]
        assert code == (75 if after == 8 else 0)
        if code == 75:
            assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
        found.append([read_outcome(trial) for trial in folders(workdir)])
    texts = [[runs.computed(as_json(x)) for x in outcomes if x] for outcomes in found]
    assert texts[0] == texts[1] and len(texts[0]) == len(found[0])
    first = found[0][0]
    assert first is not None and (first.end, first.step) == ("diverged", 8)
    assert "train/loss" in first.metrics and "eval/loss" in first.metrics
    # The wave's folder, and its checkpoints, are gone.
    assert "waves" not in first.why


@pytest.mark.long
def test_a_checkpoint_of_a_wave_without_a_manifest_is_set_aside(tmp_path):
    file = write_sweep(tmp_path, replaced("steps_per_call", "1"))
    workdir, lines = tmp_path / "sweep", []
    assert sweep(file, workdir, "--plan_only") == 0
    for after, code in ((6, 75), (8, 75), (1000, 0)):
        worker = Worker(workdir, 1, runs.Signals(after), lines.append)  # type: ignore[arg-type]
        assert worker.run() == code
        for manifest in [*workdir.glob("waves/*/checkpoints/*/manifest.json")][:1]:
            manifest.unlink()
    assert sum("is damaged" in line for line in lines) == 2
    assert [outcome.end for x in folders(workdir) if (outcome := read_outcome(x))] == ["done"] * 5


def kills(trials: int, count: int, restored: int | None, newest: int | None) -> bool:
    """Returns what a wave says that was killed so many times while it computed."""
    entry = {"exit": "killed", "computing": True, "restored": restored}
    wave: Any = SimpleNamespace(
        claim=SimpleNamespace(trials=range(trials)),
        workdir=SimpleNamespace(lineage=[entry] * (count + 1)),
        newest_checkpoint=lambda: newest,
    )
    return bool(Wave.why_given_up(wave))


def test_a_wave_is_split_before_a_trial_fails_for_its_kills():
    assert [kills(2, count, None, None) for count in (2, 3)] == [False, True]
    assert [kills(1, count, None, None) for count in (5, 6)] == [False, True]
    assert not kills(1, 9, 10, 20)


def test_a_trial_fails_after_three_errors_and_names_the_last(tmp_path):
    def gives_up(*errors: str | None) -> str:
        ends = [{"exit": "crashed", "error": x} if x else {"exit": "killed"} for x in errors]
        wave: Any = SimpleNamespace(
            claim=SimpleNamespace(trials=[0]),
            workdir=SimpleNamespace(lineage=[*ends, {}]),
            newest_checkpoint=lambda: None,
        )
        return Wave.why_given_up(wave)

    assert [gives_up(*["A."] * count) for count in (2, 3)] == ["", "A."]
    assert gives_up("A.", None, "B.", None, "C.", None) == "C."
    assert gives_up("A.", "B.", *[None] * 7) == ""
    assert gives_up("A.", "B.", *[None] * 8) == "B."
    assert gives_up(*[None] * 10) == "It killed its worker again and again."


def test_the_progress_of_a_trial_alone_is_that_of_its_run(tmp_path):
    (tmp_path / "trials/base/0/0/checkpoints/30").mkdir(parents=True)
    wave: Any = SimpleNamespace(
        claim=SimpleNamespace(trials=[SimpleNamespace(folder="trials/base/0/0")], alone=True),
        workdir=SimpleNamespace(checkpoints=tmp_path / "checkpoints"),
        staged=lambda trial: tmp_path / trial.folder,
    )
    assert Wave.newest_checkpoint(wave) == 30


# Processes that are watched.


def watched(text: str, count: int, after: float = math.inf) -> tuple[int, list[str]]:
    """Runs workers that are lines of Python; returns the exit code and the log."""
    lines: list[str] = []
    command = [sys.executable, "-S", "-c", f"import os, signal, time\n{text}"]
    return local.run_workers(command, count, runs.Signals(after), lines.append), lines  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_dies_again_and_again_is_given_up(monkeypatch, count):
    monkeypatch.setattr(local.Restarts, "MOST", 3)
    code, lines = watched("os.kill(os.getpid(), signal.SIGSEGV)", count)
    assert code == 1
    again = [line for line in lines if "was killed (SIGSEGV) and is started again" in line]
    given_up = [line for line in lines if "was killed (SIGSEGV) 3 times, and is not" in line]
    assert (len(again), len(given_up)) == (2 * count, count)


@pytest.mark.long
def test_a_worker_that_dies_when_all_others_have_ended_is_started_again(tmp_path):
    text = f"""
try:
    os.mkdir({str(tmp_path / "died")!r})
except FileExistsError:
    raise SystemExit(0)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, lines = watched(text, 2)
    assert code == 0 and len(lines) == 1 and "was killed (SIGKILL) and is started" in lines[0]


def test_a_worker_that_is_stopped_before_it_handles_signals_was_stopped():
    assert watched("time.sleep(60)", 1, after=1) == (75, [])
