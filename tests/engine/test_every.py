"""Evaluations at intervals that change: which steps, what the plan says, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import runs
from trainer.engine import every
from trainer.sweep.wave import check_rows
from trainer.train.rows import LoggedRows, expected_rows
from trainer.writers import iterate_metrics
from trainer.writers.json_files import DamagedFile

CHANGING = "experiment.eval_every = {0: 5, '60%': 2}\nexperiment.save_every = 100\n"


def track(steps: int) -> set[int]:
    """The steps at which modded-nanogpt's optimizer track evaluates a run, after the first one."""
    found = set()
    for step in range(1, steps + 1):
        interval = 125 if step / steps < 0.9 else 25
        if step == steps or step % interval == 0:
            found.add(step)
    return found


@pytest.mark.parametrize("steps", [25, 130, 2690, 3250, 3275, 5625])
def test_the_steps_of_the_track(steps: int):
    late = -(-9 * steps // 10)  # the first step of the last tenth
    intervals = {0: 125, late: 25}
    due = set(every.due_steps(intervals, 0, steps))
    assert due | {steps} == track(steps)
    assert due == {step for step in range(1, steps + 1) if every.is_due(intervals, step)}
    after = steps // 2
    assert set(every.due_steps(intervals, after, steps)) == {step for step in due if step > after}


def evaluated(workdir: Path) -> list[int]:
    rows = iterate_metrics(workdir)
    return [int(row["step"]) for row in rows if any(name.startswith("eval/") for name in row)]


@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_a_run_is_evaluated_where_it_says_also_if_it_is_resumed(tmp_path, capsys):
    config = runs.write_config(tmp_path, CHANGING)
    assert runs.train(config, tmp_path / "whole") == 0
    assert evaluated(tmp_path / "whole") == [5, 10, 12, 14, 16, 18, 20]
    for until in (11, 13, 16):
        assert runs.train(config, tmp_path / "stopped", f"--until={until}") == 75
    assert runs.train(config, tmp_path / "stopped") == 0
    assert evaluated(tmp_path / "stopped") == evaluated(tmp_path / "whole")
    assert "lost" not in capsys.readouterr().err  # rows of metrics.jsonl, which are counted


@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_the_rows_of_changing_intervals_are_counted(tmp_path):
    config = runs.write_config(tmp_path, CHANGING)
    given = {"log_every": 3, "eval_every": [[0, 5], [12, 2]], "steps": 20}
    # log lines at 3, 6, 9, 12, 15, 18; an evaluation at the last step may have been interrupted.
    rows = {2: 0, 5: 1, 9: 4, 11: 5, 12: 6, 13: 6, 14: 6, 15: 8, 16: 8, 20: 11}
    for until, sure in rows.items():
        assert expected_rows([LoggedRows(0, 0, **given)], until) == sure, until
        written = {3, 6, 9, 12, 15, 18} | {5, 10, 12, 14, 16, 18, 20}
        found = sum(step <= until for step in written)
        assert found - sure in (0, 1), until
    assert expected_rows([LoggedRows(12, 6, **given)], 18) == 10
    assert runs.train(config, tmp_path / "run", "--until=13") == 75
    assert len([*iterate_metrics(tmp_path / "run")]) == 6


def test_a_trial_of_a_wave_that_lacks_the_row_of_an_evaluation_is_damaged(tmp_path):
    experiment: Any = SimpleNamespace(log_every=10, eval_every={0: 6, 12: 3}, first_step=0)
    steps = [6, 10, 12, 15, 18, 20, 21]
    for lost in (None, 6, 15):
        lines = [json.dumps({"step": step}) + "\n" for step in steps if step != lost]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        if lost is None:
            check_rows(tmp_path, 21, experiment)
        else:
            with pytest.raises(DamagedFile, match=f"lacks 1 row, such as that of step {lost}"):
                check_rows(tmp_path, 21, experiment)


@pytest.mark.usefixtures("lab")
def test_the_plan_says_when_a_run_is_evaluated(tmp_path, capsys):
    config = runs.write_config(tmp_path, CHANGING)
    assert runs.main(["explain", *runs.files(config), "--vocabulary=unruly"]) == 0
    text = capsys.readouterr().out
    assert "evaluated every 5 steps, from step 12 on every 2, and after the last step" in text


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0", "eval_every must be at least 1, got 0."),
        ("{0: 5, '60%': 0}", "the interval, at least 1, and has 12: 0."),
        ("{-1: 5}", "at least 0, to the interval, at least 1, and has -1: 5."),
        ("{5: 3}", "no interval from the first step on: it begins with step 5. Add an interval"),
        ("{}", "must be a number of steps, or a mapping such as {0: 125, 90%: 25}, got {}."),
        ("{0: 5, '60 parts': 2}", "60 parts"),
        ("{12: 5, '60%': 2}", "Two keys of 'eval_every' are 12. Remove one."),
    ],
)
def test_wrong_intervals_are_refused(tmp_path, capsys, given, said):
    config = runs.write_config(tmp_path, f"experiment.eval_every = {given}\n")
    assert said in " ".join(runs.said(capsys, config, tmp_path / "run", code=2).split())
