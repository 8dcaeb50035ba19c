"""Folders and files that a run cannot use are told in a sentence, and never waited for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs, short
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.workdir import check_files


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(runs.LAB)
        assert runs.train(runs.write_config(folder), folder / "run", "--until=4") == 75
    return folder


@pytest.fixture
def workdir(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(runs.LAB)
    return Path(shutil.copytree(stopped / "run", tmp_path / "run"))


BRACKETS = "[" * 100_000


@pytest.mark.long
@short.parametrize(
    ("name", "code", "words"),
    [
        ("run.json", 2, "run.json is damaged (it nests too deeply)"),
        ("rollbacks.json", 2, "rollbacks.json is damaged (it nests too deeply)"),
        ("nonfinite.json", 75, "saved"),  # it is of no use to the run, and written anew
    ],
)
def test_a_file_of_deeply_nested_brackets_is_a_named_error(
    stopped, workdir, capfd, name, code, words
):
    (workdir / name).write_text(BRACKETS)
    assert runs.train(stopped / "run.gin", workdir, "--until=5") == code
    said = capfd.readouterr().err
    assert words in said and "Traceback" not in said


@pytest.mark.long
def test_replay_refuses_a_record_of_deeply_nested_brackets(workdir, capfd):
    (workdir / "nonfinite.json").write_text(BRACKETS)
    assert main(["replay", str(workdir), "--vocabulary=unruly"]) == 2
    assert "records no step" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name", ["run.json", "config.yaml", "metrics.jsonl", "nonfinite.json", "rollbacks.json"]
)
def test_a_pipe_is_refused(workdir, name):
    (workdir / name).unlink(missing_ok=True)
    os.mkfifo(workdir / name)
    with pytest.raises(UserError, match=f"{name} is a pipe.*: move it away"):
        check_files(workdir)


@pytest.mark.long
@short.parametrize(
    ("command", "name"),
    [
        ("train", "nonfinite.json"),
        ("replay", "nonfinite.json"),
        ("plot", "metrics.jsonl"),
        ("train", "checkpoints/4/manifest.json"),
        ("train", "checkpoints/4/state.safetensors"),
    ],
)
def test_no_command_waits_for_a_pipe(stopped, workdir, command, name):
    (workdir / name).unlink(missing_ok=True)
    os.mkfifo(workdir / name)
    given = {
        "train": runs.options(stopped / "run.gin", workdir),
        "replay": [str(workdir), "--vocabulary=unruly"],
        "plot": [str(workdir)],
    }[command]
    line = [sys.executable, "-m", "trainer", command, *given]
    done = subprocess.run(
        line,
        cwd=runs.ROOT,
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=runs.LONG,
    )
    assert done.returncode == (1 if "checkpoints" in name else 2), done.stderr
    assert Path(name).name in done.stderr and "Traceback" not in done.stderr


def test_the_files_of_a_finished_run_are_accepted(workdir, tmp_path):
    check_files(workdir)
    check_files(tmp_path / "not there yet")
    (workdir / "run.json").rename(tmp_path / "elsewhere.json")
    (workdir / "run.json").symlink_to(tmp_path / "elsewhere.json")
    check_files(workdir)


@short.parametrize("more", [[], ["--workdir=run"]], ids=["default", "relative"])
def test_a_run_ends_with_a_sentence_when_the_current_folder_was_deleted(
    stopped, tmp_path, monkeypatch, capfd, more
):
    monkeypatch.syspath_prepend(runs.LAB)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    command = [*runs.files(stopped / "run.gin"), "--vocabulary=unruly"]
    try:
        code = main([*command, *more])
    except SystemExit as error:  # as argparse ends
        code = error.code
    assert code == 2
    said = capfd.readouterr().err
    assert "current folder does not exist any more" in said and "Traceback" not in said, said
    assert main([*command, f"--workdir={tmp_path / 'run'}", "--until=1"]) == 75


@pytest.mark.long
def test_a_mistake_is_reported_also_when_the_current_folder_was_deleted(
    stopped, tmp_path, monkeypatch, capfd
):
    (tmp_path / "broken_of_tests.py").write_text("1 / 0\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    command = ["config", *runs.files(stopped / "run.gin"), "--vocabulary=broken_of_tests"]
    assert main(command) == 2
    assert "broken_of_tests.py:1" in capfd.readouterr().err
