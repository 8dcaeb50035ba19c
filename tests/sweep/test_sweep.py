"""Sweeps that are computed: the bits of every trial, its folder, and what ends a trial."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import runs, short
from tests.runs import SWEPT, replaced
from tests.runs import lines as rows
from trainer import checkpoint
from trainer.__main__ import main
from trainer.sweep.folder import SweepFolder, WaveContent, wave_name
from trainer.sweep.plan_file import read_plan
from trainer.sweep.status import SweepReader
from trainer.sweep.wave_runner import WaveRunner
from trainer.workdir import fingerprint, read_record
from trainer.writers.summary import read_outcome

RATES = "optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}"
GROUPS = """!optim.optimizer
  groups:
    matrices: !optim.group
      match: .*kernel
      optimizer: !optim.{matrices}
        learning_rate: !schedules.warmup_cosine {{peak_value: 1e-2, warmup_steps: 3}}
    rest: !optim.group {{match: .*, optimizer: !optax.adamw {{learning_rate: 1e-2}}}}
"""
PEAK = (
    "optimizer.groups.matrices.optimizer.learning_rate.peak_value:"
    " !space.uniform {low: 1e-3, high: 1e-1}"
)
GOAL = "{metric: loss, select_on: test}"


pytestmark = pytest.mark.usefixtures("lab")


def write_sweep(
    folder: Path,
    base: str = SWEPT,
    space: str = RATES,
    more: str = "",
    trials: int = 3,
    method: str = "!method.random {seed: 1}",
    final: str = "{seeds: 2}",
) -> Path:
    """Writes a sweep and its base; `method` "" is that of the space."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(base)
    file = folder / "sweep.yaml"
    drawn = f"method: {method}\n" if method else ""
    file.write_text(
        f"base: base.yaml\nspace:\n  {space}\ntrials: {trials}\n"
        f"{drawn}goal: {GOAL}\nfinal: {final}\n{more}\n"
    )
    return file


def sweep(file: Path, workdir: Path, *more: str) -> int:
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", *more]
    return main(["sweep", *words]) if more else runs.sweep(*words)


def swept(folder: Path, *what: Any, **changes: Any) -> Path:
    """Computes the sweep that `write_sweep` writes; returns its folder."""
    assert sweep(write_sweep(folder, *what, **changes), folder / "sweep") == 0
    return folder / "sweep"


def solo(trial: Path, workdir: Path) -> Path:
    """Computes a trial alone, with the command that `sweep show` prints."""
    config = f"--config={trial / 'config.yaml'}"
    main([config, "--vocabulary=unruly", f"--workdir={workdir}"])
    return workdir


def folders(workdir: Path) -> list[Path]:
    return sorted([*workdir.glob("trials/*/*/*"), *workdir.glob("final/*/*")])


def assert_equal(trial: Path, alone: Path, steps: int) -> None:
    assert rows(trial) == rows(alone)
    assert checkpoint.diff_checkpoints(trial, steps, steps, other=alone) == []


# Slow steps.


@pytest.mark.long
def test_a_sweep_says_once_that_a_step_is_slow(tmp_path, capfd):
    base = replaced("data", "!unruly.sleepy {at: 10, seconds: 1.5}")
    base = replaced("loss", "!unruly.slow_loss {seconds: 0.01}", base)
    for name, value in (("steps", "14"), ("steps_per_call", "1"), ("log_every", "1")):
        base = replaced(name, value, base)
    base = replaced("watchdog", "4.0", base)
    swept(tmp_path, base, more="seeds: 2", trials=1)
    said = capfd.readouterr().err
    # Batch 10 was slow four times: for each of the two data seeds of two waves.
    assert said.count("Slow:") == 1 and "hread 0x" not in said, said
    found = re.search(r"Slow: step \d+ has taken .* s so far; the median step takes (.*) s", said)
    assert found and float(found[1]) > 0.005, said


# Bits.

