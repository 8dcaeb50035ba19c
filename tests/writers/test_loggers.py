"""The writers wandb and mlflow: a run is one run of the logger, with the rows of metrics.jsonl.

Neither reaches for the network here: W&B is offline, and MLflow has a SQLite store.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import logged, runs
from trainer import writers
from trainer.__main__ import main
from trainer.writers import loggers as ours
from trainer.writers.loggers import LoggerWriter, Reporter, Row
from trainer.writers.summary import Summary, read_summary
from trainer.writers.wandb_logger import read_offline

pytestmark = [
    pytest.mark.usefixtures("lab"),
    pytest.mark.filterwarnings("ignore"),  # in the code of wandb and mlflow
]

BOTH = ["--set", "writers=[wandb, mlflow]"]
NAMES = ("wandb", "mlflow")


def read(folder: Path) -> dict[str, dict[str, logged.Logged]]:
    """Reads both loggers: name -> id -> run."""
    uri = os.environ["MLFLOW_TRACKING_URI"]
    return {"wandb": logged.wandb_runs(folder), "mlflow": logged.mlflow_runs(uri)}


def only(folder: Path) -> dict[str, logged.Logged]:
    """Reads the one run that each logger has: name -> run."""
    found = read(folder)
    assert [len(each) for each in found.values()] == [1, 1]
    assert len({id for each in found.values() for id in each}) == 1  # the same id in both
    return {name: next(iter(each.values())) for name, each in found.items()}


def clean(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows without the speeds, which differ from process to process."""
    return [{k: x for k, x in row.items() if "perf/" not in k} for row in rows]


def same_rows(run: logged.Logged, folder: Path, *, speeds: bool = False) -> None:
    """Asserts that a logger has the rows of a metrics.jsonl, each once and to the last bit."""
    wanted = writers.read_metrics(folder)
    assert [row["step"] for row in run.rows] == [row["step"] for row in wanted]
    for found, row in zip(run.rows, wanted, strict=True):
        found = {k: x for k, x in found.items() if not k.startswith(("min/", "max/"))}
        found = {k: x for k, x in found.items() if k in row or k not in ("exit", "steps")}
        if not speeds:
            (found,), (row,) = clean([found]), clean([row])
        assert found == row


# ---------------------------------------------------------------------------------------------
# What is logged


def test_a_run_is_logged_with_its_rows_config_and_summary(tmp_path: Path, loggers: None) -> None:
    folder = tmp_path / "first"
    assert runs.train(runs.write_config(tmp_path), folder, *BOTH) == 0
    both, summary = only(folder), read_summary(folder)
    assert summary is not None
    for run in both.values():
        same_rows(run, folder, speeds=True)
        assert (run.name, run.group) == ("first", "")
        assert run.config["optimizer"] == "optax.adamw"
        assert float(run.config["optimizer.learning_rate.peak_value"]) == 0.01
        assert run.config["optimizer.learning_rate.warmup_steps"] == "10%"
        best = summary.best["eval/accuracy"]["max"].value
        assert run.summary["max/eval/accuracy"] == best
        assert run.summary["min/eval/loss"] == summary.best["eval/loss"]["min"].value
        assert run.summary["train/loss"] == summary.metrics["train/loss"]
    assert (both["wandb"].status, both["mlflow"].status) == (0, "FINISHED")
    assert both["wandb"].summary["end"] == both["mlflow"].summary["lockstep.end"] == "done"


