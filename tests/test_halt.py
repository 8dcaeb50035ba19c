"""What a run that halts tells: where the fault is, and a command that can be pasted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from trainer.__main__ import main
from trainer.advice import replay_command


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


def halted(folder: Path, workdir: Path, more: str) -> None:
    assert runs.train(runs.write_config(folder, more), workdir) == 1


LABELS = """
experiment.data = @unruly.mislabelled()
unruly.mislabelled.at = (6,)
"""


def test_labels_that_are_no_classes_are_named(tmp_path, capfd):
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


def test_a_fault_of_the_loss_is_not_put_on_the_data(tmp_path, capfd):
    halted(tmp_path, tmp_path / "run", "experiment.loss = @unruly.loss()\n")
    said = capfd.readouterr().err
    assert "Lower the learning rate" in said and "of its batch" not in said


def test_a_rollback_that_gives_up_names_the_labels(tmp_path, capfd):
    more = LABELS.replace("(6,)", str(tuple(range(6, 200)))) + "experiment.keep_latest = 1\n"
    halted(tmp_path, tmp_path / "run", more + "experiment.on_nonfinite = 'rollback'\n")
    said = capfd.readouterr().err
    assert "went back 10 times" in said and "'label' of its batch" in said, said
    assert "Lower the learning rate" not in said


def test_the_command_repeats_how_this_process_was_started(monkeypatch):
    folder, packages = Path("/a b/run"), ["my_lab", "zoo.nets"]
    options = "--step=3 --vocabulary=my_lab --vocabulary=zoo.nets"
    for given, begun in (
        (["/env/python3", "-X", "dev", "-m", "trainer", "--gin_file=a"], "/env/python3 -X dev"),
        (["pytest", "-m", "slow"], "python"),
    ):
        monkeypatch.setattr(sys, "orig_argv", given)
        said = replay_command(folder, 3, packages)
        assert said == f"{begun} -m trainer replay '/a b/run' {options}"


def test_replay_tells_other_code(tmp_path, capsys, monkeypatch):
    from trainer.workdir import code

    halted(tmp_path, tmp_path / "run", LABELS)
    monkeypatch.setattr(code, "hashes", lambda packages: {"unruly/__init__.py": "another"})
    assert main(["replay", str(tmp_path / "run"), "--vocabulary=unruly"]) == 1
    assert "The code is not that of the run: unruly/__init__.py differs" in capsys.readouterr().out
