"""Functions of the user's that a run calls at log intervals."""

import json

import numpy as np
import pytest

from tests import runs
from trainer import checkpoint

NOTE = "experiment.hooks = [@unruly.note()]\nunruly.note.file = '{}'\n"


@pytest.fixture(autouse=True)
def lab(monkeypatch):
    monkeypatch.syspath_prepend(runs.LAB)


def noted(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
def test_a_hook_gets_the_logged_metrics_and_the_parameters_after_their_step(tmp_path):
    file, workdir = tmp_path / "notes", tmp_path / "run"
    more = NOTE.format(file) + "experiment.save_every = 3\nexperiment.keep_latest = 20\n"
    config = runs.write_config(tmp_path, more)
    assert runs.train(config, workdir) == 0
    notes = noted(file)
    assert [step for step, _, _ in notes] == [3, 6, 9, 12, 15, 18, 20]
    rows = {row["step"]: row for row in runs.lines(workdir)}
    for step, metrics, leaves in notes:
        others = ("step", "examples", "epochs")
        logged = {k: v for k, v in rows[step].items() if not k.startswith("eval/")}
        logged = {k: v for k, v in logged.items() if k not in others}
        assert metrics == logged
        saved = runs.leaves(checkpoint.load_params(workdir, step))
        assert leaves.keys() == saved.keys()
        for path, values in leaves.items():
            np.testing.assert_array_equal(np.float32(values), saved[path])


def test_hooks_do_not_change_a_run_and_a_resumed_run_calls_each_once(tmp_path):
    plain, file, workdir = tmp_path / "plain", tmp_path / "notes", tmp_path / "run"
    assert runs.train(runs.write_config(tmp_path), plain) == 0
    config = runs.write_config(tmp_path, NOTE.format(file))
    assert runs.train(config, workdir, "--until=7") == 75
    assert runs.train(config, workdir) == 0
    assert [step for step, _, _ in noted(file)] == [3, 6, 9, 12, 15, 18, 20]
    assert runs.lines(workdir) == runs.lines(plain)
    assert checkpoint.diff_checkpoints(workdir, 20, 20, other=plain) == []


@pytest.mark.long
def test_a_hook_that_raises_ends_the_run_with_its_name_and_loses_nothing(tmp_path, capsys):
    workdir = tmp_path / "run"
    more = "experiment.hooks = [@unruly.broken_hook()]\nunruly.broken_hook.at = {}\n"
    assert runs.train(runs.write_config(tmp_path, more.format(9)), workdir) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "hooks[0], unruly._fail, failed after step 9: " in said
    assert "the disk of the lab is on fire" in said and "unruly/__init__.py:" in said
    assert "Traceback" not in said
    assert max(checkpoint.ls(workdir))[0] == 9
    config = runs.write_config(tmp_path, more.format(-1))
    assert runs.train(config, workdir, "--allow_changed=config") == 0


EVALUATED = "experiment.hooks = [@unruly.Evaluated()]\nunruly.Evaluated.file = '{}'\n"


@pytest.mark.long
def test_a_hook_at_evaluations_gets_their_results_and_the_averaged_parameters(tmp_path):
    file, workdir = tmp_path / "notes", tmp_path / "run"
    more = EVALUATED.format(file) + "experiment.save_every = 5\nexperiment.keep_latest = 20\n"
    config = runs.write_config(tmp_path, more)
    assert runs.train(config, workdir, "--until=12") == 75
    assert runs.train(config, workdir) == 0
    notes = noted(file)
    assert [(kept, step) for kept, step, _, _ in notes] == [(0, 5), (0, 10), (12, 15), (12, 20)]
    rows = {row["step"]: row for row in runs.lines(workdir)}
    for _, step, metrics, leaves in notes:
        results = {k: v for k, v in rows[step].items() if k.startswith("eval/")}
        assert metrics == results and results
        averages = runs.leaves(checkpoint.load_params(workdir, step, "ema"))
        assert leaves.keys() == averages.keys()
        for path, values in leaves.items():
            np.testing.assert_array_equal(np.float32(values), averages[path])


def test_a_hook_that_does_not_fit_the_experiment_is_refused_before_a_folder_is_made(
    tmp_path, capsys
):
    more = EVALUATED.format(tmp_path / "notes") + "unruly.Evaluated.most = 10\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 2
    assert "hooks[0] does not fit: 20 steps are more than 10." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_hook_that_is_not_a_function_is_refused(tmp_path, capsys):
    config = runs.write_config(tmp_path, "experiment.hooks = [3]\n")
    assert runs.train(config, tmp_path / "run") == 2
    assert "hooks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