def test_every_number_is_logged_to_the_last_bit(
    tmp_path: Path, loggers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = {"tenth": 0.1, "least": 5e-324, "most": 1.7976931348623157e308, "nan": math.nan}
    odd |= {"int": 2**53, "loss (mean)": 1 / 3, "a//b": 2.5, "x" * 300: 4.0}
    writer = writers.create(["wandb", "mlflow"], tmp_path)
    for step in (1, 2):
        writer.write_scalars(step, odd)
        writer.write_scalars(step, {"late": 1.0 / step, "inf": -math.inf})
    writer.finish(Summary("done", 2, exit=0))
    writer.close()
    assert "failed" not in capfd.readouterr().err
    wandb, mlflow = only(tmp_path).values()
    for row in wandb.rows:
        wanted = {"step": row["step"], **odd, "late": 1 / row["step"], "inf": -math.inf}
        assert {k: repr(float(x)) for k, x in row.items()} == {
            k: repr(float(x)) for k, x in wanted.items()
        }
    for row in mlflow.rows:  # which has no infinity, and not every name
        assert [row[k] for k in ("tenth", "least", "most", "int")] == [
            odd[k] for k in ("tenth", "least", "most", "int")
        ]
        assert math.isnan(row["nan"]) and row["inf"] == -1.7976931348623157e308
        assert row["late"] == 1 / row["step"]
        renamed = {name.rpartition("-")[0]: x for name, x in row.items() if "-" in name}
        assert renamed == {"loss _mean_": 1 / 3, "a__b": 2.5, "x" * 241: 4.0}


def test_the_trials_of_a_sweep_are_runs_in_the_group_of_their_arm(
    tmp_path: Path, loggers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(runs.replaced("writers", "[wandb, mlflow]"))
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "base: base.yaml\ngoal: {select_on: test}\nfinal: {seeds: 1}\nmethod: !method.grid\n"
        "arms:\n"
        "  slow: {set: {optimizer.b2: 0.9}, space: &rates {optimizer.learning_rate: "
        "!space.values {values: [0.1, 0.01]}}}\n"
        "  fast: {space: *rates}\n"
    )
    folder = tmp_path / "betas"
    options = [f"--config={file}", f"--workdir={folder}", "--vocabulary=unruly"]
    assert runs.sweep(*options) == 0
    assert "failed" not in capfd.readouterr().err
    trials = [path.parent for path in folder.glob("*/**/metrics.jsonl")]
    assert len(trials) == 6
    found = read(folder)
    assert found["wandb"].keys() == found["mlflow"].keys()
    for every in found.values():
        by_name = {run.name: run for run in every.values()}
        assert set(by_name) == {str(trial.relative_to(folder)) for trial in trials}
        for trial in trials:
            run = by_name[str(trial.relative_to(folder))]
            assert run.group == f"betas/{trial.relative_to(folder).parts[1]}"
            same_rows(run, trial)
    assert {run.status for run in found["mlflow"].values()} == {"FINISHED"}
    assert main(["sweep", "check", str(folder)]) == 0


# ---------------------------------------------------------------------------------------------
# Runs that are continued


def test_a_run_that_was_stopped_continues_the_same_run(tmp_path: Path, loggers: None) -> None:
    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    assert runs.train(config, folder, *BOTH, "--until=10") == 75
    stopped = only(folder)
    assert stopped["mlflow"].status == "KILLED"
    assert runs.train(config, folder, *BOTH) == 0
    both = only(folder)
    assert both["wandb"].parts == 2
    assert (both["wandb"].status, both["mlflow"].status) == (0, "FINISHED")
    for run in both.values():
        same_rows(run, folder)
    assert runs.train(config, folder, *BOTH) == 0  # nothing to do, nor to log
    again = only(folder)
    assert again["wandb"].parts == 2
    assert [again[name].rows for name in NAMES] == [both[name].rows for name in NAMES]


def test_a_run_that_was_killed_is_logged_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loggers: None
) -> None:
    config, folder = runs.write_config(tmp_path, "experiment.steps = 400\n"), tmp_path / "run"
    slow = "data=!unruly.sleepy {at: 1, seconds: 0.03, every: true}"
    command = runs.options(config, folder, *BOTH, "--set", slow)
    # On a busy machine it would end before both have written a row.
    monkeypatch.setenv("UNRULY_SLOWER", "10")
    started = runs.process(*command)
    monkeypatch.delenv("UNRULY_SLOWER")

    def both_have_rows() -> bool:
        both = read(folder)
        return all(any(run.rows for run in both[name].values()) for name in NAMES)

    runs.wait_for(both_have_rows)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    had = [len(run.rows) for run in only(folder).values()]
    again = runs.process(*command)
    assert "failed" not in again.communicate(timeout=runs.LONG)[0]
    assert again.returncode == 0
    for before, run in zip(had, only(folder).values(), strict=True):
        same_rows(run, folder)
        assert 0 < before < len(run.rows)  # the kill came before the end


