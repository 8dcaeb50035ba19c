"""What a report concludes from results, against known answers and with results that lack things."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report_cases import RATE, curve, run, workload
from trainer.report.comparison import make_report
from trainer.report.document import Block, Report
from trainer.report.pairs import compare_arms, standings
from trainer.report.results import Goal, Space, Workload
from trainer.report.spaces import axes_of
from trainer.report.verdict import verdict

# Student's sleep data (Cushny and Peebles 1905): hours of extra sleep of ten patients under two
# drugs. R's t.test(extra ~ group, paired = TRUE): t = -4.0621, df = 9, p-value = 0.002833, interval
# -2.4598858 to -0.7001142, mean of the differences -1.58.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
LARGER = Goal("loss", "max", "validation", "test")


def judged(work: Workload) -> str:
    return verdict(work, compare_arms(work))


def block(report: Report, panel: str, index: int = 0) -> Block:
    return next(each for each in report.panels if each.name == panel).blocks[index]


def reported(*works: Workload) -> Report:
    return make_report(works, Path("/nowhere/report"))


def test_the_verdict_has_the_numbers_of_students_sleep_data():
    work = workload({"drug_1": DRUG_1, "drug_2": DRUG_2}, goal=LARGER)
    (pair,) = compare_arms(work)
    assert (pair.better, pair.worse, pair.n) == ("drug_2", "drug_1", 10)
    assert pair.difference.value == pytest.approx(1.58)
    assert pair.difference.low == pytest.approx(0.7001142, abs=1e-7)
    assert pair.difference.high == pytest.approx(2.4598858, abs=1e-7)
    assert pair.p == pytest.approx(0.002833, abs=1e-6)
    assert judged(work) == (
        "drug_2 is better than drug_1: its mean loss on the test split is larger by 1.58 (95%"
        " interval 0.7001 to 2.46; paired t test over 10 seeds, p = 0.0028)."
    )


def test_a_smaller_value_is_better_where_the_goal_says_so():
    work = workload({"drug_1": DRUG_1, "drug_2": DRUG_2})
    assert judged(work) == (
        "drug_1 is better than drug_2: its mean loss on the test split is smaller by 1.58 (95%"
        " interval 0.7001 to 2.46; paired t test over 10 seeds, p = 0.0028)."
    )


def test_runs_of_different_seeds_are_not_paired():
    # R's t.test(extra ~ group): t = -1.8608, df = 17.776, p-value = 0.07939, -3.3654832, 0.2054832.
    seeds = {"drug_1": 0, "drug_2": 100}
    work = workload({"drug_1": DRUG_1, "drug_2": DRUG_2}, first_seed=seeds, goal=LARGER)
    (pair,) = compare_arms(work)
    assert pair.p == pytest.approx(0.07939, abs=1e-5)
    assert pair.difference.low == pytest.approx(-0.2054832, abs=1e-6)
    text = judged(work)
    assert text.startswith("Not decided between drug_2 and drug_1. The mean loss on the test split")
    assert "larger by 1.58 (95% interval −0.2055 to 3.365; Welch's t test over 10 seeds" in text
    # A standardized effect of 1.58 / 1.8989 = 0.832: 24 a group (G*Power, two-sided, power 0.8).
    assert "About 24 seeds would decide" in text


def test_p_values_of_several_pairs_are_corrected_by_holm():
    arms = {"a": [1.0, 1.1, 0.9, 1.05], "b": [1.2, 1.35, 1.05, 1.3], "c": [1.3, 1.32, 1.24, 1.41]}
    pairs = compare_arms(workload(arms))
    assert [(pair.better, pair.worse) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    ordered = sorted(pair.p for pair in pairs)
    steps = [3 * ordered[0], 2 * ordered[1], ordered[2]]
    expected = [max(steps[: index + 1]) for index in range(3)]
    assert sorted(pair.corrected for pair in pairs) == pytest.approx(expected)


def test_one_seed_has_no_interval():
    text = judged(workload({"a": [1.0], "b": [2.0]}))
    assert text == (
        "Not decided between a and b. The mean loss on the test split of a is smaller by 1 (no test"
        " with 1 seed). At least two seeds are needed for an interval, and six for a test by signs."
    )
    report = reported(workload({"a": [1.0], "b": [2.0]}))
    assert "a has one seed, so that there is no interval for it." in block(report, "arms").warnings


def test_an_arm_with_runs_that_diverged_does_not_win():
    # The finite runs of b are better than all of a.
    work = workload({"a": [2.0] * 7 + [2.1], "b": [1.0, 1.1, 0.9, 1.0, None, None, None, None]})
    assert [each.arm for each in standings(work)] == ["a", "b"]
    assert math.isinf(standings(work)[1].mean.value)
    text = judged(work)
    assert "b is better" not in text
    (warning,) = [line for line in block(reported(work), "arms").warnings if "4 compared" in line]
    assert warning.startswith("b has 4 compared runs of 8 without a finite value")


def test_ranks_decide_who_is_better_where_runs_have_no_value():
    # One divergence leaves a without a mean, and yet it is better in 11 of 12 seeds.
    work = workload({"a": [0.50 + 0.001 * k for k in range(11)] + [None], "b": [0.8] * 11 + [0.81]})
    (pair,) = compare_arms(work)
    assert (pair.better, pair.worse, pair.decided) == ("a", "b", True)
    assert judged(work) == (
        "Not decided between b and a. The mean of b is the best, but not on the 12 compared seeds."
        " The runs of a rank better, where one without a value is the worst (Wilcoxon signed-rank"
        " test over 12 seeds, p = 0.034)."
    )
    assert math.isnan(pair.difference.value) and pair.needed is None


def test_the_better_of_two_arms_is_better_on_the_compared_seeds():
    # Over all seeds a has the smaller mean, but on the seeds that both have b does.
    a = [1.0, 1.01, 1.005, 0.1, 0.11, 0.12, 0.1]
    work = workload({"a": a, "b": [0.8, 0.801, 0.802]})
    (pair,) = compare_arms(work)
    assert (pair.better, pair.n) == ("b", 3) and pair.difference.value < 0
    text = judged(work)
    assert "The mean of a is the best, but not on the 3 compared seeds." in text
    assert "a is better" not in text


def test_equal_arms_and_constant_differences():
    text = judged(workload({"a": [1.0] * 8, "b": [1.0] * 8}))
    assert "is equal to that of b" in text and "would decide" not in text
    text = judged(workload({"a": [0.9] * 8, "b": [0.8] * 8}, goal=LARGER))
    assert text.startswith("a is better than b: its mean loss on the test split is larger by 0.1 (")
    assert "without a value" not in text


def test_seeds_that_would_decide_hold_at_the_corrected_level():
    one = workload({"a": [1.0, 1.2, 0.9, 1.1], "b": [1.1, 1.15, 1.05, 1.2]})
    two = workload({"a": [1.0, 1.2, 0.9, 1.1], "b": [1.1, 1.15, 1.05, 1.2], "c": [9.0] * 4})
    single, among_three = (compare_arms(work)[0].needed for work in (one, two))
    assert single is not None and among_three is not None and among_three > single


def test_every_trial_diverged():
    work = workload({"a": []}, {"a": [(0.1, None), (1.0, None)]}, winners={})
    assert judged(work) == "Not decided: no trial has a value (2 diverged and 0 failed)."
    report = reported(work)
    assert "Every trial of a diverged (2)." in block(report, "ledger").warnings


def test_an_arm_that_lacks_the_metric_is_named():
    work = workload({"a": [1.0, 1.1], "b": [1.0, 1.2]})
    lacking = tuple(replace(r, metrics={}) if r.arm == "b" else r for r in work.finals)
    report = reported(replace(work, finals=lacking))
    assert any(
        line.startswith("No run of b has the metric 'eval/loss'")
        for line in block(report, "arms").warnings
    )


def test_a_target_that_nobody_met():
    goal = Goal("loss", "min", "validation", "test", target=0.001)
    report = reported(workload({"a": [1.0, 1.1], "b": [1.2, 1.3]}, goal=goal))
    found = block(report, "target")
    assert found.warnings == ("No run met the target 0.001.",)
    assert [row[:3] for row in found.tables[0].rows] == [("a", 0, 2), ("b", 0, 2)]


def test_steps_and_time_to_a_target():
    goal = Goal("loss", "min", "validation", "test", target=1.0)
    work = workload({"a": [0.5, 0.6, 3.0], "b": [0.7, 0.8, 0.9]}, goal=goal)
    work._curves["final/a/2"] = curve([10, 20, 100], [2.0, 1.5, 3.0])
    rows = block(reported(work), "target").tables[0].rows
    # arm, met, missed, median, least and most steps, median seconds at 0.1 s a step
    assert rows[0][:7] == ("a", 2, 1, 20.0, 20.0, 20.0, 2.0)
    assert rows[1][:7] == ("b", 3, 0, 20.0, 20.0, 20.0, 2.0)


def test_sensitivity_to_the_learning_rate_is_that_of_the_paper():
    # FACTS of arXiv:2309.14322's definition: 1.2 for these losses and an initial loss of 10.
    losses = [3.2, 3.1, 3.0, 3.0, 3.1, 4.0, None]
    points = [(10.0 ** (-4 + index * 0.5), loss) for index, loss in enumerate(losses)]
    work = workload({"a": [3.0, 3.1]}, {"a": points})
    for each in work.trials:
        work._curves[each.name] = curve([0, 100], [10.0, 3.0])
    row = block(reported(work), "learning_rate").tables[0].rows[0]
    assert row[:2] == ("a", "matrices.learning_rate") and row[6] == 1
    assert row[7] == pytest.approx(1.2)


def test_sensitivity_is_a_mean_over_seeds():
    # Seed 0: (1 + 0 + 1) / 3, seed 1: (0 + 1 + 2) / 3. Of the mean losses it would be 0.5.
    losses = {0: [2.0, 1.0, 2.0], 1: [1.0, 2.0, 3.0]}
    work = workload({"a": [3.0, 3.1]}, {"a": [(0.01, 1.0)]})
    rates = [0.01, 0.1, 1.0]
    trials = [
        replace(
            work.trials[0],
            name=f"trials/a/{number}/{seed}",
            seed=seed,
            number=number,
            values={RATE: rates[number]},
            metrics={"validation/loss": loss},
        )
        for seed, each in losses.items()
        for number, loss in enumerate(each)
    ]
    for each in trials:
        work._curves[each.name] = curve([0, 100], [10.0, 3.0])
    row = block(reported(replace(work, trials=tuple(trials))), "learning_rate").tables[0].rows[0]
    assert row[7] == pytest.approx((2 / 3 + 1) / 2)


def test_the_best_of_k_trials_is_the_u_statistic():
    points = [(0.001 * k, float(k)) for k in range(1, 6)]
    goal = Goal("loss", "max", "validation", "test")
    work = workload({"a": [5.0, 5.0]}, {"a": points}, goal=goal)
    (figure,) = block(reported(work), "tuning").figures
    assert [row[2] for row in figure.table.rows] == pytest.approx([3, 4, 4.5, 4.8, 5])


def test_the_best_point_at_an_edge_of_the_space_is_warned_about():
    points = [(10.0**k, 1.0 - 0.1 * k) for k in range(-4, 1)]
    work = workload({"a": [1.0, 1.1]}, {"a": points})
    (warning,) = block(reported(work), "learning_rate").warnings
    assert warning.startswith("The best matrices.learning_rate of a, 1, lies at the high edge")
    assert "space.log_uniform {low: 0.0001, high: 10}" in warning
    assert "python -m trainer sweep extend /nowhere --config=FILE" in warning


def test_points_are_connected_only_along_a_single_axis():
    points = [(0.01, 1.0), (0.1, 0.9), (1.0, 1.2)]
    work = workload({"a": [1.0, 1.1]}, {"a": points})
    (figure,) = block(reported(work), "learning_rate").figures
    assert "line" in [series.kind for series in figure.series]
    # The same with a second axis that is not a number.
    trials = [
        replace(trial, values={**trial.values, "nesterov": index % 2 == 0})
        for index, trial in enumerate(work.trials)
    ]
    (figure,) = block(reported(replace(work, trials=tuple(trials))), "learning_rate").figures
    assert "line" not in [series.kind for series in figure.series]


@pytest.mark.parametrize(
    ("losses", "shown"),
    [
        ([1.7, 1.6, 1.8], False),  # 5.5 would flatten these
        ([1.7, 1.6, 3.7], True),
        ([1.7, 1.6, None], True),  # drawn at the initial value
        ([1.7, 1.6, 9.0], True),
    ],
)
def test_the_initial_value_is_drawn_unless_it_flattens_the_points(losses, shown):
    points = [(10.0**k, loss) for k, loss in enumerate(losses)]
    work = workload({"a": [1.0, 1.1]}, {"a": points})
    for each in work.trials:
        work._curves[each.name] = curve([0, 100], [5.5, 3.0])
    (figure,) = block(reported(work), "learning_rate").figures
    assert ("rule" in [series.kind for series in figure.series]) == shown
    assert ("The initial value, 5.5, lies outside." in figure.description) != shown


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("uniform 0.8 to 0.99", [0.8, 0.9, 0.99], "space.uniform {low: 0.8, high: 1}"),
        ("integers 8 to 32", [32.0, 16.0, 8.0], "space.integers {low: 0, high: 32}"),
        ("log_uniform 0.01 to 1", [1.0, 0.1, 0.001], "lies at the low edge"),
    ],
)
def test_a_wider_space_has_values_that_arguments_may_have(text, values, said):
    # The last point is the best.
    points = [(value, 1.0 - 0.1 * index) for index, value in enumerate(values)]
    spaces = {"a": Space("grid", {RATE: text})}
    work = workload({"a": [1.0, 1.1]}, {"a": points}, spaces=spaces)
    (warning,) = block(reported(work), "learning_rate").warnings
    assert said in warning


def test_the_ledger_counts():
    work = workload({"a": [1.0, 1.1]}, {"a": [(0.1, 1.0), (0.2, None), (0.3, 2.0)]})
    trials = list(work.trials)
    trials[0] = replace(trials[0], retries=2)
    trials[2] = replace(trials[2], end="missing", step=0, metrics={})
    report = reported(replace(work, trials=tuple(trials)))
    row = block(report, "ledger").tables[0].rows[0]
    # arm, which, runs, done, diverged, failed, missing, retried, steps, FLOPs
    assert row[:10] == ("a", "search", 3, 1, 1, 0, 1, 1, 200, 2e8)


def test_budgets_that_may_be_unequal_are_named():
    work = workload({"a": [1.0], "b": [2.0]}, {"a": [(0.1, 1.0)], "b": [(0.1, 2.0)]})
    assert not block(reported(work), "ledger").warnings
    (warning,) = block(reported(replace(work, budgets="unequal")), "ledger").warnings
    assert warning.startswith("The file of the sweep allows the arms unequal budgets")


def test_sweeps_with_different_goals_are_judged_apart():
    a = workload({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3]}, name="one")
    b = replace(a, name="two", goal=Goal("loss", "max", "validation", "validation"))
    report = reported(a, b)
    assert [text.split(":")[0] for text in report.verdict] == ["one", "two"]
    warnings = " ".join(block(report, "verdict").warnings)
    assert "The sweeps have different goals (one loss and two loss)" in warnings
    assert "The sweeps report on different splits (one test and two validation)." in warnings


def test_scores_across_two_workloads():
    goal = Goal("loss", "min", "validation", "test", target=1.0)
    works = [workload({"a": [0.5], "b": [0.5]}, name=name, goal=goal) for name in ("one", "two")]
    for work, (a, b) in zip(works, ((10, 20), (40, 10)), strict=True):
        work._curves["final/a/0"] = curve([a, 100], [0.9, 0.5])
        work._curves["final/b/0"] = curve([b, 100], [0.9, 0.5])
    found = block(reported(*works), "workloads")
    times, scores, pairs = found.tables
    assert times.rows == (("a", 1.0, 4.0), ("b", 2.0, 1.0))
    # Ratios (1, 4) and (2, 1): the exact integrals are (3 + 0) / 2 / 3 and (2 + 3) / 2 / 3.
    assert [row[1] for row in scores.rows] == pytest.approx([0.5, 5 / 6], abs=0.02)
    (row,) = pairs.rows
    assert row[:2] == ("a", "b") and row[2] == pytest.approx(math.sqrt(2 * 0.25))


def test_targets_that_no_arm_meets_leave_scores_of_zero():
    goal = Goal("loss", "min", "validation", "test", target=0.01)
    works = [workload({"a": [0.5], "b": [0.5]}, name=name, goal=goal) for name in ("one", "two")]
    _, scores, _ = block(reported(*works), "workloads").tables
    assert [row[1] for row in scores.rows] == [0.0, 0.0]


def test_an_unfinished_sweep_says_what_is_missing():
    work = workload({"a": [], "b": []}, {"a": [(0.1, 1.0)], "b": [(0.1, 2.0)]})
    sentence = "The winners have not been chosen: when the search is complete, each runs again."
    report = reported(replace(work, missing=(sentence,)))
    assert report.verdict == ("Not decided: the winners have not run on fresh seeds yet.",)
    assert sentence in block(report, "verdict").warnings
    assert report.trials[0].table.rows  # what there is, is shown


def test_axes_have_short_names_that_differ():
    work = workload({"a": [], "b": []}, {"a": [], "b": []}, spaces={})

    def named(**arms: list[str]) -> list[str]:
        spaces = {arm: Space("grid", dict.fromkeys(p, "uniform 0 to 1")) for arm, p in arms.items()}
        return list(axes_of([replace(work, spaces=spaces)]).values())

    rate = "optimizer.groups.x.optimizer.learning_rate"
    other = "optimizer.groups.y.optimizer.learning_rate"
    assert named(a=[rate, other, "optimizer.b2"]) == ["x.learning_rate", "y.learning_rate", "b2"]
    # A schedule's peak and a constant rate are one axis of two arms, but two axes of one arm.
    peak = f"{rate}.peak_value"
    assert named(a=[rate], b=[peak]) == ["x.learning_rate", "x.learning_rate"]
    assert named(a=[rate, peak]) == [rate, peak]


def test_runs_with_other_conditions_are_named():
    work = workload({"a": [1.0, 1.1]})
    finals = [
        replace(each, fingerprint={"jax": version, "seed": each.seed})
        for each, version in zip(work.finals, ("0.10.2", "0.12.0"), strict=True)
    ]
    report = reported(replace(work, finals=tuple(finals)))
    (warning,) = block(report, "verdict").warnings
    assert warning == (
        "The runs were made under different conditions. jax: 0.10.2 (final runs of a); 0.12.0"
        " (final runs of a)."
    )


def test_a_run_that_is_missing_is_not_compared():
    work = workload({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]})
    finals = list(work.finals)
    finals[5] = replace(finals[5], end="missing", metrics={})
    partial = replace(work, finals=tuple(finals))
    assert judged(partial).startswith("So far: ")
    assert len(standings(partial)[1].values) == 2
    assert run("x", "a", 0, None).value("eval/loss") is None
