"""Runs that begin with the parameters of another run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs, short
from tests.sweep.test_sweep import assert_equal, folders, replaced, solo, sweep, write_sweep
from trainer import checkpoint, config
from trainer.__main__ import main
from trainer.engine.program import load_located
from trainer.train.warm_start import count_warm_starts

pytestmark = pytest.mark.usefixtures("lab")


def params(workdir: Path, step: int, prefix: str = "params") -> dict[str, np.ndarray]:
    return runs.leaves(checkpoint.load_params(workdir, step, prefix))


@pytest.fixture(scope="module")
def other(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.stopped(tmp_path_factory.mktemp("other"), 8)


def warm(folder: Path, other: Path, entries: str, *more: str) -> int:
    (folder / "warm").mkdir()
    text = f"experiment.warm_start = {{'from': '{other}', {entries}}}\n"
    config = runs.write_config(folder / "warm", text)
    return runs.train(config, folder / "run", "--until=1", *more)


def began_from(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["lineage"][0]["began_from"]


def stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a run stop before its first step, so that the state it starts from is on disk."""
    from trainer.engine.program import Program

    def interrupted(self, state):
        runs.stop()

    monkeypatch.setattr(Program, "compile", interrupted)


@short.parametrize("optimizer", ["keep", "reset"])
@short.parametrize("schedule", ["keep", "reset"])
def test_a_warm_start_takes_the_parameters(tmp_path, other, monkeypatch, optimizer, schedule):
    stop_at_once(monkeypatch)
    entries = f"'optimizer': '{optimizer}', 'schedule': '{schedule}'"
    assert warm(tmp_path, other, entries) == 75
    for prefix in ("params", "ema"):
        theirs, ours = params(other, 8), params(tmp_path / "run", 0, prefix)
        assert {k: x.tobytes() for k, x in ours.items()} == {
            k: x.tobytes() for k, x in theirs.items()
        }
    theirs, ours = params(other, 8, "opt_state"), params(tmp_path / "run", 0, "opt_state")
    moments = [path for path in ours if "/mu/" in path]
    for path in moments:
        wanted = theirs[path] if optimizer == "keep" else np.zeros_like(theirs[path])
        np.testing.assert_array_equal(ours[path], wanted)
    assert len(moments) == 4
    assert ours["scalars/int32"][-1] == (8 if schedule == "keep" else 0)


def test_a_warm_start_renames_and_omits_parameters(tmp_path, other, monkeypatch):
    stop_at_once(monkeypatch)
    entries = (
        r"'rename': {'embed/(.*)': r'embed/\1', 'head/.*': None}, 'fresh': ['head/.*'], 'step': 4"
    )
    monkeypatch.chdir(other.parent)  # 'from' may be relative, as in the docs
    assert warm(tmp_path, Path(other.name), entries, "--set", "model.num_classes=5") == 75
    theirs, ours = params(other, 4), params(tmp_path / "run", 0)
    np.testing.assert_array_equal(ours["embed/kernel"], theirs["embed/kernel"])
    assert ours["head/kernel"].shape == (8, 5)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def test_fresh_parameters_are_not_those_that_another_run_of_this_seed_began_with(tmp_path):
    """Each run pretrains the next one, with equal seeds, and the head begins anew every time."""
    began, ended = [], []
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        more = "models.mlp.width = 128\nexperiment.seed = 3\n"
        if number:
            more += f"experiment.warm_start = {{'from': '{tmp_path / str(number - 1) / 'run'}', "
            more += "'rename': {'head/.*': None}, 'fresh': ['head/.*']}\n"
        file = runs.write_config(folder, more + "experiment.save_every = 2\n")
        assert runs.train(file, folder / "run", "--until=2") == 75
        if number:
            first = params(folder / "run", 0)
        else:
            read = config.load([str(file.parent / "base.gin"), str(file)])
            first = runs.leaves(load_located(read, ["unruly"]).init().params)
        began.append(np.asarray(first["head/kernel"]))
        ended.append(params(folder / "run", 2)["head/kernel"])
    assert began[0].size == 384  # the correlation of independent numbers is 0 +- 0.05
    assert correlation(began[0], ended[0]) > 0.9
    for before, after in ((0, 1), (1, 2), (0, 2)):
        assert abs(correlation(began[before], began[after])) < 0.25
        assert abs(correlation(ended[before], began[after])) < 0.25
    # The numbers have the usual distribution.
    assert np.std(began[1]) == pytest.approx(np.std(began[0]), rel=0.2)
    assert np.std(began[2]) == pytest.approx(np.std(began[0]), rel=0.2)


