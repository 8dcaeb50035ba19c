"""How many threads OpenBLAS has in a run, which decide its speed and the bits of `eigh`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scipy.linalg  # noqa: F401  # loads the library with which jax decomposes matrices
from threadpoolctl import ThreadpoolController

from tests import runs
from tests.sweep.test_sweep import folders, sweep, write_sweep
from trainer.train import runtime
from trainer.train.runtime import use_openblas_threads

VARIABLE = "OPENBLAS_NUM_THREADS"


def loaded() -> list[int]:
    """Returns the numbers of threads of the OpenBLAS libraries of this process."""
    return [each.num_threads for each in libraries().lib_controllers]


def libraries() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes this process one in which nobody has chosen a number; two is the default."""
    if not loaded():
        pytest.skip("scipy has no OpenBLAS on this system.")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(runtime, "_ours", None)
    monkeypatch.setattr(runtime, "_number", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.syspath_prepend(runs.LAB)
    with libraries().limit(limits=2):
        yield


def recorded(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["fingerprint"].get("openblas_threads", "-")


def edit(folder: Path, threads: Any) -> None:
    """Writes another number into run.json; "-" removes it, as in those of the first version."""
    record = json.loads((folder / "run.json").read_text())
    record["fingerprint"]["openblas_threads"] = threads
    if threads == "-":
        del record["fingerprint"]["openblas_threads"]
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.long
def test_a_new_run_has_one_thread(tmp_path):
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run", "--until=2") == 75
    assert recorded(tmp_path / "run") == 1
    assert set(loaded()) == {1} and os.environ[VARIABLE] == "1"


@pytest.mark.long
def test_the_number_that_the_user_has_set_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run", "--until=2") == 75
    assert recorded(tmp_path / "run") == 2
    assert set(loaded()) == {2} and os.environ[VARIABLE] == "2"


@pytest.mark.long
@pytest.mark.parametrize(("began", "threads"), [(1, 1), (2, 2), (None, 2), ("-", 2)])
def test_a_run_keeps_the_number_that_it_began_with(tmp_path, capsys, began, threads):
    """A run.json of the first version has none: it began with the default of the library."""
    config, workdir = runs.write_config(tmp_path), tmp_path / "run"
    assert runs.train(config, workdir, "--until=2") == 75
    edit(workdir, began)
    capsys.readouterr()
    assert runs.train(config, workdir, "--until=4") == 75
    assert set(loaded()) == {threads}
    assert recorded(workdir) == (None if began == "-" else began)
    assert "openblas_threads" not in capsys.readouterr().err
    # And the next new run begins as this process goes on.
    assert runs.train(config, tmp_path / "other", "--until=2") == 75
    assert set(loaded()) == {threads}


@pytest.mark.long
def test_another_number_of_the_user_is_reported(tmp_path, capsys, monkeypatch):
    config, workdir = runs.write_config(tmp_path), tmp_path / "run"
    assert runs.train(config, workdir, "--until=2") == 75
    monkeypatch.setenv(VARIABLE, "2")
    capsys.readouterr()
    assert runs.train(config, workdir, "--until=4") == 75
    assert "openblas_threads: 1 -> 2 (bits may differ)" in capsys.readouterr().err
    assert recorded(workdir) == 2 and set(loaded()) == {2}


@pytest.mark.long
def test_the_trials_of_a_sweep_have_one_number(tmp_path):
    file = write_sweep(tmp_path, trials=1)
    assert sweep(file, tmp_path / "sweep") == 0
    found = folders(tmp_path / "sweep")
    assert [recorded(trial) for trial in found] == [1, 1, 1]
    # A sweep that an earlier version began goes on with the default.
    for trial in found:
        edit(trial, "-")
    runtime._number = 0
    file = write_sweep(tmp_path, trials=2)
    extend = ["sweep", "extend", str(tmp_path / "sweep"), f"--config={file}"]
    assert runs.main([*extend, "--vocabulary=unruly"]) == 0
    work = ["sweep", "work", str(tmp_path / "sweep"), "--vocabulary=unruly"]
    assert runs.main(work) == 0
    (new,) = set(folders(tmp_path / "sweep")) - set(found)
    assert recorded(new) is None and set(loaded()) == {2}


@pytest.mark.parametrize("value", ["0", "many", "-1", ""])
def test_a_number_that_the_library_ignores_is_its_default(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert use_openblas_threads() is None
    assert os.environ[VARIABLE] == value and set(loaded()) == {2}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fingerprint": 3}', "folder"])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path, content):
    file = tmp_path / "run.json"
    file.mkdir() if content == "folder" else file.write_text(content)
    assert use_openblas_threads(tmp_path) == 1


@pytest.mark.long
def test_the_number_is_set_before_a_command_loads_the_library(tmp_path):
    code = """
import sys, json
from trainer.train import runtime
chosen = runtime.use_openblas_threads
def choose(*folders):
    print(json.dumps(sorted({"numpy", "scipy", "jax"} & set(sys.modules))), file=sys.stderr)
    return chosen(*folders)
runtime.use_openblas_threads = choose
from trainer.__main__ import main
code = main(sys.argv[1:])
from threadpoolctl import threadpool_info
print(json.dumps([x["num_threads"] for x in threadpool_info() if x["internal_api"] == "openblas"]))
sys.exit(code)
"""
    options = runs.options(runs.write_config(tmp_path), tmp_path / "run", "--until=2")
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        env=runs.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[0] == "[]"
    assert set(json.loads(done.stdout)) == {1}