def test_a_log_that_is_still_written_is_read_as_far_as_it_goes(
    tmp_path: Path, loggers: None
) -> None:
    """W&B writes its file in blocks of 32,768 bytes, so that it often ends at one for a while."""
    writer = writers.create(["wandb"], tmp_path, resumed=0)
    for step in range(1, 201):
        writer.write_scalars(step, {"train/loss": 1 / step})
    writer.finish(Summary("done", 200, exit=0))
    writer.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    whole, seen = file.read_bytes(), []
    assert len(whole) > 2**15
    for size in [*range(7, 2**15, 997), *range(2**15 - 16, 2**15 + 16), len(whole)]:
        file.write_bytes(whole[:size])
        seen.append(sum(len(run.rows) for run in logged.wandb_runs(tmp_path).values()))
    assert seen == sorted(seen) and (seen[0], seen[-1]) == (0, 200)


def test_a_folder_that_was_named_in_the_same_second_is_read(tmp_path: Path, loggers: None) -> None:
    """W&B adds -1 to the name of the folder of a run that began in the second of another."""
    writer = writers.create(["wandb"], tmp_path, resumed=0)
    for step in (1, 2):
        writer.write_scalars(step, {"train/loss": 1 / step})
    writer.finish(Summary("done", 2, exit=0))
    writer.close()
    (first,) = tmp_path.glob("wandb/offline-run-*")
    identity = writers.identity_of_run(tmp_path, {})
    assert read_offline(identity) == (2, True)
    first.rename(f"{first}-1")
    assert read_offline(identity) == (2, True)
    assert read_offline(replace(identity, id="0" * 16)) == (-1, False)


def test_rows_that_a_killed_run_had_logged_are_not_logged_again(
    tmp_path: Path, loggers: None
) -> None:
    """The rows after the checkpoint are dropped from metrics.jsonl, and computed again."""
    first = writers.create(["wandb", "mlflow"], tmp_path, resumed=0)
    for step in range(1, 6):
        first.write_scalars(step, {"train/loss": 1 / step})
    first.flush()
    first.close()  # as after an error: the loggers have the rows 1 to 4
    second = writers.create(["wandb", "mlflow"], tmp_path, resumed=2)
    for step in range(3, 8):
        second.write_scalars(step, {"train/loss": 1 / step})
    second.finish(Summary("done", 7, exit=0))
    second.close()
    for run in only(tmp_path).values():
        same_rows(run, tmp_path)


def test_the_values_of_an_interrupted_evaluation_are_in_the_row_of_its_step(
    tmp_path: Path, loggers: None
) -> None:
    first = writers.create(["wandb", "mlflow"], tmp_path, resumed=0)
    for step in (1, 2):
        first.write_scalars(step, {"train/loss": 1 / step})
    first.finish(Summary("stopped", 2))
    first.close()
    second = writers.create(["wandb", "mlflow"], tmp_path, resumed=2)
    second.write_scalars(2, {"eval/loss": 3.0})
    second.write_scalars(3, {"train/loss": 0.0})
    second.finish(Summary("done", 3, exit=0))
    second.close()
    assert writers.read_metrics(tmp_path)[1] == {"step": 2, "train/loss": 0.5, "eval/loss": 3.0}
    for run in only(tmp_path).values():
        same_rows(run, tmp_path)


