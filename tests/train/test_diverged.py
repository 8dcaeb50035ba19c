"""Runs that end as diverged although no step halted them: dead ones are never done."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs, short
from tests.runs import replaced
from tests.sweep.test_sweep import folders, rows, solo, sweep, write_sweep
from trainer import checkpoint
from trainer.engine import program
from trainer.engine.block import BlockRule
from trainer.writers.summary import read_summary

pytestmark = pytest.mark.usefixtures("lab")

EVERY = "experiment.log_every = 20\nexperiment.eval_every = 20\nexperiment.save_every = 20\n"


def skipping(folder: Path, at: Any, more: str = EVERY) -> Path:
    """Writes the config of a run that skips the batches with these numbers, counted from 0."""
    return runs.write_config(
        folder,
        f"experiment.data = @unruly.poisoned()\nunruly.poisoned.at = {tuple(at)}\n"
        f"experiment.on_nonfinite = 'skip'\n{more}",
    )


def ended(folder: Path) -> tuple[str, int | None, int]:
    summary = read_summary(folder)
    assert summary is not None
    return summary.end, summary.exit, summary.step


def events(folder: Path) -> list[int]:
    return [event["step"] for event in json.loads((folder / "nonfinite.json").read_text())]


# Steps that are skipped.


@pytest.mark.long
def test_ten_skipped_steps_in_a_row_end_a_run_as_diverged(tmp_path, monkeypatch, capfd):
    """Batch 6 is that of step 7, so that step 16 is the tenth in a row."""
    config = skipping(tmp_path, range(6, 50))
    found = []
    for name, stops in (("1", []), ("20", []), ("resumed", [9, 15]), ("dispatch", [])):
        if name == "dispatch":  # a block whose steps after the end are computed, for nothing
            monkeypatch.setattr(program, "choose_block", lambda *_: BlockRule(20, "dispatch", ""))
        workdir = tmp_path / name
        steps = {"resumed": "3", "dispatch": "20"}.get(name, name)
        for stop in stops:
            assert runs.train(config, workdir, "--set=steps_per_call=3", f"--until={stop}") == 75
        for _ in range(2 if stops else 1):  # started again, it ends so again
            assert runs.train(config, workdir, f"--set=steps_per_call={steps}") == 1
            said = capfd.readouterr().err
            assert "At step 16 train/loss is nan" in said and "Done" not in said
            assert "10 steps in a row had to be skipped (max_consecutive_skips)" in said
            assert "on_nonfinite=" not in said and "'image' of its batch holds" in said
            assert ended(workdir) == ("diverged", 1, 16)
            assert events(workdir) == list(range(7, 17))
        found.append(runs.lines(workdir))
    assert [row["step"] for row in found[0]] == [16]
    assert all(each == found[0] for each in found)


@pytest.mark.long
def test_nine_skipped_steps_in_a_row_do_not_end_a_run(tmp_path):
    at = [*range(9), *range(10, 19)]
    assert runs.train(skipping(tmp_path, at), tmp_path / "run") == 0
    assert ended(tmp_path / "run") == ("done", 0, 20)
    assert runs.lines(tmp_path / "run")[-1]["skipped"] == 18
    # With a bound of nine, it ends at the first nine.
    options = "--set=max_consecutive_skips=9"
    assert runs.train(tmp_path / "run.gin", tmp_path / "nine", options) == 1
    assert ended(tmp_path / "nine") == ("diverged", 1, 9)


@short.parametrize("most", ["0", "null"])
def test_any_number_of_steps_is_skipped_without_a_bound(tmp_path, most):
    config = skipping(tmp_path, range(3, 50))
    assert runs.train(config, tmp_path / "run", f"--set=max_consecutive_skips={most}") == 0
    assert ended(tmp_path / "run") == ("done", 0, 20)


def test_a_bound_below_zero_is_refused(tmp_path, capsys):
    options = "--set=max_consecutive_skips=-1"
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run", options) == 2
    assert "max_consecutive_skips must be at least 1, or 0 or None" in capsys.readouterr().err


@pytest.mark.long
def test_a_continuation_counts_the_skipped_steps_of_the_other_run(tmp_path):
    """It begins with the two skipped steps 7 and 8, and step 16 is the tenth."""
    config = skipping(tmp_path, range(6, 50))
    assert runs.train(config, tmp_path / "run", "--until=8") == 75
    start = f"experiment.warm_start = {{'from': '{tmp_path / 'run'}', 'step': 8, 'continue': True"
    (other := tmp_path / "other").mkdir()
    for more, end in (("", ("diverged", 1, 16)), ("'optimizer': 'reset'", ("diverged", 1, 16))):
        file = skipping(other, range(6, 50), f"{start}, {more}}}\n{EVERY}")
        assert runs.train(file, other / (more or "run")) == 1
        assert ended(other / (more or "run")) == end
    # Runs with another policy continue one that skips, and the other way round.
    halting = config.read_text().replace("'skip'", "'halt'") + f"{start}}}\n"
    file = runs.write_config(other, halting)
    assert runs.train(file, other / "halting", "--set=data.at=[]") == 0
    halting = f"experiment.keep_latest = 9\n{EVERY}"
    assert runs.train(runs.write_config(other, halting), other / "finite", "--until=8") == 75
    start = start.replace(str(tmp_path / "run"), str(other / "finite"))
    file = skipping(other, range(9, 50), f"{start}}}\n{EVERY}")
    assert runs.train(file, other / "skipping") == 1
    assert ended(other / "skipping") == ("diverged", 1, 19)


@pytest.mark.long
@short.parametrize("more", ["", "vmap: 3"])
def test_a_trial_ends_at_the_step_at_which_it_ends_alone(tmp_path, capsys, more):
    """SGD at 1e30 leaves finite parameters whose next loss is not finite, and so are all later."""
    base = replaced("optimizer", "!optax.sgd {learning_rate: 0.1}", replaced("steps", "20"))
    base = replaced("on_nonfinite", "skip", base)
    space = "optimizer.learning_rate: !space.values {values: [1e30, 1e-2, 3e30]}"
    file = write_sweep(tmp_path, base, space, f"checkpoints: final\n{more}")
    file.write_text(file.read_text().replace("method: !method.random {seed: 1}\n", ""))
    assert sweep(file, tmp_path / "sweep") == 0
    trials = [each for each in folders(tmp_path / "sweep") if each.parts[-4] == "trials"]
    assert [read_summary(trial).end for trial in trials] == ["diverged", "done", "diverged"]
    said = capsys.readouterr().err
    assert "trials/base/0000/0 diverged. At step 1" in said and "computed again" not in said
    for index, trial in enumerate(trials):
        alone = solo(trial, tmp_path / str(index))
        assert ended(trial) == ended(alone)
        if not more:
            assert rows(trial) == rows(alone)
            for name in ["nonfinite.json"] * (index != 1):
                assert (trial / name).read_text() == (alone / name).read_text()


# The end of a run.


def test_a_run_whose_last_evaluation_is_not_finite_is_not_done(tmp_path, capfd):
    config, workdir = runs.write_config(tmp_path, "experiment.data = @unruly.spoiled()\n"), "run"
    for _ in range(2):
        assert runs.train(config, tmp_path / workdir) == 1
        said = capfd.readouterr().err
        assert "error: In the last evaluation, eval/loss is nan." in said and "Done" not in said
        assert ended(tmp_path / workdir) == ("diverged", 1, 20)
        assert read_summary(tmp_path / workdir).why == "In the last evaluation, eval/loss is nan."
    # Its parameters are finite, and kept.
    assert max(info.step for info in checkpoint.ls(tmp_path / workdir)) == 20
    # A changed config would change none of its results, as for a run that is done.
    changed = ["--set=ema_decay=0.5", "--allow_changed=ema_decay"]
    assert runs.train(config, tmp_path / workdir, *changed) == 2
    assert "has made all of its 20 steps" in capfd.readouterr().err


@pytest.mark.long
def test_a_metric_may_be_nan(tmp_path):
    more = "experiment.metrics = {'undefined': @unruly.Undefined}\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    assert runs.train(config, workdir) == 0
    assert np.isnan(read_summary(workdir).metrics["eval/undefined"])
    assert ended(workdir) == ("done", 0, 20)


@pytest.mark.long
def test_a_run_whose_last_parameters_are_not_finite_is_not_done(tmp_path, capfd):
    """The loss does not depend on the parameter that is infinite from the first step on."""
    more = "experiment.model = @unruly.idle()\nunruly.idle.root = 1e30\n"
    more += "experiment.on_nonfinite = 'skip'\nexperiment.max_consecutive_skips = None\n"
    config = runs.write_config(tmp_path, more + "experiment.ema_decay = None\n")
    for _ in range(2):
        assert runs.train(config, tmp_path / "run") == 1
        assert "error: The parameters after the last step are not" in capfd.readouterr().err
        assert ended(tmp_path / "run") == ("diverged", 1, 20)
    assert np.isfinite(read_summary(tmp_path / "run").metrics["eval/loss"])


@pytest.mark.long
@short.parametrize("alone", [False, True], ids=["in a wave", "alone"])
def test_a_trial_with_a_dead_end_is_a_result_and_no_retry(tmp_path, capsys, alone):
    base = replaced("data", f"!unruly.spoiled {{at: [{'4' if alone else ''}]}}")
    if alone:  # a trial that goes back to an earlier state is computed as a run
        base = replaced("on_nonfinite", "rollback", base)
    file = write_sweep(tmp_path, base, more="final: null", trials=2)
    file.write_text(file.read_text().replace("final: {seeds: 2}\n", "", 1))
    assert sweep(file, tmp_path / "sweep") == 0
    for trial in folders(tmp_path / "sweep"):
        assert ended(trial) == ("diverged", 1, 12)
        assert read_summary(trial).why == "In the last evaluation, eval/loss is nan."
        assert ended(solo(trial, tmp_path / trial.parent.name)) == ("diverged", 1, 12)
    assert len(folders(tmp_path / "sweep")) == 2
