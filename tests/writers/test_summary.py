"""summary.json, and what each row of metrics.jsonl says of the progress of its run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.sweep.test_sweep import folders, replaced, solo, swept
from tests.sweep.test_sweep_trial_folder import computed
from trainer import config as configs
from trainer.__main__ import main
from trainer.sweep.wave_runner import WaveRunner
from trainer.train.rows import Results
from trainer.writers import read_metrics
from trainer.writers.summary import Best, Summary, read_outcome, read_summary

pytestmark = pytest.mark.usefixtures("lab")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def summary(folder: Path) -> Summary:
    found = read_summary(folder)
    assert found is not None
    return found


def content(folder: Path) -> dict[str, Any]:
    """Returns what equal runs have in common."""
    text = json.loads((folder / "summary.json").read_text())
    assert text["perf/seconds"] >= 0
    return runs.computed(text)


def best(rows: list[dict[str, Any]], name: str, choose: Any) -> Best:
    values = [(row[name], row["step"]) for row in rows if name in row]
    value = choose(value for value, _ in values)
    return Best(value, next(step for each, step in values if each == value))


def test_the_summary_of_a_run_has_its_final_and_its_best_metrics(config, tmp_path):
    assert runs.train(config, tmp_path / "run") == 0
    found, rows = summary(tmp_path / "run"), read_metrics(tmp_path / "run")
    assert (found.end, found.exit, found.step, found.steps, found.why) == ("done", 0, 20, 20, "")
    assert found.examples == rows[-1]["examples"]
    assert found.seconds == rows[-1]["perf/seconds"] > 0
    named = {name for row in rows for name in row if "perf/" not in name}
    assert set(found.metrics) == named - {"step", "examples", "epochs"}
    assert all(found.metrics[n] == [r[n] for r in rows if n in r][-1] for n in found.metrics)
    assert found.best == {
        "eval/loss": {"min": best(rows, "eval/loss", min)},
        "eval/accuracy": {
            "min": best(rows, "eval/accuracy", min),
            "max": best(rows, "eval/accuracy", max),
        },
    }
    before = (tmp_path / "run" / "summary.json").read_text()
    assert runs.train(config, tmp_path / "run") == 0  # nothing to do
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_the_folder_of_a_summary_may_be_a_text(tmp_path):
    (tmp_path / "summary.json").write_text(Summary("done", 3).text())
    assert read_summary(str(tmp_path)) == read_summary(tmp_path) == Summary("done", 3)


@pytest.mark.long
def test_a_stopped_run_says_so_and_ends_with_the_summary_of_an_uninterrupted_one(config, tmp_path):
    assert runs.train(config, tmp_path / "one") == 0
    assert runs.train(config, tmp_path / "two", "--until=11") == 75
    stopped, rows = summary(tmp_path / "two"), read_metrics(tmp_path / "two")
    assert (stopped.end, stopped.exit, stopped.step, stopped.steps) == ("stopped", 75, 11, 20)
    assert stopped.why == "Stopped at step 11 by --until; saved."
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append((tmp_path / "two" / "summary.json").exists())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.writers.MultiWriter.progress", look)
        assert runs.train(config, tmp_path / "two") == 0
    assert seen and not any(seen)  # a process that is killed now leaves no summary
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert runs.lines(tmp_path / "two") == runs.lines(tmp_path / "one")
    after = [row for row in read_metrics(tmp_path / "two") if row["step"] > 11]
    # Step 11 counts, although the last row of the first process is that of step 10.
    assert after[0]["perf/seconds"] > rows[-1]["perf/seconds"]
    assert rows[-1]["step"] == 10


def test_the_seconds_of_a_resumed_run_begin_where_its_last_row_ended(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {"step": 10, "train/loss": 2.0, "perf/seconds": 5.0, "perf/steps_per_second": 4.0},
        {"step": 12, "eval/loss": 1.0, "perf/seconds": 5.5, "examples": 96, "epochs": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = Results().read(folder)
    assert results.seconds_at(12) == 5.5
    assert results.seconds_at(14) == 6.0
    assert Results().seconds_at(14) == 0.0
    assert results.newest == {"train/loss": 2.0, "eval/loss": 1.0}


@pytest.mark.long
def test_every_row_has_examples_epochs_and_seconds(config, tmp_path):
    assert runs.train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run")
    data = configs.Builder(configs.load([tmp_path / "base.gin"]), ["unruly"]).build("data")
    assert [row["step"] for row in rows] == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    for row in rows:
        assert row["examples"] == data.batch_size * row["step"]
        assert row["epochs"] == row["examples"] / data.num_examples
    seconds = [row["perf/seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0
    more = ["--set", "steps_per_call=1"]
    assert runs.train(config, tmp_path / "single", *more) == 0
    assert runs.lines(tmp_path / "single") == runs.lines(tmp_path / "run")


@pytest.mark.long
def test_seconds_are_those_of_the_steps_alone(tmp_path):
    more = "experiment.data = @unruly.sleepy()\nunruly.sleepy.seconds = 0.05\n"
    more += "unruly.sleepy.every = True\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 0
    found = summary(tmp_path / "run").seconds
    # A thread makes batches during the evaluations as well, whose time does not count.
    assert found is not None and found >= 0.6 * 20 * 0.05


def test_a_run_that_diverged_says_where(config, tmp_path):
    poisoned = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (10,)\n"
    assert runs.train(runs.write_config(tmp_path, poisoned), tmp_path / "run") == 1
    found = summary(tmp_path / "run")
    assert (found.end, found.exit, found.step, found.steps) == ("diverged", 1, 11, 20)
    assert found.why.startswith("At step 11 train/loss is nan")
    assert math.isnan(found.metrics["train/loss"])
    assert found.best["eval/loss"]["min"].step in (5, 10)
    assert found.examples == read_metrics(tmp_path / "run")[-1]["examples"]


@pytest.mark.long
def test_a_run_that_an_error_ends_names_it(config, tmp_path, monkeypatch):
    from trainer.train import loop

    def broken(*_: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(loop.Loop, "_evaluate", broken)
    assert runs.train(config, tmp_path / "run") == 1
    found = summary(tmp_path / "run")
    assert (found.end, found.exit, found.step) == ("failed", 1, 3)
    line = broken.__code__.co_firstlineno + 1
    assert found.why == f"RuntimeError: no such thing (tests/writers/test_summary.py:{line})"


@pytest.mark.long
def test_a_run_without_all_of_its_rows_is_done_and_failed(config, tmp_path):
    assert runs.train(config, tmp_path / "run", "--until=12") == 75
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert runs.train(config, tmp_path / "run") == 1
    found = summary(tmp_path / "run")
    assert (found.end, found.exit, found.step) == ("done", 1, 20)
    assert "metrics.jsonl was removed" in found.why


@pytest.mark.long
def test_a_trial_has_the_summary_of_its_run_alone(tmp_path):
    for index, trial in enumerate(folders(swept(tmp_path))[:2]):
        assert content(trial) == content(solo(trial, tmp_path / str(index)))
        rows = read_metrics(trial)
        assert summary(trial).seconds == rows[-1]["perf/seconds"] > 0
        seconds = [row["perf/seconds"] for row in rows]
        assert seconds == sorted(seconds)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "vmap: 3"])
def test_the_seconds_of_a_trial_are_its_share_of_those_of_its_wave(tmp_path, monkeypatch, more):
    import time

    waves: list[float] = []
    compute = WaveRunner._compute_blocks

    def timed(self: WaveRunner) -> None:
        start = time.perf_counter()
        compute(self)
        waves.append(time.perf_counter() - start)

    monkeypatch.setattr(WaveRunner, "_compute_blocks", timed)
    sleepy = replaced("data", "!unruly.sleepy {seconds: 0.02, every: true}")
    swept(tmp_path, sleepy, more=more, final="null")
    seconds = [summary(trial).seconds or 0.0 for trial in folders(tmp_path / "sweep")]
    assert len(seconds) == 3
    # Each has less than half of the time in which all three were computed.
    assert 0.5 * 12 * 0.02 < sum(seconds) <= sum(waves)
    assert max(seconds) < 0.6 * sum(waves)


@pytest.mark.long
def test_a_trial_that_continues_as_a_run_does_not_keep_its_summary(tmp_path):
    trial, command = computed(tmp_path, "checkpoints: final")
    assert summary(trial).steps == 20
    more = ["--set", "steps=30", "--allow_changed=steps"]
    assert main([*command, *more, "--until=25"]) == 75
    assert summary(trial).end == "stopped"
    assert read_outcome(trial) is None
    assert main([*command, *more]) == 0
    found = read_outcome(trial)
    assert found is not None and (found.end, found.step, found.steps) == ("done", 30, 30)


def test_the_summary_of_an_earlier_version_is_read(tmp_path):
    old = {"end": "diverged", "step": 7, "metrics": {"eval/loss": "nan"}, "why": "It is nan."}
    (tmp_path / "summary.json").write_text(json.dumps(old))
    found = summary(tmp_path)
    assert (found.end, found.step, found.why) == ("diverged", 7, "It is nan.")
    assert math.isnan(found.metrics["eval/loss"])
    assert (found.exit, found.steps, found.examples, found.seconds) == (None,) * 4
    assert found.best == {}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"end": "do', '{"end": "done", "step": 1, "metrics": [], "why": ""}'),
        *('{"end": "done", "step": 1, "why": ""}', '{"end": "done", "step": 1, "metrics": {}}'),
    ],
)
def test_a_damaged_summary_is_none(text, tmp_path):
    (tmp_path / "summary.json").write_text(text)
    assert read_summary(tmp_path) is None


def test_what_is_not_known_of_a_run_is_null_and_tokens_only_where_they_are_counted():
    unknown = {"exit": None, "steps": None, "examples": None, "perf/seconds": None}
    known = {"end": "failed", "step": 0, "metrics": {}, "best": {}, "why": "A sentence."}
    assert json.loads(Summary("failed", 0, {}, "A sentence.").text()) == unknown | known
    assert json.loads(Summary("done", 1, tokens=5).text())["tokens"] == 5


def test_a_summary_is_read_as_it_was_written(tmp_path):
    one = Summary(
        end="failed",
        step=3,
        metrics={"eval/loss": math.inf, "train/loss": 0.1},
        why="A sentence.",
        exit=1,
        steps=9,
        examples=30,
        seconds=0.25,
        best={"eval/loss": {"min": Best(0.5, 2)}},
    )
    (tmp_path / "summary.json").write_text(one.text())
    assert read_summary(tmp_path) == one