def test_a_trial_that_is_computed_again_is_one_run(tmp_path: Path, loggers: None) -> None:
    """Its folder is gone: only the sweep and the path of the trial tell which run it is."""
    sweep = tmp_path / "sweep"
    for steps in (4, 6):
        staged = sweep / "waves" / f"{steps}" / "trial"
        staged.mkdir(parents=True)
        identity = partial(writers.identity_of_trial, sweep, "trials/a/0000/0", "a", {"x": 1})
        writer = writers.create(["wandb", "mlflow"], staged, resumed=0, identity=identity)
        for step in range(1, steps + 1):
            writer.write_scalars(step, {"train/loss": 1 / step})
        if steps == 6:
            writer.finish(Summary("done", 6, exit=0))
        writer.close()
    for run in only(sweep).values():
        assert (run.name, run.group) == ("trials/a/0000/0", "sweep/a")
        same_rows(run, staged)
    other = writers.identity_of_trial(sweep, "trials/a/0001/0", "a", {})
    assert other.id not in read(sweep)["wandb"]
    moved = sweep.rename(tmp_path / "moved")
    again = writers.identity_of_trial(moved, "trials/a/0001/0", "a", {})
    assert again.id == other.id


def test_one_of_several_processes_of_a_run_logs_it(tmp_path: Path, loggers: None) -> None:
    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    options = [*runs.options(config, folder, *BOTH), "--set", "data=!data.digits {batch_size: 32}"]
    processes = runs.start_two([*options, "--set", "model.num_classes=10"], tmp_path)
    assert runs.ends(processes) == [0, 0]
    for run in only(folder).values():
        same_rows(run, folder)


def test_the_runs_of_verify_are_not_logged(tmp_path: Path, loggers: None) -> None:
    config, folder = runs.write_config(tmp_path), tmp_path / "runs"
    assert main(["verify", *runs.options(config, folder, *BOTH), "--steps=2"]) == 0
    assert read(folder / "whole") == read(folder / "killed") == {"wandb": {}, "mlflow": {}}


def test_a_config_that_was_changed_as_allowed_is_a_tag_in_mlflow(
    tmp_path: Path, loggers: None
) -> None:
    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    assert runs.train(config, folder, *BOTH, "--until=10") == 75
    more = ["--allow_changed=steps", "--set", "steps=25"]
    assert runs.train(config, folder, *BOTH, *more) == 0
    wandb, mlflow = only(folder).values()
    assert wandb.config["steps"] == 25
    assert (mlflow.config["steps"], mlflow.summary["changed.steps"]) == ("20", "25")


# ---------------------------------------------------------------------------------------------
# Loggers that fail


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_that_is_not_installed_is_a_mistake_before_training(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # makes Python find it nowhere
    options = ["--set", f"writers=[{name}]"]
    said = runs.said(capsys, runs.write_config(tmp_path), tmp_path / "run", *options, code=2)
    assert f"pip install lockstep-jax[{name}]" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def refused() -> str:
    """Returns an address of this machine where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_is_down_is_one_warning_and_the_run_is_done(
    name: str, tmp_path: Path, loggers: None
) -> None:
    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    elsewhere = {"MLFLOW_TRACKING_URI": refused(), "WANDB_BASE_URL": refused()}
    online = elsewhere | {"WANDB_MODE": "online", "WANDB_API_KEY": KEY}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in online.items():
            patch.setenv(variable, value)
        started = runs.process(*runs.options(config, folder, "--set", f"writers=[{name}]"))
        said, _ = started.communicate(timeout=runs.LONG)
    assert started.returncode == 0, said
    assert said.count("warning: ") == 1 and f"warning: the writer {name!r} failed: " in said
    assert said.index("Done: 20 steps") and "Traceback" not in said
    assert len(writers.read_metrics(folder)) > 6
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in text for text in texts)
    # Once it answers again, the same command gives it all rows.
    command = runs.options(config, folder, "--set", f"writers=[{name}]")
    assert main(command) == 0
    (run,) = read(folder)[name].values()
    same_rows(run, folder)


def test_a_store_that_cannot_be_written_is_one_warning(
    tmp_path: Path,
    loggers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/absent/runs.db")
    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    said = runs.said(capsys, config, folder, "--set", "writers=[mlflow]")
    assert said.count("the writer 'mlflow' failed") == 1 and "absent/runs.db" in said


class Service:
    """A logger in memory that fails, or takes long, as a test asks for.

    It keeps what was written when another one is made, as a server does.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.summary: Any = ()
        self.failing = False
        self.hung: threading.Event | None = None

    def __call__(self) -> "Service":
        return self

    def open(self) -> int:
        self._answer()
        return max((row.step for row in self.rows), default=-1)

    def write(self, rows: Sequence[Row]) -> None:
        self._answer()
        self.rows += rows

    def close(self, summary: Summary | None) -> None:
        self._answer()
        self.summary = summary

    def _answer(self) -> None:
        if self.hung is not None:
            self.hung.wait(runs.LONG)
        if self.failing:
            raise ConnectionError("no route to host")


@pytest.fixture
def service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Service, list[str], Callable[..., LoggerWriter]]:
    """A service, the lines about it, and what makes a writer of it; it is tried again at once."""
    monkeypatch.setattr(ours, "_PAUSE", 0.0)
    lines: list[str] = []
    service, reporter = Service(), Reporter(lines.append)

    def make(resumed: int = 0) -> LoggerWriter:
        rows = tmp_path / "metrics.jsonl"
        return LoggerWriter("wandb", service, reporter, rows=rows, resumed=resumed)

    return service, lines, make