@pytest.mark.parametrize("language", ["yaml", "gin"])
def test_the_example_of_the_page_is_read(tmp_path, language):
    page = (runs.ROOT / "docs" / "checkpoints.md").read_text().partition("\n## A warm start\n")[2]
    file = tmp_path / f"a.{language}"
    file.write_text(page.partition(f"```{language}\n")[2].partition("```")[0])
    found = config.load([str(file)]).root.kwargs["warm_start"]
    assert found == {
        "from": "runs/pretrained",
        "rename": {"encoder/(.*)": r"blocks/\1", "head/.*": None},
        "fresh": ["head/.*"],
        **dict.fromkeys(("optimizer", "schedule", "model_state"), "reset"),
    }


@short.parametrize("damage", ["cut", "inverted", "without a manifest"])
def test_a_damaged_newest_checkpoint_is_an_error_that_names_the_others(
    tmp_path, other, monkeypatch, capsys, damage
):
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    state = copy / "checkpoints" / "8" / "state.safetensors"
    content = state.read_bytes()
    if damage == "without a manifest":
        (state.parent / "manifest.json").unlink()
    elif damage == "cut":
        state.write_bytes(content[: len(content) // 2])
    else:
        state.write_bytes(content[:64] + bytes(255 - byte for byte in content[64:]))
    assert warm(tmp_path, copy, "") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"The checkpoint of step 8 in {copy} is damaged: " in said and "run.gin:1: " in said
    assert "Choose another one with 'step': there are 4." in said
    assert not (tmp_path / "run").exists()
    shutil.rmtree(copy / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "warm")
    assert warm(tmp_path, copy, "") == 2
    assert "There is no other one." in capsys.readouterr().err


@pytest.mark.long
def test_a_warm_start_says_and_records_which_step_it_took(tmp_path, other, monkeypatch, capsys):
    stop_at_once(monkeypatch)
    for entries, step in (("", 8), ("'step': 4", 4)):
        (folder := tmp_path / str(step)).mkdir()
        assert warm(folder, other, entries) == 75
        assert f"Begins with the parameters of {other} at step {step}." in capsys.readouterr().err
        assert began_from(folder / "run") == [{"run": str(other), "step": step}]
        ours, theirs = params(folder / "run", 0), params(other, step)
        assert {k: x.tobytes() for k, x in ours.items()} == {
            k: x.tobytes() for k, x in theirs.items()
        }


@pytest.mark.long
def test_a_warm_start_needs_the_other_run_only_once(tmp_path, other):
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    assert warm(tmp_path, copy, "") == 75
    shutil.rmtree(copy)
    config = tmp_path / "warm" / "run.gin"
    assert runs.train(config, tmp_path / "run", "--until=2") == 75


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True], ids=["in a wave", "alone"])
def test_the_trials_of_a_sweep_begin_as_their_runs_alone_do(tmp_path, other, alone):
    warm_start = f"{{from: {other}, rename: {{head/.*: null}}, fresh: [head/.*]}}"
    # An optimizer whose first state depends on a float that the trials search.
    base = replaced("optimizer", "!optax.adagrad {learning_rate: 1e-2}")
    base = replaced("warm_start", warm_start, replaced("ema_decay", "0.9", base))
    if alone:  # a trial that goes back to an earlier state is computed as a run
        data = replaced("data", "!unruly.poisoned {at: [4]}", base)
        base = replaced("on_nonfinite", "rollback", data)
    space = "optimizer.initial_accumulator_value: !space.uniform {low: 0.1, high: 0.9}"
    file = write_sweep(tmp_path, base, space, "checkpoints: final", trials=2)
    assert sweep(file, tmp_path / "sweep") == 0
    trials = folders(tmp_path / "sweep")
    assert len(trials) == 4
    for trial, run in ((each, tmp_path / f"solo{i}") for i, each in enumerate(trials)):
        assert_equal(trial, solo(trial, run), 12)
        assert count_warm_starts(trial) == count_warm_starts(run) == 1
        assert began_from(trial) == began_from(run) == [{"run": str(other), "step": 8}]


