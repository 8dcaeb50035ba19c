"""Times to targets and AlgoPerf's scores, compared with AlgoPerf's own.

Its published results are in ../shared/algoperf beside the checkout, or in the folder that
ALGOPERF_RESULTS names.
"""

import csv
import json
import os
from math import inf
from pathlib import Path

import numpy as np
import pytest

from tests.runs import ROOT
from trainer.report.statistics.scores import (
    Speedup,
    algoperf_score,
    leave_one_out,
    performance_profile,
    speedups,
    steps_to_target,
)

RESULTS = Path(os.environ.get("ALGOPERF_RESULTS") or ROOT.parent / "shared" / "algoperf")

needs_results = pytest.mark.skipif(
    not RESULTS.is_dir(), reason=f"AlgoPerf's results are not in {RESULTS}"
)

BASE = [
    "criteo1tb",
    "fastmri",
    "imagenet_resnet",
    "imagenet_vit",
    "librispeech_conformer",
    "librispeech_deepspeech",
    "ogbg",
    "wmt",
]


def rows(name: str) -> list[dict[str, str]]:
    with open(RESULTS / name, newline="") as file:
        return list(csv.DictReader(file))


def qualified(times: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the table of the base workloads [arm, workload] by the rules of AlgoPerf 0.5.

    A time over four times the best is a miss, and a miss on the held-out variant of a workload is
    one on the workload, and the other way round.
    """
    held_out = {name: max((b for b in BASE if name.startswith(b)), key=len) for name in times}
    held_out = {name: base for name, base in held_out.items() if name != base}
    times = dict(times)
    for name, base in held_out.items():
        times[name] = np.where(np.isinf(times[base]), inf, times[name])
    times = {name: np.where(row > 4 * row.min(), inf, row) for name, row in times.items()}
    for name, base in held_out.items():
        times[base] = np.where(np.isinf(times[name]), inf, times[base])
    return np.stack([times[name] for name in BASE], axis=1)


def medians() -> tuple[list[str], dict[str, np.ndarray]]:
    table = rows("time_to_targets.csv")
    names = [name for name in table[0] if name != "submission"]
    times = {name: np.array([float(row[name] or inf) for row in table]) for name in names}
    return [row["submission"] for row in table], times


@needs_results
def test_the_scores_of_algoperf_are_the_published_ones() -> None:
    submissions, times = medians()
    published = {row["submission"]: float(row["score"]) for row in rows("scores.csv")}
    assert len(published) == 11
    scores = dict(zip(submissions, algoperf_score(qualified(times)), strict=True))
    assert scores == pytest.approx(published, abs=2e-15, rel=0)


@needs_results
def test_withdrawing_a_submission_to_algoperf_swaps_the_first_two_ranks() -> None:
    submissions, times = medians()
    gone = submissions.index("caspr_adaptive")
    shampoo = submissions.index("shampoo_submission")
    free = submissions.index("schedule_free_adamw")
    scores = algoperf_score(qualified(times))
    assert scores[[shampoo, free]] == pytest.approx([0.778, 0.708], abs=5e-4)
    # Its rules know a withdrawn submission no more when they look for times over four times the
    # best, so that the table is made again.
    rest = {name: np.delete(row, gone) for name, row in times.items()}
    scores = np.insert(algoperf_score(qualified(rest)), gone, np.nan)
    assert scores[[shampoo, free]] == pytest.approx([0.802, 0.811], abs=5e-4)
    # By the times to the targets of the base workloads alone, leave_one_out is all it takes.
    table = np.stack([times[name] for name in BASE], axis=1)
    rest = np.stack([rest[name] for name in BASE], axis=1)
    without = leave_one_out(table)[gone]
    assert np.isnan(without[gone])
    assert np.delete(without, gone).tolist() == algoperf_score(rest).tolist()
    assert (np.delete(without - algoperf_score(table), gone) > 0.01).any()


@needs_results
def test_the_scores_of_algoperf_from_trials() -> None:
    trials = json.loads((RESULTS / "trials_v06.json").read_text())

    def time(submission: str, workload: str) -> float:
        studies = trials[f"{submission}/{workload}"].values()
        fastest = [min(inf if t is None else t for t in study.values()) for study in studies]
        return float(np.median(fastest))

    submissions = sorted({key.split("/")[0] for key in trials})
    assert len(submissions) == 2 and submissions[0] == "baseline"
    table = [[time(submission, workload) for workload in BASE] for submission in submissions]
    assert algoperf_score(table) == pytest.approx([0.4590, 0.6244], abs=5e-5)
    assert algoperf_score(table, points=None) == pytest.approx([0.4580, 0.6239], abs=5e-5)


# The second arm takes 2 and 3 times as long; the third misses one target and ties on the other.
TIMES = [[10.0, 20.0], [20.0, 60.0], [inf, 20.0]]


def test_profile_and_score_of_a_table_done_by_hand() -> None:
    profile = performance_profile(TIMES, [1.0, 2.0, 2.9, 3.0])
    assert profile.tolist() == [[1, 1, 1, 1], [0, 0.5, 0.5, 1], [0.5, 0.5, 0.5, 0.5]]
    exact = algoperf_score(TIMES, points=None)
    assert exact == pytest.approx([1.0, ((4 - 2) / 3 + (4 - 3) / 3) / 2, 0.5])
    # The rule of 100 points is off by no more than half a step for each workload.
    assert np.abs(algoperf_score(TIMES) - exact).max() <= 0.5 / 99 + 1e-12
    fine = algoperf_score(TIMES, points=100_001)
    assert fine == pytest.approx(exact, abs=1e-5)
    assert algoperf_score(TIMES, r_max=2.0, points=None).tolist() == [1.0, 0.0, 0.5]


def test_a_workload_that_no_arm_solves_counts_for_none() -> None:
    assert algoperf_score([[1.0, inf], [2.0, inf]], points=None) == pytest.approx([0.5, 1 / 3])
    assert performance_profile([[inf]], [1.0, 1e9]).tolist() == [[0.0, 0.0]]


def test_leaving_an_arm_out_scores_the_others_among_themselves() -> None:
    left = leave_one_out(TIMES, points=None)
    assert set(left) == {0, 1, 2}
    expected = [np.nan, 0.5 * 1 + 0.5 * (4 - 3) / 3, 0.5]
    np.testing.assert_allclose(left[0], expected)
    np.testing.assert_allclose(left[2], [1.0, 0.5, np.nan])
    assert leave_one_out([[1.0, 2.0]]) == {}


def test_speedups_are_geometric_means_and_count_misses() -> None:
    result = speedups(TIMES)
    assert len(result) == 6
    assert result[0, 1].factor == pytest.approx(6**0.5)
    assert result[1, 0].factor == pytest.approx(6**-0.5)
    assert result[0, 1] == Speedup(result[0, 1].factor, 2, 0, 0, 0)
    assert result[2, 1] == Speedup(pytest.approx(3.0), 1, 0, 1, 0)
    assert result[1, 2] == Speedup(pytest.approx(1 / 3), 1, 1, 0, 0)
    assert speedups([[inf, 1.0], [inf, inf]])[0, 1] == Speedup(None, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("values", "target", "better", "step"),
    [
        ([3.0, 2.0, 1.0, 0.5], 1.0, "min", 30.0),  # an equal value reaches it
        ([3.0, 0.9, 2.0, 0.5], 1.0, "min", 20.0),  # the first counts, though it is left again
        ([3.0, 2.0, 1.5, 1.1], 1.0, "min", inf),
        ([0.1, 0.8, 0.7, 0.9], 0.8, "max", 20.0),
        ([np.nan, inf, -inf, 0.0], 0.5, "min", 30.0),
        ([np.nan] * 4, 0.5, "max", inf),
    ],
)
def test_the_first_evaluation_that_reaches_a_target(
    values: list[float], target: float, better: str, step: float
) -> None:
    assert steps_to_target([10, 20, 30, 40], values, target, better) == step


def test_a_run_without_evaluations_misses_its_target() -> None:
    assert steps_to_target([], [], 0.1) == inf


@pytest.mark.parametrize("bad", [[], [1.0, 2.0], [[1.0, np.nan]], [[1.0, 0.0]], [[-1.0]], [[]]])
def test_what_is_no_table_of_times_is_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="table \\[arm, workload\\] of positive numbers"):
        algoperf_score(bad)


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="r_max must be over 1, got 1"):
        algoperf_score(TIMES, r_max=1.0)
    with pytest.raises(ValueError, match="2 steps and 1 values"):
        steps_to_target([1, 2], [0.1], 0.1)
    with pytest.raises(ValueError, match="'min' or 'max', got 'least'"):
        steps_to_target([1], [0.1], 0.1, "least")
