"""The folder of a finished trial as the --workdir of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.sweep.test_sweep_plan import BASE
from trainer.__main__ import main
from trainer.sweep.wave import Wave


def computed(folder: Path, more: str) -> tuple[Path, list[str]]:
    """Computes a sweep of one trial; returns its folder, and a command that trains there."""
    (folder / "base.yaml").write_text(BASE)
    (folder / "sweep.yaml").write_text(f"base: base.yaml\nfinal: null\n{more}\n")
    runs.sweep(f"--config={folder / 'sweep.yaml'}", f"--workdir={folder / 'sweep'}")
    (trial,) = (folder / "sweep").glob("trials/*/*/*")
    return trial, [f"--config={trial / 'config.yaml'}", f"--workdir={trial}"]


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--set", "steps=40"], ["--allow_changed=config"]])
def test_the_folder_of_a_trial_without_checkpoint_is_refused(tmp_path, capsys, more):
    trial, command = computed(tmp_path, "")
    before = {file.name: file.read_bytes() for file in trial.iterdir()}
    said = runs.refused(capsys, *command, *more)
    assert "is that of a finished trial of a sweep, which has no checkpoint to continue" in said
    assert {file.name: file.read_bytes() for file in trial.iterdir()} == before


@pytest.mark.long
def test_the_folder_of_a_trial_with_a_checkpoint_continues_as_a_run(tmp_path, capsys):
    trial, command = computed(tmp_path, "checkpoints: final")
    assert main([*command, "--set", "steps=30", "--allow_changed=steps"]) == 0
    assert "Restored step 20." in capsys.readouterr().err
    assert runs.lines(trial)[-1]["step"] == 30


@pytest.mark.long
def test_a_trial_computed_alone_that_could_not_be_moved_is_not_computed_again(
    tmp_path, monkeypatch, lab, capsys
):
    base = BASE.replace(
        "!data.digits {batch_size: 32, validation: 0.2}", "!unruly.poisoned {at: [4]}"
    )
    (tmp_path / "base.yaml").write_text(f"{base}\non_nonfinite: rollback\nsave_every: 5\n")
    (tmp_path / "sweep.yaml").write_text("base: base.yaml\nfinal: null\ngoal: {select_on: test}\n")
    moved, move = [], Wave._move

    def fail_once(self: Wave, trial: Any) -> None:
        moved.append(trial.folder)
        if len(moved) == 1:
            raise RuntimeError("It is not moved.")
        move(self, trial)

    monkeypatch.setattr(Wave, "_move", fail_once)
    file, folder = tmp_path / "sweep.yaml", tmp_path / "sweep"
    command = [f"--config={file}", f"--workdir={folder}", "--vocabulary=unruly"]
    assert runs.sweep(*command) == 0
    said = capsys.readouterr().err
    assert "It is computed alone." in said and "It is not moved." in said
    assert json.loads((folder / moved[0] / "summary.json").read_text())["end"] == "done"
    assert said.count("Done: 20 steps.") == 1
