"""A finished run that is asked for again answers at once, unless something was changed."""

import json
import shutil
from pathlib import Path

import pytest

from tests import runs, short
from trainer.train import run as run_module

NOTHING = "Nothing to do: the run has its 20 steps.\n"


@pytest.fixture(scope="module")
def finished(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20 steps, beside its config."""
    folder = tmp_path_factory.mktemp("finished")
    assert runs.train(runs.write_config(folder), folder / "run") == 0
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def again(folder: Path, *options: str) -> int:
    return runs.train(folder / "run.gin", folder / "run", *options)


def test_a_finished_run_answers_before_its_plan_and_writes_nothing(finished, capfd, monkeypatch):
    before = contents(finished)
    monkeypatch.setattr(run_module, "make_plan", lambda *_: pytest.fail("It made the plan."))
    capfd.readouterr()
    assert again(finished) == 0
    assert capfd.readouterr() == ("", NOTHING)
    assert contents(finished) == before


def flip(file: Path) -> None:
    """Changes one byte in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def largest(folder: Path) -> Path:
    return max((x for x in folder.rglob("*") if x.is_file()), key=lambda file: file.stat().st_size)


def edit_record(workdir: Path, **values: object) -> None:
    """Changes the last entry of run.json; without values, removes all entries."""
    record = json.loads((workdir / "run.json").read_text())
    record["lineage"] = [record["lineage"][-1] | values] if values else []
    (workdir / "run.json").write_text(json.dumps(record))


def drop_a_row(workdir: Path) -> None:
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[1:]))


# What is done to the folder of the run -> what is then said, and the exit code.
CHANGES = {
    "a checkpoint is damaged": (
        lambda workdir: flip(largest(workdir / "checkpoints" / "20")),
        "is damaged",
        0,
    ),
    "a row is missing": (drop_a_row, "1 are lost for good", 1),
    "the summary is missing": (lambda workdir: (workdir / "summary.json").unlink(), NOTHING, 0),
    "the summary is damaged": (
        lambda workdir: (workdir / "summary.json").write_text("{"),
        NOTHING,
        0,
    ),
    "the plan is missing": (lambda workdir: (workdir / "plan.txt").unlink(), NOTHING, 0),
    "an earlier version wrote the record": (
        lambda workdir: edit_record(workdir, results=None),
        NOTHING,
        0,
    ),
    "the record has no process": (edit_record, NOTHING, 0),
    "it was killed": (lambda workdir: edit_record(workdir, exit=None), NOTHING, 0),
}


@short.parametrize("change", CHANGES)
def test_a_finished_run_is_looked_at_whole_if_its_folder_was_changed(
    finished, change, tmp_path, capfd
):
    apply, said, code = CHANGES[change]
    runs.write_config(tmp_path)
    shutil.copytree(finished / "run", tmp_path / "run")
    apply(tmp_path / "run")
    entries = len(json.loads((tmp_path / "run/run.json").read_text())["lineage"])
    capfd.readouterr()
    assert again(tmp_path) == code
    err = capfd.readouterr().err
    assert said in err and "Restored step " in err
    assert len(json.loads((tmp_path / "run/run.json").read_text())["lineage"]) == entries + 1
    assert (tmp_path / "run/plan.txt").exists()
    if code == 0:  # it left a folder that needs no further look
        assert again(tmp_path) == 0
        assert capfd.readouterr().err == NOTHING


def test_a_finished_run_of_other_code_is_refused(finished, capfd, monkeypatch):
    monkeypatch.setattr(run_module.code, "hashes", lambda _: {"unruly.py": "0" * 64})
    capfd.readouterr()
    assert again(finished) == 2
    assert "unruly.py" in capfd.readouterr().err


@pytest.mark.long
def test_a_finished_run_with_other_versions_says_so(finished, tmp_path, capfd, monkeypatch):
    shutil.copytree(finished / "run", tmp_path / "run")
    runs.write_config(tmp_path)
    real = run_module.make_fingerprint
    monkeypatch.setattr(
        run_module, "make_fingerprint", lambda **more: real(**more) | {"jax": "9.9.9"}
    )
    capfd.readouterr()
    assert again(tmp_path) == 0
    assert "Changed since this run stopped: jax: " in capfd.readouterr().err


@pytest.mark.long
def test_more_steps_and_the_options_that_look_at_steps_are_not_answered_at_once(
    finished, tmp_path, capfd
):
    shutil.copytree(finished / "run", tmp_path / "run")
    runs.write_config(tmp_path)
    assert again(tmp_path, "--trace") == 0
    assert "Restored step 20." in capfd.readouterr().err
    assert again(tmp_path, "--profile=21-22") == 2
    assert again(tmp_path, "--set=steps=24", "--allow_changed=config") == 0
    assert "Done: 24 steps." in capfd.readouterr().err


@pytest.mark.long
def test_a_run_that_has_not_ended_computes_its_fingerprint_once(tmp_path, monkeypatch):
    real, computed = run_module.make_fingerprint, []
    monkeypatch.setattr(
        run_module, "make_fingerprint", lambda **more: computed.append(1) or real(**more)
    )
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run", "--until=4") == 75
    assert len(computed) == 1
