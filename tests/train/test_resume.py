"""Runs that go on: in other circumstances, on a full disk, as several processes."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import compiled_programs, runs, short
from trainer import checkpoint
from trainer.__main__ import main
from trainer.checkpoint import leaf_file, reading
from trainer.train.multihost import calls_to_next_sync


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def params(workdir: Path, step: int, prefix: str = "params") -> dict[str, np.ndarray]:
    return runs.leaves(checkpoint.load_params(workdir, step, prefix))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


# In folders that are not as they should be.


@pytest.mark.long
def test_another_encoding_of_file_names_is_refused(tmp_path, config):
    names = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    workdir = tmp_path / "Stra\xdfe"
    command = [sys.executable, "-m", "trainer", *runs.options(config, workdir)]
    done = subprocess.run(
        command,
        env=runs.environment(**names),
        cwd=runs.ROOT,
        capture_output=True,
        timeout=runs.LONG,
    )
    assert done.returncode == 2, done.stderr
    assert b"read as ascii here. Set PYTHONUTF8=1" in done.stderr
    assert not workdir.exists()


@pytest.mark.long
def test_a_folder_that_is_deleted_under_a_run_can_be_used_again(
    tmp_path, config, monkeypatch, capfd
):
    workdir, entries, deleted = tmp_path / "run", leaf_file.manifest_entries, []

    def deleting(leaves):
        if not deleted:
            deleted.append(True)
            while workdir.exists():  # the run makes files meanwhile
                shutil.rmtree(workdir, ignore_errors=True)
            (workdir / "checkpoints/4.orbax-checkpoint-tmp/state").mkdir(parents=True)
        return entries(leaves)

    monkeypatch.setattr(leaf_file, "manifest_entries", deleting)
    assert runs.train(config, workdir) == 1
    assert "was removed. This process writes nothing more there" in capfd.readouterr().err
    assert [path.name for path in workdir.iterdir()] == ["checkpoints"]
    assert runs.train(config, workdir) == 0
    assert [info.step for info in checkpoint.ls(workdir)] == [12, 16, 20]


@pytest.mark.long
def test_a_file_in_place_of_the_folder_for_damaged_checkpoints_ends_the_run_with_a_sentence(
    tmp_path, config, capfd
):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=6") == 75
    flip(largest_file(workdir / "checkpoints" / "6"))
    (workdir / "checkpoints" / "damaged").write_text("")
    assert runs.train(config, workdir) == 1
    assert "error: The damaged checkpoint" in capfd.readouterr().err


@pytest.mark.long
def test_a_stop_in_the_last_evaluation_does_not_add_a_checkpoint(tmp_path, monkeypatch, capfd):
    import unruly  # type: ignore[import-not-found]

    more = "experiment.best_metric = 'loss'\nexperiment.best_mode = 'max'\n"
    more += "experiment.keep_latest = 1\nexperiment.eval_every = 4\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    evaluate, evaluations = unruly.Points.evaluate, []

    def interrupted(self):
        evaluations.append(True)
        if len(evaluations) == 6:  # the plan tries it once
            runs.stop()
        yield from evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(unruly.Points, "evaluate", interrupted)
        assert runs.train(config, workdir) == 75
    # The best of those that were evaluated, and the newest.
    assert [info.step for info in checkpoint.ls(workdir)] == [16, 20]
    assert runs.train(config, workdir) == 0
    assert [info.step for info in checkpoint.ls(workdir)] == [20]
    # And where a process was killed before it removed what its last save made superfluous.
    shutil.copytree(workdir / "checkpoints" / "20", workdir / "checkpoints" / "16")
    assert runs.train(config, workdir) == 0
    assert "Nothing to do" in capfd.readouterr().err
    assert [info.step for info in checkpoint.ls(workdir)] == [20]


# At random moments.


@pytest.mark.long
def test_killed_runs_end_with_the_same_bits():
    command = [sys.executable, "-m", "tests.chaos", "--kills=8", "--stops=3", "--seed=4"]
    done = subprocess.run(command, cwd=runs.ROOT, env=runs.environment(), capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert "11 signals in" in done.stdout.decode()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, config, capfd):
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert runs.train(config, whole) == 0
    assert runs.train(config, workdir, "--until=13") == 75
    flip(largest_file(workdir / "checkpoints" / "13"))
    assert main(["checkpoint", "check", str(workdir)]) == 1
    assert "step 13: damaged" in capfd.readouterr().out
    assert runs.train(config, workdir) == 0
    said = capfd.readouterr().err
    assert "Checkpoint of step 13 is damaged" in said and "Restored step 12." in said
    assert (workdir / "checkpoints" / "damaged" / "13").is_dir()
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


@pytest.mark.long
def test_a_disk_that_cannot_be_read_for_a_while_ends_the_run_and_moves_nothing(
    tmp_path, config, capfd, monkeypatch
):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=13") == 75
    before, rows = sorted((workdir / "checkpoints").rglob("*")), runs.lines(workdir)
    opened = reading.read_regular

    def failing(path):
        if Path(path).name == "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_regular", failing)
        assert runs.train(config, workdir) == 1
    assert "cannot be read now: Input/output error. Nothing was changed" in capfd.readouterr().err
    assert sorted((workdir / "checkpoints").rglob("*")) == before
    assert runs.lines(workdir) == rows
    assert runs.train(config, workdir) == 0
    assert "Restored step 13." in capfd.readouterr().err


@pytest.mark.long
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path, config, capfd):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=6") == 75
    rows = runs.lines(workdir)
    for step in ("4", "6"):
        flip(largest_file(workdir / "checkpoints" / step))
    assert runs.train(config, workdir) == 1
    assert "all 2 damaged" in capfd.readouterr().err
    assert runs.train(config, workdir) == 1
    said = capfd.readouterr().err
    assert "Every checkpoint of this run was damaged" in said and "another --workdir" in said
    assert runs.lines(workdir) == rows
    shutil.rmtree(workdir / "checkpoints" / "damaged")
    assert runs.train(config, workdir) == 0


@pytest.mark.long
def test_fewer_steps_than_already_trained_are_refused(tmp_path, config, capsys):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=15") == 75
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    assert runs.train(config, workdir, "--set", "steps=10", "--allow_changed=steps") == 2
    assert "has made 15 steps, and this config asks for 10" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    assert runs.train(config, workdir, "--set", "steps=16", "--allow_changed=config") == 0


def test_checkpoints_are_listed_and_compared(tmp_path, config, capsys):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=9") == 75
    assert main(["checkpoint", "ls", str(workdir)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "step",
        *"489",
    ]
    assert main(["checkpoint", "check", str(workdir), "--step=8"]) == 0
    assert main(["checkpoint", "diff", str(workdir), "--other_step=9"]) == 0
    assert main(["checkpoint", "diff", str(workdir)]) == 1
    assert "params/head/kernel: 24 of 24 values differ" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(workdir), "--step=4"]) == 2
    assert main(["checkpoint", "ls", str(tmp_path / "none")]) == 2


# In other circumstances.


@short.parametrize(
    ("change", "named"),
    [("seed=1", "seed"), ("optimizer.learning_rate.peak_value=0.02", "peak_value")],
)
def test_another_config_is_refused_and_named(tmp_path, config, capsys, change, named):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=1") == 75
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    capsys.readouterr()
    assert runs.train(config, workdir, "--set", change) == 2
    said = capsys.readouterr().err
    assert named in said and "--allow_changed" in said and len(said.splitlines()) <= 8
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


@pytest.mark.long
def test_another_batch_size_is_refused(tmp_path, capsys):
    more = "experiment.data = @data.digits()\nmodels.mlp.num_classes = 10\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    assert runs.train(config, workdir, "--until=1") == 75
    assert runs.train(config, workdir, "--set", "data.batch_size=64") == 2
    assert "data.batch_size" in capsys.readouterr().err


@pytest.mark.long
def test_a_change_that_does_not_fit_the_checkpoints_is_refused_even_if_allowed(
    tmp_path, config, capsys
):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=5") == 75
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    capsys.readouterr()
    assert runs.train(config, workdir, "--set", "model.width=9", "--allow_changed=model") == 2
    said = capsys.readouterr().err
    assert "checkpoint of step 5 does not fit" in said
    assert "has float32[8], the program expects float32[9]" in said
    assert len(said.splitlines()) <= 8
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    assert runs.train(config, workdir) == 0


def test_other_data_are_refused_until_they_are_allowed(tmp_path, config, monkeypatch, capsys):
    import unruly  # type: ignore[import-not-found]

    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=1") == 75
    monkeypatch.setattr(unruly.Points, "fingerprint", "other points")
    assert runs.train(config, workdir) == 2
    assert "would change the data of the run" in capsys.readouterr().err
    assert runs.train(config, workdir, "--allow_changed=data", "--until=2") == 75
    lineage = json.loads((workdir / "run.json").read_text())["lineage"]
    assert lineage[-1]["changed"] == ["data: points -> other points"]


@pytest.mark.long
def test_a_change_that_only_alters_bits_is_announced(tmp_path, config, monkeypatch, capfd):
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=1") == 75
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert runs.train(config, workdir, "--until=2") == 75
    assert "xla_flags" in (said := capfd.readouterr().err) and "bits may differ" in said


@pytest.mark.long
def test_a_run_on_four_devices_resumes_on_one_two_and_eight(tmp_path, config, monkeypatch):
    def on(devices: int, workdir: Path, *more: str) -> tuple[int, str]:
        monkeypatch.setenv("XLA_FLAGS", compiled_programs.xla_flags(devices))
        run = runs.process(*runs.options(config, workdir, *more))
        said, _ = run.communicate(timeout=runs.LONG)
        return run.returncode, said

    four = tmp_path / "four"
    assert on(4, four, "--until=8")[0] == 75
    goes_on = {}
    for devices in (1, 2, 8):
        goes_on[devices] = tmp_path / str(devices)
        shutil.copytree(four, goes_on[devices])
        code, said = on(devices, goes_on[devices])
        assert code == 0, said
        assert "Restored step 8." in said and f"devices: 4 x cpu cpu -> {devices} x cpu cpu" in said
    assert on(4, four)[0] == 0
    expected = params(four, 20)
    for workdir in goes_on.values():
        for path, value in params(workdir, 20).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-6)


# On a full disk.


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk takes root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_at(monkeypatch: pytest.MonkeyPatch, disk: Path, full: int, free: int) -> None:
    import unruly  # type: ignore[import-not-found]

    def batch(self, step, batch):
        if full <= step < free:  # again and again: a save that fails leaves free space
            with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if step == free:
            (disk / "filler").unlink()
        return batch

    monkeypatch.setattr(unruly.Points, "batch", batch)


def test_a_disk_that_is_full_for_a_while_does_not_change_the_run(
    tmp_path, config, small_disk, monkeypatch, capfd
):
    whole = tmp_path / "whole"
    assert runs.train(config, whole) == 0
    fill_at(monkeypatch, small_disk, full=5, free=17)
    # At most two batches are made ahead, so that the disk is still full when step 8 is saved.
    assert runs.train(config, small_disk / "run", "--set=steps_per_call=1") == 0
    said = capfd.readouterr().err
    assert said.count("could not be saved") == 1 and "can be saved again" in said, said
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=small_disk / "run") == []
    assert runs.lines(small_disk / "run") == runs.lines(whole)


@pytest.mark.long
def test_a_run_rolls_back_also_on_a_full_disk(tmp_path, small_disk, monkeypatch, capfd):
    import unruly  # type: ignore[import-not-found]

    more = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (10,)\n"
    more += "experiment.on_nonfinite = 'rollback'\nexperiment.log_every = 1\n"
    config, whole, workdir = runs.write_config(tmp_path, more), tmp_path / "w", small_disk / "run"
    assert runs.train(config, whole) == 0
    poison = unruly.Poisoned.batch
    fill_at(monkeypatch, small_disk, full=11, free=1000)
    full = unruly.Points.batch
    monkeypatch.setattr(
        unruly.Poisoned,
        "batch",
        lambda self, step, batch: poison(self, step, full(self, step, batch)),
    )
    assert runs.train(config, workdir) == 1
    said = capfd.readouterr().err
    assert "back to step 10" in said and "rollbacks.json could not be written" in said, said
    (small_disk / "filler").unlink()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(runs.LAB)
    assert runs.train(config, workdir) == 0
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


def test_no_state_is_saved_ahead_of_the_metrics(tmp_path, config, monkeypatch, capfd):
    from trainer.writers.record_file import RecordFile

    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert runs.train(config, whole) == 0
    append = RecordFile._append

    def full(self, data):
        if b'"step": 5' in data:  # that line, and all that wait behind it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "_append", full)
        assert runs.train(config, workdir) == 1
    said = capfd.readouterr().err
    assert said.count("Until then no state is saved.") == 1
    assert re.search("The state at step 20 could not be saved: .*No space left on device", said)
    assert [info.step for info in checkpoint.ls(workdir)] == [4]
    assert runs.train(config, workdir) == 0
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


@pytest.mark.long
def test_a_last_state_that_cannot_be_saved_exits_1(
    tmp_path, config, small_disk, monkeypatch, capfd
):
    whole, workdir = tmp_path / "whole", small_disk / "run"
    assert runs.train(config, whole) == 0
    fill_at(monkeypatch, small_disk, full=10, free=1000)
    assert runs.train(config, workdir) == 1
    assert "The state at step 20 could not be saved" in capfd.readouterr().err
    assert main(["checkpoint", "check", str(workdir)]) == 0
    (small_disk / "filler").unlink()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(runs.LAB)
    assert runs.train(config, workdir) == 0
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


# As several processes.


def together(
    config: Path, workdir: Path, *more: str, mistake: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """Starts two processes of one run; the second one gets the options of `mistake` as well."""
    return runs.start_two(runs.options(config, workdir, *more), workdir.parent, mistake)


def begun(process: subprocess.Popen[bytes], log: Path, words: str) -> None:
    """Waits until a process has said something."""
    until = time.monotonic() + runs.LONG
    while words not in log.read_text():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)


LONG = """
experiment:
  data       = @data.digits()
  steps      = 1_000_000
  log_every  = 1_000_000
  eval_every = 1_000_000
  save_every = 1_000_000