@pytest.mark.long
def test_a_rollback_to_a_warm_start_uses_its_saved_copy(tmp_path, other, capsys):
    def started(folder: str, *more: str) -> int:
        return runs.train(config, tmp_path / folder, *more)

    at = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (13, 14, 15)\n"
    at += "experiment.on_nonfinite = 'rollback'\nexperiment.keep_latest = 1\n"
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    config = runs.write_config(tmp_path, f"{at}experiment.warm_start = {{'from': '{copy}'}}\n")
    assert started("whole", "--set", "keep_latest=50") == 0
    assert started("run", "--until=12") == 75
    assert started("lost", "--until=12") == 75
    shutil.rmtree(copy)
    assert started("run") == 0  # 15 leads back to step 9, before the one checkpoint of step 12
    assert checkpoint.diff_checkpoints(tmp_path / "whole", 20, 20, other=tmp_path / "run") == []
    assert [info.step for info in checkpoint.ls(tmp_path / "run")] == [0, 20]
    replay = ["replay", "--vocabulary=unruly", "--step=2"]
    assert main([*replay, str(tmp_path / "run")]) == 0
    assert "Started from the checkpoint of step 0." in capsys.readouterr().out
    shutil.rmtree(tmp_path / "lost" / "checkpoints" / "0")
    assert started("lost") == 1
    assert "began with a warm start" in capsys.readouterr().err
    assert main([*replay, str(tmp_path / "lost")]) == 2
    assert "began with a warm start" in capsys.readouterr().err


@short.parametrize(
    ("entries", "words"),
    [
        ("'renam': {}", "an entry 'renam'"),
        ("'rename': {'hed/.*': None}", "applies to no parameter"),
        ("'rename': {'(([a-z_/]*)*)*X': None}", "takes too long"),
        ("'rename': {'head/.*': None}, 'fresh': ['(([a-z_/]*)*)*X']", "takes too long"),
        ("'rename': {'head/(.*)': r'tail/\\1'}", "head/bias would be tail/bias"),
        ("'rename': {'head/.*': None}", "no parameter for head/bias, head/kernel"),
        (
            "'fresh': ['head/.*']",
            "Leave these out with the rule 'head/.*': None (null in YAML)",
        ),
        (
            "'fresh': ['.*/bias', 'head/kernel']",
            "Leave these out with the rule '.*/bias': None",
        ),
        ("'fresh': ['tail/.*']", "matches no parameter of this run"),
        ("'fresh': 'head/.*'", "fresh must be a list of patterns"),
        ("'rename': ['head/.*']", "rename must be a dict"),
        ("'rename': {'head/.*': 1}", "rename must be a dict"),
        ("'optimizer': 'kept'", "'keep' or 'reset'"),
        ("'step': 7", "no checkpoint of step 7"),
    ],
    lambda case: case[0].partition(":")[0],
)
def test_a_rule_that_does_not_fit_is_a_user_error(tmp_path, other, capsys, entries, words):
    capsys.readouterr()
    assert warm(tmp_path, other, entries) == 2
    said = capsys.readouterr().err
    assert words in said and re.search(r"run\.gin:1: ", said), said
    assert len(said.splitlines()) <= 8 and not (tmp_path / "run").exists()
    files = runs.files(tmp_path / "warm" / "run.gin")
    assert main(["explain", *files, "--vocabulary=unruly"]) == 2
    assert words in capsys.readouterr().err
