"""Published logs of modded-nanogpt's optimizer track: which runs a row has, and its rule."""

import math
from pathlib import Path

import pytest
from scipy import stats

from tests import runs
from trainer.studies.track3 import RULE, TrackRow, read_track, track_lines

HEAD = """# A track

| # | Steps to 3.28 | Evidence | Description | Date | Log | Contributors |
| - | - | - | - | - | - | - |
"""
SOURCE = "print0(f'step:{step}/{steps} val_loss:{loss:.5f}')\n" + "=" * 20 + "\n"


def row(number: int, step: str, evidence: str, log: str) -> str:
    return f"| {number} | {step} | {evidence} | [Muon](https://a.b) | date | [log]({log}) | x |\n"


def log(losses: dict[int, float], total: int = 300, more: str = "") -> str:
    lines = [
        f"step:{step}/{total} val_loss:{loss:.5f}{more} train_time:1.0s step_avg:2.00ms\n"
        for step, loss in losses.items()
    ]
    return SOURCE + "step:1/300 train_time:0.5s step_avg:2.00ms\n" + "".join(lines)


def track(folder: Path, rows: str, logs: dict[str, str]) -> list[TrackRow]:
    (folder / "README.md").write_text(HEAD + rows)
    for name, text in logs.items():
        file = folder / "results" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_track(folder)


def test_a_row_is_judged_by_the_z_test_of_its_runs(tmp_path: Path) -> None:
    losses = [3.2785, 3.2771, 3.2780, 3.2765]
    logs = {f"a/{n}.txt": log({0: 10.8, 275: x + 0.0026, 300: x}) for n, x in enumerate(losses)}
    (found,) = track(tmp_path, row(1, "300(!)", "3.2775 (n=4)✓", "results/a/0.txt"), logs)
    mean = math.fsum(losses) / 4
    z = (3.28 - mean) / (0.0013 / 2)
    assert found.mean == pytest.approx(mean) and found.runs == 4 and not found.faults
    assert found.statistic / RULE.sigma == pytest.approx(z)  # type: ignore[operator]
    assert found.passes == (stats.norm.sf(z) <= 0.001) and found.passes
    assert found.earliest == 300  # after 275 steps the mean is no better than 3.28
    assert any("1 of 1 result pass by their logs" in line for line in track_lines([found]))


def test_a_mean_that_is_not_better_by_the_margin_does_not_pass(tmp_path: Path) -> None:
    rows = row(1, "300", "3.2777 (n=1)Ⓧ", "results/one.txt")
    (found,) = track(tmp_path, rows, {"one.txt": log({300: 3.2777}), "two.txt": log({300: 3.0})})
    assert found.runs == 1 and not found.passes and found.earliest is None and not found.faults


def test_logs_of_one_run_count_once_and_a_file_may_have_several(tmp_path: Path) -> None:
    first, second = {100: 3.3, 200: 3.2781, 300: 3.2771}, {100: 3.31, 200: 3.2783, 300: 3.2773}
    both = log(first) + log(second)
    logs = {"a/both.txt": both, "a/stdout/0.out": log({200: 3.2781, 300: 3.2771})}
    (found,) = track(tmp_path, row(1, "300", "3.2772 (n=2)✓", "results/a/both.txt"), logs)
    assert found.runs == 2 and found.mean == pytest.approx(3.2772) and not found.faults


def test_what_differs_from_the_table_is_said(tmp_path: Path) -> None:
    rows = row(1, "300", "3.2760 (n=3)✓", "results/a/0.txt")
    rows += row(2, "250", "3.2770 (n=2)✓", "results/b/README.md")
    rows += row(3, "300", "3.2771 (n=1)✓", "results/c/0.txt")
    rows += row(4, "300", "3.2750 (n=1)✓", "results/d/0.txt")
    logs = {
        "a/0.txt": log({200: 3.3, 300: 3.277}),
        "a/1.txt": log({200: 3.3})[:-20],  # was cut before its last evaluation
        "b/README.md": "step 250 is reached",
        "c/0.txt": log({300: 3.2821}, more=" val_ema_loss:3.27710"),
        "d/0.txt": log({300: math.nan}),
    }
    first, second, third, fourth = track(tmp_path, rows, logs)
    assert first.faults == (
        "The table has 3 runs, and there are logs of 1 with the loss after 300 steps.",
        "The table has the mean 3.2760, and that of the logs is 3.27700.",
    )
    assert second.mean is None and "logs of 0" in second.faults[0]
    assert third.faults == ("The mean of the table is that of val_ema_loss; val_loss is 3.28210.",)
    assert third.mean == pytest.approx(3.2771)
    assert fourth.mean == math.inf and not fourth.passes
    said = "\n".join(track_lines([first, second, third, fourth]))
    assert "no logs" in said and "0 of 4 results pass" in said


def test_the_command_refuses_what_is_no_track(tmp_path: Path, capsys) -> None:
    assert "not the folder of the track" in runs.refused(
        capsys, "challenge", "import", "track3", tmp_path
    )
    logs = {"a/0.txt": log({300: 3.27})}
    track(tmp_path, row(7, "300", "3.2700 (n=1)✓", "results/a/0.txt"), logs)
    said = runs.printed(capsys, "challenge", "import", "track3", tmp_path)
    assert "Of a single run, whose seed may be the best of several: 7." in said