models.mlp.num_classes = 10
data.digits.batch_size = 100
"""


@pytest.mark.long
def test_two_processes_stop_before_the_next_log_when_one_gets_a_signal(tmp_path):
    config, workdir = runs.write_config(tmp_path, LONG), tmp_path / "run"
    every = together(config, workdir)
    begun(every[0], tmp_path / "log0", "First step")
    every[1].send_signal(signal.SIGTERM)
    assert runs.ends(every) == [75, 75], (tmp_path / "log0").read_text()
    assert "by SIGTERM; saved" in (tmp_path / "log0").read_text()


SLOW = """
import time, trainer.data
class Slow:
    def __init__(self):
        self._digits = trainer.data.digits(batch_size=100)
    def __getattr__(self, name):
        return getattr(self._digits, name)
    def evaluate(self):
        for batch in [*self._digits.evaluate()] * 10_000:
            time.sleep(0.5)
            yield batch
def slow() -> Slow:
    return Slow()
"""


@pytest.mark.long
def test_two_processes_stop_in_an_evaluation(tmp_path, monkeypatch):
    (tmp_path / "lab_of_tests.py").write_text(SLOW)
    monkeypatch.setattr(runs, "LAB", f"{runs.LAB}:{tmp_path}")
    more = "experiment.data = @lab_of_tests.slow()\nexperiment.eval_every = 1\n"
    config = runs.write_config(tmp_path, more + "models.mlp.num_classes = 10\n")
    every = together(config, tmp_path / "run", "--vocabulary=lab_of_tests")
    begun(every[0], tmp_path / "log0", "First step")
    every[1].send_signal(signal.SIGUSR1)
    assert runs.ends(every) == [75, 75], (tmp_path / "log0").read_text()


@pytest.mark.long
def test_two_processes_with_different_configs_are_refused(tmp_path):
    config = runs.write_config(tmp_path, "experiment.data = @data.digits()\n")
    every = together(config, tmp_path / "run", mistake=["--set=seed=3"])
    assert runs.ends(every) == [2, 2]
    for index, seed in ((0, 0), (1, 3)):
        said = (tmp_path / f"log{index}").read_text()
        assert "do not have the same config" in said and "Traceback" not in said, seed
    assert not (tmp_path / "run").exists()


BROKEN = """
import jax, unruly
class Broken(unruly.Points):
    def batch(self, step, batch):
        if step == 5 and jax.process_index() == 1:
            raise RuntimeError("the disk of process 1 broke")
        start = 4 * jax.process_index()
        return {name: values[start : start + 4] for name, values in batch.items()}
