"""What a run that halts tells: where the fault is, and a command that can be pasted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import runs, short
from trainer import checkpoint
from trainer.__main__ import main
from trainer.train.nonfinite import replay_command


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


def halted(folder: Path, workdir: Path, more: str) -> None:
    assert runs.train(runs.write_config(folder, more), workdir) == 1


LABELS = """
experiment.data = @unruly.mislabelled()
unruly.mislabelled.at = (6,)
"""


@pytest.mark.long
def test_labels_outside_of_the_classes_are_named(tmp_path, capfd):
    workdir = tmp_path / "it's a run"
    halted(tmp_path, workdir, LABELS)
    said = capfd.readouterr().err
    assert "At step 7 train/loss is nan" in said
    assert re.search(r"'label' of its batch holds [789] to 9.* 3 classes, 0 to 2", said), said
    assert "learning rate" not in said and "Traceback" not in said
    # The command stands between backquotes, and does as it is.
    command = re.search(r"`(.*)`", said)
    assert command is not None
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command[1]], env=runs.environment(PATH=path), capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "Step 7 with batch 6" in done.stdout, done.stdout
    assert "'label' of its batch holds" in done.stdout
    assert re.search(r"gather at .*losses\.py:\d+", done.stdout), done.stdout


def test_inputs_that_are_not_finite_are_named(tmp_path, capfd):
    more = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (6,)\n"
    halted(tmp_path, tmp_path / "run", more)
    said = capfd.readouterr().err
    assert "'image' of its batch holds 128 NaN of 128 values" in said, said
    assert "Lower the learning rate" not in said


@pytest.mark.long
def test_a_fault_of_the_loss_is_not_blamed_on_the_data(tmp_path, capfd):
    halted(tmp_path, tmp_path / "run", "experiment.loss = @unruly.loss()\n")
    said = capfd.readouterr().err
    assert "Lower the learning rate" in said and "of its batch" not in said


@pytest.mark.long
def test_a_run_whose_rollbacks_run_out_names_the_labels(tmp_path, capfd):
    more = LABELS.replace("(6,)", str(tuple(range(6, 200)))) + "experiment.keep_latest = 1\n"
    halted(tmp_path, tmp_path / "run", more + "experiment.on_nonfinite = 'rollback'\n")
    said = capfd.readouterr().err
    assert "went back 10 times" in said and "'label' of its batch" in said, said
    assert "Lower the learning rate" not in said


def test_the_replay_command_repeats_how_this_process_was_started(monkeypatch):
    folder, packages = Path("/a b/run"), ["my_lab", "zoo.nets"]
    options = "--step=3 --vocabulary=my_lab --vocabulary=zoo.nets"
    for given, begun in (
        (["/env/python3", "-X", "dev", "-m", "trainer", "--gin_file=a"], "/env/python3 -X dev"),
        (["pytest", "-m", "slow"], "python"),
    ):
        monkeypatch.setattr(sys, "orig_argv", given)
        said = replay_command(folder, 3, packages)
        assert said == f"{begun} -m trainer replay '/a b/run' {options}"


@pytest.mark.long
def test_replay_reports_code_that_differs_from_the_runs(tmp_path, capsys, monkeypatch):
    from trainer.workdir import code

    halted(tmp_path, tmp_path / "run", LABELS)
    monkeypatch.setattr(code, "hashes", lambda packages: {"unruly/__init__.py": "another"})
    assert main(["replay", str(tmp_path / "run"), "--vocabulary=unruly"]) == 1
    assert "The code is not that of the run: unruly/__init__.py differs" in capsys.readouterr().out


# Weight decay multiplies the idle parameter by about -1e30, so that it is finite after step 1 and
# not after step 2. The loss and its gradients stay finite.
OVERFLOW = """
experiment.model = @unruly.idle()
experiment.optimizer = @optim.optimizer()
optim.optimizer.groups = {'idle': @idle/optim.group(), 'rest': @rest/optim.group()}
idle/optim.group.match = 'idle'
idle/optim.group.optimizer = @idle/optax.adamw()
idle/optax.adamw.learning_rate = 1.0
idle/optax.adamw.weight_decay = 1e30
rest/optim.group.match = '.*'
rest/optim.group.optimizer = @optax.adamw()
"""


@short.parametrize("every", ["log_every", "eval_every", "save_every"])
def test_under_halt_parameters_are_checked_before_they_are_logged_evaluated_or_saved(
    tmp_path, capfd, every
):
    others = {"log_every", "eval_every", "save_every"} - {every}
    rare = "".join(f"experiment.{name} = 20\n" for name in sorted(others))
    workdir = tmp_path / "run"
    halted(tmp_path, workdir, f"{OVERFLOW}{rare}experiment.{every} = 6\n")
    said = capfd.readouterr().err
    assert "At step 6 train/loss is " in said
    assert "not finite, because of an update between step 1 and step 6." in said, said
    assert not list((workdir / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_under_skip_and_rollback_the_update_that_overflows_is_undone(tmp_path, capfd, action):
    workdir = tmp_path / "run"
    rare = "".join(f"experiment.{name} = 20\n" for name in ("log_every", "eval_every"))
    more = f"{OVERFLOW}{rare}experiment.save_every = 1\nexperiment.on_nonfinite = '{action}'\n"
    code = runs.train(runs.write_config(tmp_path, more), workdir, "--until=6")
    assert code == (75 if action == "skip" else 1)  # every batch has this update: it gives up
    assert json.loads((workdir / "nonfinite.json").read_text())[0]["step"] == 2
    for saved in checkpoint.Checkpoints(workdir / "checkpoints", read_only=True).steps():
        idle = checkpoint.load_params(workdir, saved, "params")["idle"]
        assert np.isfinite(idle).all() and np.abs(idle).max() > 1e29


@pytest.mark.long
def test_a_stop_between_two_checks_does_not_save_parameters_that_are_not_finite(tmp_path, capfd):
    every = ("log_every", "eval_every", "save_every")
    rare = "".join(f"experiment.{name} = 20\n" for name in every)
    config = runs.write_config(tmp_path, OVERFLOW + rare)
    assert runs.train(config, tmp_path / "run", "--until=7") == 1
    assert "an update between step 1 and step 7" in capfd.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


@pytest.mark.long
def test_replay_finds_the_step_that_overflowed_before_the_one_that_was_noticed(tmp_path, capfd):
    rare = "".join(f"experiment.{name} = 20\n" for name in ("log_every", "eval_every"))
    halted(tmp_path, tmp_path / "run", f"{OVERFLOW}{rare}experiment.save_every = 6\n")
    capfd.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--vocabulary=unruly"]) == 1
    said = capfd.readouterr().out
    assert "Step 2, before step 6, is not finite: step 2 is shown" in said, said
    assert "Step 2 with batch 1:" in said and "params/idle is not finite. The first" in said, said


@pytest.mark.long
def test_the_search_for_a_fault_begins_only_when_rollbacks_run_out(tmp_path, monkeypatch):
    from trainer.train import loop

    asked = []
    monkeypatch.setattr(loop, "advise", lambda *_: asked.append(1) or "Advice.")
    more = "experiment.on_nonfinite = 'rollback'\nexperiment.data = @unruly.poisoned()\n"
    config = runs.write_config(tmp_path, more + "unruly.poisoned.at = (6, 9)\n")
    assert runs.train(config, tmp_path / "run") == 0
    assert asked == []