DIGITS = "!data.digits {batch_size: 64}"
CONVNET = replaced("data", DIGITS, replaced("model", "!models.convnet {widths: [4, 8]}"))
VIT = "!models.vit {width: 8, depth: 2, num_heads: 2, patch_size: 2, num_classes: 3, dropout: 0.2}"
WHOLE, WIDE = "!data.digits {batch_size: null}", "!models.mlp {width: 8, depth: 1}"
SEARCH = "!optax.lbfgs {learning_rate: 0.5, memory_size: 3}"
FREE = "!optax.contrib.schedule_free_adamw {learning_rate: 1e-2}"
WRAPPED = """!optim.optimizer
  lookahead: !optim.ema_nesterov
    {step_size: 0.5, decay: 0.7, start: 2, stop: 80%, scheduled_by: all}
  readout: !optim.weight_ema {horizon: 25%, start: 50%, blend: 0.6, exclude: .*bias}
  groups:
    all: !optim.group
      match: .*
      optimizer: !optax.adamw
        learning_rate: !schedules.warmup_cosine {peak_value: 0.01, warmup_steps: 2}
"""
POISONED = "!unruly.poisoned {at: [4]}"
CASES = {
    "adamw": (SWEPT, RATES),
    "single steps": (replaced("steps_per_call", "1"), RATES),
    "muon": (replaced("optimizer", GROUPS.format(matrices="muon")), PEAK),
    "soap": (replaced("optimizer", GROUPS.format(matrices="soap")), PEAK),
    "schedule-free": (replaced("optimizer", FREE), RATES),
    "line search": (
        replaced("optimizer", SEARCH, replaced("data", WHOLE, replaced("model", WIDE))),
        RATES.replace("low: 1e-3", "low: 1e-2"),
    ),
    "lookahead": (
        replaced("optimizer", WRAPPED),
        "optimizer.lookahead.step_size: !space.uniform {low: 0.1, high: 0.9}\n"
        "  optimizer.readout.blend: !space.uniform {low: 0.1, high: 1.0}",
    ),
    "convolutions": (CONVNET, RATES),
    "dropout": (replaced("model", VIT), RATES),
    "ema": (replaced("ema_decay", "0.9"), "ema_decay: !space.uniform {low: 0.5, high: 0.99}"),
    "skip": (replaced("on_nonfinite", "skip", replaced("data", POISONED)), RATES),
    "bfloat16": (replaced("precision", "bfloat16"), RATES),
}


@short.parametrize("name", CASES)
def test_each_trial_has_the_bits_of_its_run_alone(tmp_path, capsys, name):
    base, space = CASES[name]
    file = write_sweep(tmp_path, base, space, "checkpoints: final\nseeds: 2")
    assert sweep(file, tmp_path / "sweep") == 0, capsys.readouterr().err
    found = folders(tmp_path / "sweep")
    assert len(found) == 3 * 2 + 2
    assert len({(trial / "config.yaml").read_text() for trial in found}) == 8
    # The first and the last of the search, and one on a fresh seed.
    for index in (2, 5, 0):
        assert_equal(found[index], solo(found[index], tmp_path / str(index)), 12)
    assert all((trial / "nonfinite.json").exists() == (name == "skip") for trial in found)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "vmap: 4"])