def broken() -> unruly.Points:
    return Broken()
"""


@pytest.mark.long
def test_an_error_in_one_process_ends_the_other_soon(tmp_path, monkeypatch):
    (tmp_path / "lab_of_tests.py").write_text(BROKEN)
    monkeypatch.setattr(runs, "LAB", f"{runs.LAB}:{tmp_path}")
    config = runs.write_config(tmp_path, "experiment.data = @lab_of_tests.broken()\n")
    every = together(config, tmp_path / "run", "--vocabulary=lab_of_tests")
    assert runs.ends(every) == [1, 1]
    assert "RuntimeError: the disk of process 1 broke" in (tmp_path / "log1").read_text()
    said = (tmp_path / "log0").read_text()
    assert "ended with an error: RuntimeError: the disk of process 1 broke." in said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["lineage"][-1]["exit"] == "failed"


@pytest.mark.long
def test_a_user_error_in_one_process_ends_all_with_exit_code_2(tmp_path, config):
    with_mistake = ["--vocabulary=no_such_lab"]
    every = together(config, tmp_path / "run", mistake=with_mistake)
    assert runs.ends(every) == [2, 2]
    assert "no_such_lab" in (tmp_path / "log1").read_text()
    assert "Another process of this run raised an error" in (tmp_path / "log0").read_text()
    assert not (tmp_path / "run").exists()


def test_processes_agree_on_stops_about_every_two_seconds():
    steps, met = 1, []
    for seconds_a_step in [1 / 64] * 9 + [5.0] * 3 + [0.5] * 4:
        steps = calls_to_next_sync(steps, steps * seconds_a_step)
        met.append(steps)
    assert met == [2, 4, 8, 16, 32, 64, 128, 128, 128, 1, 1, 1, 2, 4, 4, 4]