DONE = Summary("done", 100, exit=0)


def test_a_service_that_fails_for_a_while_gets_every_row_once(service: Any) -> None:
    service, lines, make = service
    writer = make()
    for step in range(1, 101):
        service.failing = 30 <= step < 60
        writer.write_scalars(step, {"x": step / 3})
        runs.wait_for(lambda: writer._queue.empty())
    writer.finish(DONE)
    writer.close()
    assert [(row.step, row.values["x"]) for row in service.rows] == [
        (step, step / 3) for step in range(1, 101)
    ]
    assert service.summary == DONE
    assert lines == [
        "warning: the writer 'wandb' failed: ConnectionError: no route to host. The run goes on, "
        "and metrics.jsonl has every row.",
        "The writer 'wandb' works again.",
    ]


def test_a_service_that_hangs_keeps_no_step_waiting(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_LONGEST_WAIT", 0.3)
    monkeypatch.setattr(ours, "_WAIT_AFTER_FAILURE", 0.01)
    service, lines, make = service
    service.hung = threading.Event()
    first, second = make(), make()
    start = time.monotonic()
    for step in range(1, 2001):
        first.write_scalars(step, {"x": 1.0})
    assert time.monotonic() - start < 2  # 1 ms a row, on a loaded machine
    for writer in (first, second):  # and the end of many trials waits once
        writer.finish(DONE)
        writer.close()
    assert time.monotonic() - start < 10
    assert len(lines) == 1 and "has not taken the last rows within 0.3 seconds" in lines[0]
    service.hung.set()


def test_a_service_that_is_too_slow_gets_no_gaps(
    service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ours, "_MOST_WAITING", 50)
    service, lines, make = service
    service.hung = threading.Event()
    writer = make()
    with contextlib.closing(writers.JsonlWriter(tmp_path)) as rows:
        for step in range(1, 101):
            rows.write_scalars(step, {"x": 1.0})
            writer.write_scalars(step, {"x": 1.0})
            if step == 80:
                service.hung.set()
                runs.wait_for(lambda: len(service.rows) > 40)
    writer.finish(DONE)
    writer.close()
    steps = [row.step for row in service.rows]
    assert steps == list(range(1, len(steps) + 1)) and 40 < len(steps) < 80
    assert len(lines) >= 1 and "more slowly than the run writes them" in lines[0]
    assert service.summary is None  # it must not look complete
    again = make(resumed=100)
    again.finish(DONE)
    again.close()
    assert [row.step for row in service.rows] == list(range(1, 101))