def test_trials_have_the_diagnostics_of_their_runs_alone(tmp_path, capsys, monkeypatch, more):
    from trainer.engine.program import Program

    traced, trace = [], Program._trace_diagnose
    monkeypatch.setattr(
        Program, "_trace_diagnose", lambda *given: traced.append(1) or trace(*given)
    )
    more = f"checkpoints: final\n{more}"
    file = write_sweep(tmp_path, replaced("diagnostics", "all"), more=more)
    assert sweep(file, tmp_path / "sweep") == 0, capsys.readouterr().err
    found = folders(tmp_path / "sweep")
    assert len(found) == 3 + 2 and len(traced) == 1
    alone = solo(found[1], tmp_path / "alone")
    if "vmap" not in more:
        assert_equal(found[1], alone, 12)
    for ours, theirs in zip(rows(found[1]), rows(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4)
        assert ("rotation/all" in ours) == (ours["step"] in (3, 6, 9, 12))


@pytest.mark.long
def test_one_program_serves_a_hundred_trials(tmp_path, monkeypatch):
    """Every float of the optimizer and every seed is an input of the program."""
    from trainer.engine.program import Program

    compiled = []
    monkeypatch.setattr(
        Program,
        "compile",
        lambda self, state, inner=Program.compile: compiled.append(self) or inner(self, state),
    )
    base = replaced("steps", "3")
    space = RATES + "\n  optimizer.b2: !space.uniform {low: 0.9, high: 0.999}"
    assert len(folders(swept(tmp_path, base, space, "seeds: 4", trials=25))) == 102
    assert len(compiled) == 1


@pytest.mark.long
def test_arms_of_one_program_share_it_and_keep_their_own_values(tmp_path):
    more = """
arms:
  slow:
    set: {optimizer.weight_decay: 0.5}
    space: {optimizer.b1: !space.values {values: [0.8, 0.9]}}
  fast:
    space: {optimizer.b1: !space.values {values: [0.7, 0.95]}}
checkpoints: final
"""
    file = write_sweep(tmp_path)
    text = file.read_text().replace(f"space:\n  {RATES}\ntrials: 3\n", "")
    file.write_text(text.replace("method: !method.random {seed: 1}", more))
    assert sweep(file, tmp_path / "sweep") == 0
    assert len(read_plan(tmp_path / "sweep").programs) == 1
    found = folders(tmp_path / "sweep")
    assert len(found) == 4 + 4
    for index in (0, 4, 7):
        assert_equal(found[index], solo(found[index], tmp_path / str(index)), 12)


# What a trial's folder has.


@pytest.mark.long
def test_a_trial_has_the_folder_of_a_run(tmp_path):
    swept(tmp_path, replaced("writers", "[tensorboard, console]"))
    trial, *_ = (tmp_path / "sweep").glob("trials/base/0001/0")
    names = {path.name for path in trial.iterdir()}
    assert {n for n in names if not n.startswith("events.out")} == {
        "config.yaml",
        "config_full.yaml",
        "metrics.jsonl",
        "run.json",
        "summary.json",
    }
    assert any(name.startswith("events.out") for name in names)
    record = read_record(trial / "run.json")
    assert record is not None and record["lineage"][-1]["exit"] == "done"
    assert record["lineage"][-1]["trials"] == 3
    assert record["lineage"][-1]["began"] <= record["lineage"][-1]["ended"]
    alone = solo(trial, tmp_path / "alone")
    theirs = read_record(alone / "run.json")
    assert theirs is not None and theirs["fingerprint"] == record["fingerprint"]
    outcome = read_outcome(trial)
    assert outcome is not None and (outcome.end, outcome.step) == ("done", 12)
    last = rows(trial)[-1]
    assert {name: last[name] for name in outcome.metrics} == outcome.metrics
    assert not list((tmp_path / "sweep" / "waves").glob("*.json"))


@pytest.mark.long
def test_best_and_final_checkpoints_of_a_trial_are_kept_if_asked(tmp_path):
    base = replaced("eval_every", "2", replaced("save_every", "2"))
    for trial in folders(swept(tmp_path, base, more="checkpoints: best", final="null")):
        losses = {row["step"]: row["eval/loss"] for row in rows(trial) if "eval/loss" in row}
        best = min(losses, key=lambda step: losses[step])
        assert [info.step for info in checkpoint.ls(trial)] == sorted({best, 12})


def test_the_winners_run_again_on_fresh_seeds(tmp_path):
    space = "optimizer.learning_rate: !space.values {values: [3e-2, 1e-3, 2e-2]}"
    swept(tmp_path, space=space, method="")
    trials = (tmp_path / "sweep").glob("trials/*/*/*")
    losses = {int(trial.parent.name): rows(trial)[-1]["eval/loss"] for trial in trials}
    best = min(losses, key=lambda number: losses[number])
    content = json.loads((tmp_path / "sweep" / "final.json").read_text())
    assert content[0]["winners"] == {"base": [{"number": best, "value": losses[best]}]}
    final = sorted((tmp_path / "sweep").glob("final/base/*"))
    assert [path.name for path in final] == ["10000", "10001"]
    rate = f"learning_rate: {[3e-2, 1e-3, 2e-2][best]}"
    assert all(rate in (path / "config.yaml").read_text() for path in final)


# What ends a trial.


def test_a_trial_that_diverges_is_a_result_and_ranks_last(tmp_path, capsys):
    space = "optimizer.learning_rate: !space.values {values: [1e30, 1e-2, 3e30]}"
    swept(tmp_path, space=space, method="")
    said = capsys.readouterr().err
    outcomes = [read_outcome(trial) for trial in folders(tmp_path / "sweep")]
    ends = [outcome.end for outcome in outcomes if outcome]
    assert ends == ["done"] * 2 + ["diverged", "done", "diverged"]
    assert "trials/base/0000/0 diverged. At step" in said
    content = json.loads((tmp_path / "sweep" / "final.json").read_text())
    assert content[0]["winners"]["base"][0]["number"] == 1
    diverged = next((tmp_path / "sweep").glob("trials/base/0000/0"))
    alone = solo(diverged, tmp_path / "alone")
    assert rows(diverged) == rows(alone)
    ours, theirs = ((each / "nonfinite.json").read_text() for each in (diverged, alone))
    assert ours == theirs


@pytest.mark.long
def test_a_sweep_with_an_arm_without_a_winner_is_not_done(tmp_path):
    space = "optimizer.learning_rate: !space.values {values: [1e30, 2e30, 3e30]}"
    file = write_sweep(tmp_path, space=space, method="")
    process = start(file, tmp_path / "sweep")
    assert "base has no winner: every trial diverged or failed." in process.communicate()[0]
    assert process.returncode == 1
    assert all(o and o.end == "diverged" for o in map(read_outcome, folders(tmp_path / "sweep")))


@pytest.mark.long
def test_a_trial_that_goes_back_is_computed_alone(tmp_path, capsys):
    base = replaced("on_nonfinite", "rollback", replaced("data", POISONED))
    swept(tmp_path, base, more="checkpoints: final", trials=2)
    assert "It is computed alone." in capsys.readouterr().err
    trial = next((tmp_path / "sweep").glob("trials/base/0001/0"))
    assert_equal(trial, solo(trial, tmp_path / "alone"), 12)
    assert json.loads((trial / "rollbacks.json").read_text())


def test_an_error_in_a_users_code_fails_its_trial_only(tmp_path, capsys):
    base = replaced("data", "!unruly.raising {seed: 1}")
    swept(tmp_path, base, more="seeds: 2", trials=2, final="null")
    said = capsys.readouterr().err
    ends = {str(t.relative_to(tmp_path)): read_outcome(t) for t in folders(tmp_path / "sweep")}
    assert {name[-6:]: outcome.end for name, outcome in ends.items() if outcome} == {
        "0000/0": "done",
        "0000/1": "failed",
        "0001/0": "done",
        "0001/1": "failed",
    }
    assert said.count("is computed again after an error") == 4
    line = 1 + LAB_SOURCE[: LAB_SOURCE.index('RuntimeError("this batch')].count("\n")
    where = f"{(runs.LAB / 'unruly/__init__.py').relative_to(Path.cwd())}:{line}"
    for number in ("0000", "0001"):  # they share the batches
        failed = ends[f"sweep/trials/base/{number}/1"]
        assert failed is not None
        assert failed.why == f"RuntimeError: this batch cannot be read ({where})"


@pytest.mark.long
def test_a_trial_whose_program_raises_fails_after_three_errors_with_the_error(tmp_path, capsys):
    """A callback of the program does: the error may belong to any trial of its wave."""
    base = replaced("data", "!unruly.marked {seed: 1}")
    base = replaced("loss", "!unruly.loss_refusing_marks", base)
    workdir = swept(tmp_path, base, more="seeds: 2", trials=1, final="null")
    said = capsys.readouterr().err
    assert said.count("2 trials from") == 3 and said.count("1 trial from") == 1 + 3
    good, bad = [read_outcome(trial) for trial in folders(workdir)]
    assert good is not None and good.end == "done"
    line = 1 + LAB_SOURCE[: LAB_SOURCE.index('ValueError("a pixel')].count("\n")
    why = f"ValueError: a pixel is marked (tests/lab/unruly/__init__.py:{line})"
    assert bad is not None and (bad.end, bad.why) == ("failed", why)
    for words in (["sweep", "status"], ["report", "--formats=markdown"]):
        assert main([*words, str(workdir)]) == 0
    assert f"base/0000/1 failed: {why}.\n" in capsys.readouterr().out
    page = (workdir / "report" / "report.md").read_text().replace("\n> ", " ")
    assert "base/0000/1: ValueError: a pixel is marked (tests/lab/unruly/" in page


@pytest.mark.long
def test_runs_of_winners_that_failed_are_no_result_until_they_are_computed_again(
    tmp_path, capsys, monkeypatch
):
    """Such as by a machine that had no memory left, which says nothing about an arm."""
    base = replaced("data", "!unruly.raising {seed: 10001}")
    file = write_sweep(tmp_path, base, trials=2)
    workdir = tmp_path / "sweep"
    assert sweep(file, workdir) == 0
    failed = workdir / "final" / "base" / "10001"
    outcome = read_outcome(failed)
    assert outcome is not None and outcome.end == "failed"
    said = runs.printed(capsys, "report", "--formats=markdown", str(workdir))
    assert "final/base/10001 (RuntimeError: this batch cannot be read" in said
    assert f"`python -m trainer sweep work {workdir} --failed` computes them again" in said
    work = ["sweep", "work", str(workdir), "--vocabulary=unruly"]
    assert main(work) == 0 and read_outcome(failed) == outcome  # only if the user says so
    kept = {name: rows(workdir / name) for name in ("final/base/10000", "trials/base/0000/0")}
    monkeypatch.setattr("unruly.Raising.end", lambda self: None)  # the machine was mended
    capsys.readouterr()
    assert main([*work, "--failed"]) == 0
    assert "Computing again: final/base/10001." in capsys.readouterr().err
    outcome = read_outcome(failed)
    assert outcome is not None and outcome.end == "done" and rows(failed)[-1]["step"] == 12
    assert kept == {name: rows(workdir / name) for name in kept}
    assert (
        list(workdir.glob("waves/*/*")) == []
        and not json.loads((workdir / "waves" / "limits.json").read_text())["faults"]
    )
    assert main([*work, "--failed"]) == 0
    assert "No run has failed." in capsys.readouterr().err
    assert main(["sweep", "check", str(workdir)]) == 0
    words = "Runs that had failed were computed again: final/base/10001."
    assert words in capsys.readouterr().out
    assert words in runs.printed(capsys, "report", "--formats=markdown", str(workdir))


@pytest.mark.long
def test_winners_are_chosen_again_after_trials_that_failed(tmp_path, capsys, monkeypatch):
    """The trial that failed is as good as the other one, and comes first."""
    base = replaced("data", "!unruly.raising {seed: 0}")
    space = "data.seed: !space.values {values: [0, 99]}"
    file = write_sweep(tmp_path, base, space, trials=2, method="")
    workdir, run = tmp_path / "sweep", tmp_path / "sweep/final/base/10000"
    work = ["sweep", "work", str(workdir), "--vocabulary=unruly"]
    assert sweep(file, workdir) == 0 and "seed: 99" in (run / "config.yaml").read_text()
    other = rows(workdir / "trials/base/0001/0")
    said = runs.printed(capsys, "report", "--formats=markdown", str(workdir))
    assert "trials/base/0000/0 (RuntimeError: this batch cannot be read" in said
    assert "base is not judged" in said and f"sweep work {workdir} --failed` computes" in said
    monkeypatch.setattr("unruly.Raising.end", lambda self: None)
    assert main([*work, "--failed"]) == 0
    names = "trials/base/0000/0, final/base/10000, final/base/10001"
    assert f"Computing again: {names}." in capsys.readouterr().err
    assert "seed: 0" in (run / "config.yaml").read_text()
    assert rows(workdir / "trials/base/0000/0") == other
    assert "Runs that had failed were computed again: trials/base/0000/0." in (
        runs.printed(capsys, "sweep", "check", str(workdir))
    )


@pytest.mark.long
def test_a_result_that_was_removed_and_computed_again_is_named(tmp_path, capsys):
    """Or else somebody removes a run until its result is a better one."""
    file = write_sweep(tmp_path, trials=1)
    workdir = tmp_path / "sweep"
    assert sweep(file, workdir) == 0
    words = "Results that were known had been removed, and were computed again: final/base/10000."
    for again in (False, True):
        assert (words in runs.printed(capsys, "sweep", "check", str(workdir))) == again
        assert main(["report", "--formats=markdown", str(workdir)]) == 0
        assert (words in capsys.readouterr().out) == again
        shutil.rmtree(workdir / "final" / "base" / "10000")
        assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0


# Kills and stops.


def start(file: Path, workdir: Path, *more: str) -> "subprocess.Popen[str]":
    words = ["sweep", f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", *more]
    return runs.process(*words, stderr=subprocess.PIPE)


def wait_for_progress(workdir: Path, process: Any, step: int) -> None:
    """Waits until a wave has rows of a step."""
    while process.poll() is None:
        records = [json.loads(file.read_text()) for file in workdir.glob("waves/*/run.json")]
        last = [record["lineage"][-1] for record in records]
        if not any(entry.get("computing") and not entry["exit"] for entry in last):
            time.sleep(0.01)
            continue
        for file in workdir.glob("waves/*/trials/*/*/*/metrics.jsonl"):
            lines = file.read_text().splitlines()
            if lines and json.loads(lines[-1])["step"] >= step:
                return
        time.sleep(0.01)


LAB_SOURCE = (runs.LAB / "unruly/__init__.py").read_text()
SLOW = replaced("steps", "60", replaced("data", "!unruly.sleepy {seconds: 0.01, every: true}"))


def worker_of(workdir: Path) -> int:
    """Returns the process that computes the wave."""
    return json.loads(next(workdir.glob("waves/*/lock")).read_text())["pid"]


@short.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_saves_nothing(tmp_path, number):
    """It was told that it stops after a checkpoint, and went on to compile all programs."""
    process = start(write_sweep(tmp_path), tmp_path / "sweep", "--dry_run")
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(number)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == -number, first + rest
    assert first.startswith("Compiling and timing program 1 of") and "checkpoint" not in rest


@pytest.mark.long
def test_kills_and_stops_do_not_change_a_trial(tmp_path):
    """Those of the command, and of the worker that it starts, which ends with the command."""
    file = write_sweep(tmp_path, SLOW, more="checkpoints: final")
    workdir = tmp_path / "sweep"
    codes, texts, process = [], [], start(file, workdir)
    wait_for_progress(workdir, process, 6)
    os.kill(worker_of(workdir), signal.SIGKILL)
    for number, step in ((signal.SIGINT, 30), (signal.SIGTERM, 33), (signal.SIGKILL, 36)):
        wait_for_progress(workdir, process, step)
        process.send_signal(number)
        texts.append(process.communicate()[1])
        codes.append(process.returncode)
        if codes[-1] == 75:  # `sweep status` has shown an earlier step
            (said,) = re.findall(r"Stopped at step (\d+)", texts[-1])
            assert [x.step for x in SweepReader(workdir).read().waves] == [int(said)]
        process = start(file, workdir)
    assert codes == [75, 75, -9], texts
    assert "The worker was killed (SIGKILL) and is started again." in texts[0]
    assert all("Start the same command again to go on" in text for text in texts[:2])
    _, said = process.communicate()
    assert process.returncode == 0, said
    for trial in folders(workdir):
        assert_equal(trial, solo(trial, tmp_path / trial.name / trial.parent.name), 60)
    record = read_record(workdir / "trials/base/0001/0/run.json")
    assert record is not None
    assert [entry["exit"] for entry in record["lineage"]] == [
        "killed",
        "stopped",
        "stopped",
        "stopped",
        "done",
    ]


def test_two_workers_share_the_trials(tmp_path):
    file = write_sweep(tmp_path, SLOW, trials=4)
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 0
    process = start(file, tmp_path / "sweep", "--workers=2")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert len(folders(tmp_path / "sweep")) == 4 + 2
    hosts = {
        record["lineage"][-1]["pid"]
        for trial in (tmp_path / "sweep").glob("trials/*/*/*")
        if (record := read_record(trial / "run.json"))
    }
    assert len(hosts) == 2
    trial = tmp_path / "sweep/trials/base/0002/0"
    assert rows(trial) == rows(solo(trial, tmp_path / "alone"))


@pytest.mark.long
def test_a_worker_that_is_killed_is_started_again(tmp_path):
    file = write_sweep(tmp_path, SLOW, trials=4)
    workdir = tmp_path / "sweep"
    process = start(file, workdir, "--workers=2")
    wait_for_progress(workdir, process, 3)
    os.kill(worker_of(workdir), signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert re.search(r"worker [12] was killed \(SIGKILL\) and is started again", said)
    assert len(folders(workdir)) == 4 + 2


@pytest.mark.long
def test_a_wave_that_kills_its_worker_is_split_until_the_trial_that_does_it_fails(tmp_path):
    base = replaced("data", "!unruly.deadly {seed: 1}", replaced("steps_per_call", "1"))
    file = write_sweep(tmp_path, base, more="seeds: 2", trials=1)
    workdir = tmp_path / "sweep"
    process = start(file, workdir)
    _, said = process.communicate()
    assert process.returncode == 1, said  # its arm has no winner
    assert said.count("The worker was killed (SIGSEGV) and is started again.") == 3 + 6
    ends = [read_outcome(trial) for trial in sorted(workdir.glob("trials/*/*/*"))]
    assert [outcome.end for outcome in ends if outcome] == ["done", "failed"]
    assert ends[1] is not None and "killed its worker" in ends[1].why


# The folder.


def test_a_finished_sweep_computes_nothing(tmp_path, capsys):
    file = write_sweep(tmp_path)
    assert sweep(file, tmp_path / "sweep") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*/*.json*")}
    assert sweep(file, tmp_path / "sweep") == 0
    assert main(["sweep", "work", str(tmp_path / "sweep"), "--vocabulary=unruly"]) == 0
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*/*.json*")}
    assert before == after


@pytest.mark.long
def test_a_wave_and_a_worker_ask_for_the_machine_and_the_code_once(tmp_path, monkeypatch):
    """It takes several processes of git."""
    calls = []
    monkeypatch.setattr(fingerprint, "_versions", lambda: calls.append(None) or {"python": "3"})
    swept(tmp_path)
    assert len(calls) == 3  # a wave of the search, one of the final runs, and the worker
    for trial in folders(tmp_path / "sweep"):
        assert json.loads((trial / "run.json").read_text())["fingerprint"]["python"] == "3"


def test_a_wave_has_the_useful_width(tmp_path):
    file = write_sweep(tmp_path, trials=100)
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 0
    folder = SweepFolder(tmp_path / "sweep")

    def widths(workers: int, fits: int) -> list[int]:
        found = []
        claims = []
        while (claim := folder.claim(workers, lambda _: fits)) is not None:
            found.append(len(claim.trials))
            claims.append(claim)
        for claim in claims:
            folder.remove(claim)
        return found

    assert widths(1, 1000) == [50, 50]  # at most 64
    assert widths(4, 1000) == [25, 25, 25, 25]
    assert widths(1, 30) == [25, 25, 25, 25]
    assert sum(widths(3, 7)) == 100


# vmap, if the file asks for it.


@pytest.mark.long
def test_trials_by_vmap_have_bits_of_their_width_and_nearly_those_alone(tmp_path, capsys):
    base = replaced("steps", "40", replaced("data", "!data.digits {batch_size: 64}"))
    base = replaced("model", "!models.mlp {width: 8, depth: 1}", base)
    file = write_sweep(tmp_path, base, more="vmap: 4\nseeds: 2", trials=3)
    assert sweep(file, tmp_path / "sweep") == 0
    said = capsys.readouterr().err
    assert "vmap of 4 trials: in the first steps the loss differs" in said
    found = folders(tmp_path / "sweep")
    assert len(found) == 6 + 2
    # Other workers, other neighbours, and a wave that is not full: the same bits.
    assert sweep(file, tmp_path / "other", "--plan_only") == 0
    folder = SweepFolder(tmp_path / "other")
    alone = folder.claim(1, lambda _: 1)
    assert alone is not None and len(alone.trials) == 3  # 6 in waves of at most 4
    folder.remove(alone)
    content = WaveContent(alone=False, program=0, trials=[alone.trials[1].folder])
    (alone.file.parent / f"{wave_name(content)}.json").write_text(json.dumps(content))
    assert sweep(file, tmp_path / "other") == 0
    for trial in found:
        assert rows(trial) == rows(tmp_path / "other" / trial.relative_to(tmp_path / "sweep"))
    trial = found[-1]
    record = read_record(trial / "run.json")
    assert record is not None
    vmap = record["lineage"][-1]["vmap"]
    assert vmap["width"] == 4 and 0 <= vmap["difference"] < 1e-5
    pairs = zip(rows(trial), rows(solo(trial, tmp_path / "alone")), strict=True)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.long
def test_kernels_that_may_wait_for_each_other_are_refused_under_vmap(tmp_path, capsys):
    galore = replaced("optimizer", "!optax.contrib.galore {learning_rate: 1e-2, rank: 2}")
    file = write_sweep(tmp_path, galore, more="vmap: 4")
    assert sweep(file, tmp_path / "sweep") == 2
    said = capsys.readouterr().err
    assert "LAPACK's sgesdd" in said and "remove vmap" in said and "sweep.yaml:" in said
    assert len(said.splitlines()) <= 4 and not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_muon_soap_and_shampoo_are_planned_under_vmap(tmp_path):
    for name in ("muon", "soap", "shampoo"):
        base = replaced("optimizer", GROUPS.format(matrices=name))
        file = write_sweep(tmp_path / name, base, PEAK, "vmap: 4")
        assert sweep(file, tmp_path / name / "sweep", "--plan_only") == 0


@pytest.mark.long
def test_a_trial_that_diverges_leaves_the_others_of_its_vmap(tmp_path):
    space = "optimizer.learning_rate: !space.values {values: [1e30, 1e-2, 3e-2]}"
    swept(tmp_path, space=space, more="vmap: 4", method="")
    outcomes = [read_outcome(trial) for trial in folders(tmp_path / "sweep")]
    assert [o.end for o in outcomes if o] == ["done"] * 2 + ["diverged", "done", "done"]


# Machines that cannot compute it so.


@pytest.mark.long
def test_a_wave_that_does_not_fit_into_memory_is_halved(tmp_path, monkeypatch, capsys):
    inner = WaveRunner._compute_blocks

    def compute(self: WaveRunner) -> None:
        if len(self._trial_loops) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")
        inner(self)

    monkeypatch.setattr(WaveRunner, "_compute_blocks", compute)
    swept(tmp_path, trials=5)
    said = capsys.readouterr().err
    assert (
        "of 5 trials is split. It does not fit into memory: JaxRuntimeError: RESOURCE_EXHAUSTED"
        in said
    )
    found = folders(tmp_path / "sweep")
    assert len(found) == 5 + 2
    records = [read_record(trial / "run.json") for trial in found]
    assert {record["lineage"][-1]["trials"] for record in records if record} == {1, 2}
    assert rows(found[-1]) == rows(solo(found[-1], tmp_path / "alone"))


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, capsys):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("trainer.writers.locks.fcntl.flock", flock)
    assert sweep(write_sweep(tmp_path), tmp_path / "sweep") == 2
    assert "has no locks, which keep two workers from the same trials" in capsys.readouterr().err
