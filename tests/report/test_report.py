"""What a report concludes from results, against known answers and with results that lack things."""

import math
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.report_cases import RATE, changed, curve, run, workload
from trainer import config as configs
from trainer.config import Call
from trainer.report.comparison import make_report
from trainer.report.conditions import changed_code, conditions
from trainer.report.document import Block, Report
from trainer.report.pairs import compare_arms, standings
from trainer.report.results import ArmSpace, ReportGoal, Result, Revision, Workload, axes_of
from trainer.report.statistics.decide import e_of_t
from trainer.report.verdict import verdict
from trainer.writers.summary import Summary

# Student's sleep data (Cushny and Peebles 1905): hours of extra sleep of ten patients under two
# drugs. R's t.test(extra ~ group, paired = TRUE): t = -4.0621, df = 9, p-value = 0.002833, interval
# -2.4598858 to -0.7001142, mean of the differences -1.58.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
LARGER = ReportGoal("loss", "max", "validation", "test")


def judged(work: Workload) -> str:
    return verdict(work, compare_arms(work))


def block(report: Report, panel: str, index: int = 0) -> Block:
    return next(each for each in report.panels if each.name == panel).blocks[index]


def reported(*works: Workload) -> Report:
    return make_report(works, Path("/nowhere/report"))


SEARCHED = {
    arm: [(0.001 * (n + 1), 1.0) for n in range(12)] for arm in ("drug_1", "drug_2", "drug_3")
}
NOT_SHOWN = (
    " One search an arm does not show that drug_2 is better than drug_1: other trials may find"
    " other configurations; `searches: 6` would tell."
)


def typical(units: str, n: int, share: str, arms: str = "drug_2 and drug_1") -> str:
    """Returns what a claim says of rare failures and other test sets, where neither is known."""
    return (
        f" This is about typical {units}: none of the {n} of an arm diverged, and up to {share} of"
        f" its {units} may. Whether one collapsed is not known, because the loss on the test split"
        f" before the first step is not. Runs of {arms} have no results on single test examples, so"
        " that nothing can be said about another test set."
    )


def test_the_verdict_has_the_numbers_of_students_sleep_data():
    searched = {arm: SEARCHED[arm] for arm in ("drug_1", "drug_2")}
    work = workload({"drug_1": DRUG_1, "drug_2": DRUG_2}, searched, goal=LARGER)
    (pair,) = compare_arms(work)
    assert (pair.better, pair.worse, pair.n, pair.looks) == ("drug_2", "drug_1", 10, (10,))
    assert pair.difference == pytest.approx(1.58)
    # R's p-value times 1.25; and its interval at the level 0.96.
    assert pair.p == pytest.approx(1.25 * 0.002833, abs=1e-6)
    half = (2.4598858 - 0.7001142) / 2 / 2.2621572 * 2.3984410  # qt(.975, 9) and qt(.98, 9)
    assert (pair.low, pair.high) == pytest.approx((1.58 - half, 1.58 + half), abs=1e-6)
    assert judged(work) == (
        "The configuration found for drug_2 (best of 12 trials) is better than that found for"
        " drug_1: its mean loss on the test split is larger by 1.58, 1.3 standard deviations"
        " (simultaneous 95% interval 0.6471 to 2.513; paired t test over 10 seeds, p = 0.0035"
        " adjusted for all looks), on this data set and model."
        + typical("seeds", 10, "26%")
        + NOT_SHOWN
    )


def test_a_smaller_value_is_better_where_the_goal_says_so():
    work = workload({"drug_1": DRUG_1, "drug_2": DRUG_2})
    assert judged(work) == (
        "The configuration of drug_1 is better than that of drug_2: its mean loss on the test split"
        " is smaller by 1.58, 1.3 standard deviations (simultaneous 95% interval 0.6471 to 2.513;"
        " paired t test over 10 seeds, p = 0.0035 adjusted for all looks), on this data set and"
        " model."
        + typical("seeds", 10, "26%", "drug_1 and drug_2")
        + " Nothing was searched for: this does not show that drug_1 is better than drug_2 with"
        " other hyperparameters."
    )


def test_a_difference_that_rounding_can_make_is_not_decided():
    """One optimizer that was written in two ways was better than itself, by 9e-07, p = 0.02."""
    draw = np.random.default_rng(0)
    values = 0.3 + 0.01 * draw.standard_normal(10)
    for size, decided in ((1e-6, False), (1e-5, True)):
        higher = values + size * (1 + 0.1 * draw.standard_normal(10))
        work = workload({"drug_1": list(values), "drug_2": list(higher)})
        (pair,), said = compare_arms(work), judged(work)
        assert pair.p is not None and pair.p < 1e-3
        assert (pair.decided, pair.rounding) == (decided, not decided)
        assert said.startswith("Not decided between") != decided
        assert ("less than 1e-05 of the values, which rounding can make" in said) != decided


def test_a_difference_of_rounding_is_equivalent_if_only_more_matters():
    """The same seeds with more noise were called equivalent, and these were not decided."""
    draw = np.random.default_rng(0)
    values = 0.3 + 0.01 * draw.standard_normal(10)
    higher = values + 1e-6 * (1 + 0.1 * draw.standard_normal(10))
    work = workload({"drug_1": list(values), "drug_2": list(higher)})
    work = replace(work, goal=replace(work.goal, relevant=0.02))
    (pair,), said = compare_arms(work), judged(work)
    assert pair.rounding and pair.relevance == "equivalent" and not pair.decided
    assert "are equivalent" in said and "Not decided" not in said


def several_searches(searches: int, trials: int = 4, shift: float = 0.0, **more: Any) -> Workload:
    """Returns a workload whose units are searches, with the sleep data as their values.

    `shift` is taken from the values of drug_2.
    """
    points = {arm: SEARCHED[arm][:trials] for arm in ("drug_1", "drug_2")}
    values = {"drug_1": DRUG_1[:searches], "drug_2": [x - shift for x in DRUG_2[:searches]]}
    work = workload(values, points, goal=LARGER, searches=searches, **more)
    return replace(work, finals=tuple(replace(run, search=run.seed) for run in work.finals))


def test_a_claim_about_arms_needs_several_searches():
    assert judged(several_searches(10)) == (
        "drug_2, best of 4 trials in its space, is better than drug_1, best of 4 in its space: its"
        " mean loss on the test split is larger by 1.58, 1.3 standard deviations (simultaneous 95%"
        " interval 0.6471 to 2.513; paired t test over 10 searches, p = 0.0035 adjusted"
        " for all looks), on this data set and model." + typical("searches", 10, "26%")
    )
    undecided = judged(several_searches(5, shift=1.0))
    assert undecided.startswith(
        "Not decided between drug_2 and drug_1, each the best of 4 trials in its space. The mean"
    )
    # G*Power: an effect of 1.79 has a power of 0.8 with 5 pairs at the level .04.
    assert (
        "With 5 searches, a difference of 1.8 standard deviations is found with a power of 0.8."
    ) in undecided


def test_searches_of_fewer_than_four_trials_make_no_claim_about_arms():
    text = judged(several_searches(10, trials=3))
    assert text.startswith("Nothing is said about the arms, because a search has 3 trials")
    assert "better" not in text and "p =" not in text
    (pair,) = compare_arms(several_searches(10, trials=3))
    assert pair.p is None and pair.low is None and not pair.decided


def test_a_search_is_the_mean_over_its_final_seeds():
    work = several_searches(3)
    twice = [
        changed(
            run,
            seed=run.seed + 100,
            metrics={"eval/loss": run.summary.metrics["eval/loss"] + 1.0},
        )
        for run in work.finals
    ]
    both = replace(work, finals=(*work.finals, *twice))
    means = [value + 0.5 for value in DRUG_1[:3]]
    assert list(both.units_of("drug_1").values()) == pytest.approx(means)
    unfinished = replace(both, finals=(*work.finals, changed(twice[0], end="missing"), *twice[1:]))
    assert list(unfinished.units_of("drug_1")) == [1, 2]


def test_runs_that_were_selected_are_not_tested():
    trials = {"a": [(0.1, 1.0), (0.2, 2.0)], "b": [(0.1, 3.0), (0.2, 2.0)]}
    work = workload({}, trials, arms=("a", "b"), goal=ReportGoal("loss", "min", "test", "test"))
    work = replace(work, finals=work.trials)
    assert judged(work).startswith("There is no test, because the compared runs are those on which")


def test_an_unfinished_sweep_has_means_and_no_test():
    work = workload(
        {"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]}, completed=0, units=(0, 1, 2, 3, 4)
    )
    assert judged(work) == (
        "Not judged yet: 3 of 5 seeds have ended in every arm. The mean loss on the test split: a"
        " 1.1, b 2.1."
    )
    (pair,) = compare_arms(work)
    assert (pair.p, pair.low, pair.needed, pair.improvement) == (None, None, None, None)
    page = reported(work)
    assert not any("p =" in sentence for sentence in page.verdict)


def revisions(*units: int, **new_winners: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a plan that was extended to these numbers of units."""
    made = tuple(
        Revision(
            number,
            "0" * 64,
            {},
            None if number == 1 else 5,
            number > 1,
            number > 1,
            arms=("a", "b"),
            units=count,
            new_winners=new_winners.get(f"revision_{number}", ()),
        )
        for number, count in enumerate(units, 1)
    )
    return {"revisions": made, "completed": len(units), "units": tuple(range(units[-1]))}


def test_seeds_that_were_added_after_a_look_are_judged_by_e_values():
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.0, 0.5, 12), rng.normal(0.75, 0.5, 12)
    values = {"a": a.tolist(), "b": b.tolist()}
    (once,) = compare_arms(workload(values, **revisions(12)))
    assert once.decided and once.test == "paired t test"
    extended = workload(values, **revisions(5, 12))
    (pair,) = compare_arms(extended)
    t = stats.ttest_rel(a, b).statistic
    first = stats.ttest_rel(a[:5], b[:5]).pvalue
    e = math.sqrt(0.25 / 12.25) * ((1 + t**2 / 11) / (1 + 0.25 / 12.25 * t**2 / 11)) ** 6
    assert pair.looks == (5, 12)
    assert pair.p == pytest.approx(min(1.25 * first, 5 / e))
    assert not pair.decided  # although the t test of all 12 would decide
    text = judged(extended)
    assert (
        "The results were judged at 5 and 12 seeds, and the interval holds for all looks. Before,"
        f" at 5, {pair.better} and {pair.worse} were not decided (p = {1.25 * first:.2g})."
    ) in text
    # The second revision has not ended: the verdict is that of the first one.
    (before,) = compare_arms(replace(extended, completed=1))
    assert before.looks == (5,) and before.p == pytest.approx(1.25 * first)


def test_a_winner_that_changes_begins_a_new_pair():
    values = {"a": [0.0, 0.1, 0.05, 0.02, 0.07, 0.01], "b": [1.0, 1.02, 0.98, 1.1, 1.05, 1.0]}
    (same,) = compare_arms(workload(values, **revisions(6, 6)))
    assert same.decided and same.looks == (6,)
    fields = revisions(6, 6, revision_2=("a",))
    (new,) = compare_arms(workload(values, **fields))
    assert new.looks == (6,) and new.test == "anytime-valid t test"
    difference = np.subtract(values["a"], values["b"])
    e = float(e_of_t(difference.mean() / (difference.std(ddof=1) / math.sqrt(6)), 6))
    assert new.p == pytest.approx(5 * 2 / e)


def test_it_is_said_why_a_new_winner_has_no_test():
    """It said that there is no test with 4 units, which had decided before the extension."""
    values = {"a": [0.0, 0.1, 0.05, 0.02], "b": [1.0, 1.02, 0.98, 1.1]}
    assert "a is better than b" in judged(workload(values, **revisions(4)))
    text = judged(workload(values, **revisions(4, 4, revision_2=("a",))))
    assert text.startswith(
        "Not decided: 4 seeds of each arm cannot decide anything; with 1 pair of arms it takes at"
        " least 6, because winners or arms are new since results were known."
    )


def test_an_arm_that_was_added_after_results_is_judged_by_e_values():
    a, b = [0.0, 0.1, 0.05, 0.02, 0.03, 0.07], [1.0, 1.02, 0.98, 1.1, 1.05, 0.95]
    values = {"a": a, "b": b, "c": [2.0, 2.1, 2.2, 2.0, 1.9, 2.1]}
    fields = revisions(6, 6)
    first, second = fields["revisions"]
    fields["revisions"] = (first, replace(second, arms=("a", "b", "c")))
    pairs = {(p.better, p.worse): p for p in compare_arms(workload(values, **fields))}
    assert pairs["a", "b"].test == "paired t test"
    assert pairs["a", "c"].test == "anytime-valid t test"


def test_revisions_before_the_winners_are_known_are_the_plan():
    fields = revisions(4, 6)
    first, second = fields["revisions"]
    fields["revisions"] = (first, replace(second, compared_known=False))
    values = {"a": [0.0, 0.1, 0.05, 0.02, 0.0, 0.1], "b": [1.0, 1.0, 0.98, 1.1, 1.0, 1.2]}
    (pair,) = compare_arms(workload(values, **fields))
    assert pair.test == "paired t test" and pair.looks == (6,)
    assert not compare_arms(workload(values, **{**fields, "completed": 1}))[0].looks


def test_looks_at_any_time_need_no_end_of_a_revision():
    values = {"a": [0.0, 0.1, 0.05, 0.02, 0.0], "b": [1.0, 1.02, 0.98, 1.1, 1.0]}
    fields = revisions(8) | {"completed": 0, "looks": "any"}
    (pair,) = compare_arms(workload(values, **fields))
    # Three units, at the level .05, cannot decide anything.
    assert pair.looks == (4, 5) and pair.p is not None


@pytest.mark.parametrize(
    ("relevant", "shift", "text"),
    [
        (0.1, 0.0, "is better than that of drug_1 by more than 0.1, the difference that matters:"),
        (
            1.0,
            0.0,
            "better than that of drug_1; whether by 1, the difference that matters, is open",
        ),
        (4.0, 0.0, "is better than that of drug_1, by less than the 4 that matter: its mean loss"),
        (3.0, 1.5, "The configurations of drug_2 and drug_1 are equivalent: the loss on the test"),
        (0.1, 1.5, "Not decided between the configurations of drug_2 and drug_1."),
    ],
)
def test_a_difference_is_held_against_the_one_that_matters(relevant, shift, text):
    goal = replace(LARGER, relevant=relevant)
    values = {"drug_1": DRUG_1, "drug_2": [x - shift for x in DRUG_2]}
    found = judged(workload(values, goal=goal))
    assert text in found and "standard deviations" not in found


@pytest.mark.parametrize(
    ("relevant", "shift", "said"),
    [
        # scipy's noncentral t at the level .04, with Student's deviation of 1.229995: the power of
        # 52 is .793 and of 53 .801; that of 9 is .754 and of 10 .811. The quantiles of chi squared
        # with 9 degrees of freedom are 4.168 and 14.684 (tables of it).
        (0.5, 1.5, " The difference that matters, 0.5, takes about 53 (32 to 115) seeds of"),
        (1.3, 0.8, " The difference that matters, 1.3, takes about 10 (6 to 22) seeds of a fresh"),
        (1e-3, 1.5, " The difference that matters, 0.001, takes more than 10,000 seeds of a fresh"),
    ],
)
def test_what_would_decide_is_told_for_the_difference_that_matters(relevant, shift, said):
    """Else an observed difference of nothing asks for hundreds of seeds that nobody needs."""
    values = {"drug_1": DRUG_1, "drug_2": [x - shift for x in DRUG_2]}
    text = judged(workload(values, goal=replace(LARGER, relevant=relevant)))
    assert text.startswith("Not decided between")
    assert said in text and "of this size" not in text
    assert (", and this one has 10." in text) == (relevant == 1.3)


def test_runs_of_different_seeds_are_not_paired():
    # R's t.test(extra ~ group): t = -1.8608, df = 17.776, p-value = 0.07939, -3.3654832, 0.2054832.
    seeds = {"drug_1": 0, "drug_2": 100}
    single = {"revisions": (), "units": ()}
    values = {"drug_1": DRUG_1, "drug_2": DRUG_2}
    work = workload(values, first_seed=seeds, goal=LARGER, **single)
    (pair,) = compare_arms(work)
    assert pair.p == pytest.approx(1.25 * 0.07939, abs=2e-5)
    assert pair.low is not None and pair.low < -0.2054832  # of R's interval, which is narrower
    text = judged(work)
    assert text.startswith(
        "Not decided between the configurations of drug_2 and drug_1. The mean loss on the test"
    )
    assert "Welch's t test over 10 seeds, p = 0.099 adjusted for all looks)" in text


def test_the_error_is_divided_over_all_pairs():
    a, b = [1.0, 1.1, 0.9, 1.05, 1.0], [1.2, 1.35, 1.05, 1.3, 1.1]
    arms = {"a": a, "b": b, "c": [1.3, 1.32, 1.24, 1.41, 1.35]}
    pairs = compare_arms(workload(arms))
    assert [(pair.better, pair.worse) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    for pair in pairs:
        p = stats.ttest_rel(arms[pair.better], arms[pair.worse]).pvalue
        assert pair.p == pytest.approx(min(1.0, 3 * 1.25 * p))
        assert pair.decided == (pair.high is not None and pair.high < 0)
    # An arm without results counts as well: its results are still to come.
    (alone,) = compare_arms(workload({"a": arms["a"], "b": arms["b"]}, arms=("a", "b", "c")))
    assert alone.p == pytest.approx(pairs[0].p)


def test_one_seed_has_no_interval():
    text = judged(workload({"a": [1.0], "b": [2.0]}))
    assert text == (
        "Not decided: 1 seed of each arm cannot decide anything; with 1 pair of arms it takes at"
        " least 4. The mean loss on the test split: a 1, b 2."
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
    assert warning.startswith("b has 4 compared seeds of 8 without a finite value")


def test_signs_decide_who_is_better_where_runs_have_no_value():
    # One divergence leaves a without a mean, and yet it is better in 11 of 12 seeds.
    work = workload({"a": [0.50 + 0.001 * k for k in range(11)] + [None], "b": [0.8] * 11 + [0.81]})
    (pair,) = compare_arms(work)
    assert (pair.better, pair.worse, pair.decided) == ("a", "b", True)
    assert pair.p == pytest.approx(1.25 * stats.binomtest(11, 12).pvalue)
    assert judged(work).startswith(
        "The configuration of a is better than that of b: its runs are better more often; 1 of a"
        " diverged, and counts as the worst one (test of signs over 12 seeds, p = 0.0079"
        " adjusted for all looks)"
    )
    assert math.isnan(pair.difference) and pair.needed is None
    # The same with a divergence of each arm, where neither has a mean.
    both = judged(
        workload({"a": [0.5] * 12 + [None], "b": [None] + [0.8 + 0.01 * k for k in range(12)]})
    )
    assert (
        "its runs are better more often; 1 of a diverged and 1 of b diverged, and count as" in both
    )


def test_an_arm_that_always_diverges_loses_in_words():
    work = workload({"a": [None] * 4, "b": [1.0, 0.9, 0.8, 0.7]})
    assert judged(work).startswith(
        "The configuration of b is better than that of a: a diverged in all of 4 seeds, and b in"
        " none."
    )
    fewer = judged(workload({"a": [None] * 3, "b": [1.0, 0.9, 0.8]}))
    assert fewer == (
        "Not decided: 3 seeds of each arm cannot decide anything; with 1 pair of arms it takes at"
        " least 4. The mean loss on the test split: b 0.9, a without a mean (3 of 3 have no value)."
    )
    some = judged(workload({"a": [None, 1.0, 1.0, 1.0], "b": [1.0, 0.9, 0.8, 0.7]}))
    assert (
        "1 of a diverged, and counts as the worst one (no test with 4 seeds)" in some
        and some.endswith("Signs can decide from 6 units on.")
    )


def test_a_claim_says_how_many_units_may_collapse_unseen_and_which_did():
    """Of 20 means that are equal, one rare failure that was not drawn makes an arm better."""
    initial = {arm: {"eval/loss": 2.3} for arm in ("a", "b")}
    a = [0.30, 0.31, 0.29, 0.30, 0.31]
    worse = [x + 0.1 for x in sorted(a)]
    text = judged(workload({"a": a, "b": worse}, initial=initial))
    # 1 - .05^(1/5): with five units none fails in 5% of cases if 45% do.
    assert (
        "This is about typical seeds: none of the 5 of an arm collapsed or diverged, and up to"
        in text
    )
    assert "and up to 45% of its seeds may." in text and "is not known" not in text
    text = judged(workload({"a": [*a[:4], 2.3], "b": worse}, initial=initial))
    assert text.startswith(
        "Not decided between the configurations of b and a. The mean of b is the"
    )
    assert "best. The runs of a are better more often; 1 of a collapsed, and counts as" in text
    assert "the worst one (no test with 5 seeds)" in text
    assert (
        "A seed collapsed if its loss on the test split gained less than half of what that of the"
        " median one of the pair gained over the value before the first step, 2.3." in text
    )
    assert "typical" not in text and "Signs can decide from 6 units on." in text
    every = judged(workload({"a": [2.3, 2.2, None, 2.31, 2.29], "b": a}, initial=initial))
    assert "b is better than" in every.replace("The configuration of b", "b")
    assert "a diverged or collapsed in all of 5 seeds, and b in none" in every
    numbers = judged(workload({"a": [2.3] * 6 + a[:4], "b": a * 2}, initial=initial))
    p = 1.25 * 2 * stats.fisher_exact([[6, 4], [0, 10]]).pvalue
    assert "6 of a collapsed, and count as the worst ones (Fisher's exact test of their" in numbers
    assert f"over 10 seeds, p = {p:.2g}" in numbers


def test_a_run_that_failed_makes_no_verdict():
    """A machine that ran out of memory says nothing about an optimizer."""
    work = workload({"a": [1.0, 0.9, 0.8, 0.7, 0.8], "b": [None] * 5})
    assert compare_arms(work)[0].decided  # they diverged
    why = "RESOURCE_EXHAUSTED: out of memory. Allocating 12 bytes"
    failing = tuple(
        replace(run, summary=Summary("failed", 3, {}, why)) if run.arm == "b" else run
        for run in work.finals
    )
    every = replace(work, finals=failing, path=Path("sweeps/x"))
    assert compare_arms(every) == []
    text = judged(every)
    assert text.startswith("a is the only arm with results:") and "diverged" not in text
    said = (
        "final/b/0 (RESOURCE_EXHAUSTED: out of memory) and 4 more compared runs failed. A failed"
        " run is no result, and b is not judged: `python -m trainer sweep work sweeps/x --failed`"
        " computes them again."
    )
    assert said in text
    # One failed run of many is enough, and the other pairs are judged.
    values = {"a": [0.5 + 0.01 * n for n in range(8)], "b": [1.0 + 0.02 * n for n in range(8)]}
    work = workload({**values, "c": [2.0 - 0.01 * n for n in range(8)]})
    one = tuple(
        replace(run, summary=Summary("failed", 3, {}, why)) if run.name == "final/b/7" else run
        for run in work.finals
    )
    pairs = {(p.better, p.worse): p for p in compare_arms(replace(work, finals=one))}
    assert pairs["a", "c"].decided
    assert not pairs["a", "b"].looks and not pairs["b", "c"].looks and pairs["a", "b"].n == 7
    text = judged(replace(work, finals=one, path=None))
    assert text.startswith("Not decided between the configurations of a and b.")
    assert (
        "no test with 7 seeds" in text and "final/b/7 (RESOURCE_EXHAUSTED: out of memory)" in text
    )
    assert "b is not judged: repeat them." in text
    # All of them: neither is worse.
    both = tuple(replace(run, summary=Summary("failed", 3, {}, why)) for run in every.finals)
    assert judged(replace(every, finals=both)).startswith("Not decided. final/a/0 (RESOURCE_EXH")


def test_trials_of_a_search_that_failed_make_no_verdict():
    """Three of four trials without memory leave the best of one against the best of four."""
    values = {"a": [0.5 + 0.01 * n for n in range(6)], "b": [0.6 + 0.02 * n for n in range(6)]}
    values["c"] = [2.0 - 0.01 * n for n in range(6)]
    trials = {arm: [(0.1, 0.5), (0.2, 0.6), (0.3, None), (0.4, 0.7)] for arm in values}
    work = workload(values, trials, path=Path("sweeps/x"))
    assert all(pair.decided for pair in compare_arms(work))  # one diverged, which is a result
    failing = tuple(
        replace(run, summary=Summary("failed", 3, {}, "out of memory"))
        if run.arm == "b" and run.number in (1, 3)
        else run
        for run in work.trials
    )
    some = replace(work, trials=failing)
    pairs = {(p.better, p.worse): p for p in compare_arms(some)}
    assert pairs["a", "c"].decided
    assert not pairs["a", "b"].looks and not pairs["b", "c"].decided
    said = (
        "trials/b/0001/0 (out of memory) and 1 more runs failed. A failed run is no result, and b"
        " is not judged: `python -m trainer sweep work sweeps/x --failed` computes them again."
    )
    assert said in judged(some)
    # Those that failed again are results, and are named.
    again = {run.name: True for run in failing if run.end == "failed"}
    repeated = replace(some, again=again)
    assert all(pair.decided for pair in compare_arms(repeated))
    last = "Of these, trials failed again, and rank last: trials/b/0001/0, trials/b/0003/0."
    assert last in judged(repeated)
    two = replace(some, arms=("a", "b"), finals=tuple(run for run in some.finals if run.arm != "c"))
    text = judged(two)
    assert text.startswith("Not decided. The mean loss") and said in text and "p =" not in text


def test_the_better_of_two_arms_is_better_on_the_compared_seeds():
    # Over all seeds a has the smaller mean, but on the seeds that both have b does.
    a = [1.0, 1.01, 1.005, 0.1, 0.11, 0.12, 0.1]
    work = workload({"a": a, "b": [0.8, 0.801, 0.802]})
    (pair,) = compare_arms(work)
    assert (pair.better, pair.n) == ("b", 3) and pair.difference < 0
    assert "a is better" not in judged(work)


def test_equal_arms_and_constant_differences():
    text = judged(workload({"a": [1.0] * 8, "b": [1.0] * 8}))
    assert "is equal to that of b" in text and "power of 0.8" not in text
    text = judged(workload({"a": [0.9] * 8, "b": [0.8] * 8}, goal=LARGER))
    assert "is larger by 0.1 (test of signs over 8 seeds, p = 0.0098 adjusted for" in text
    assert "no value" not in text


def test_seeds_that_would_decide_hold_at_the_corrected_level():
    a, b = [1.0, 1.2, 0.9, 1.1, 1.0], [1.1, 1.15, 1.05, 1.2, 1.1]
    goal = ReportGoal("loss", "min", "validation", "test", relevant=0.05)
    one = workload({"a": a, "b": b}, goal=goal)
    two = workload({"a": a, "b": b, "c": [9.0] * 5}, goal=goal)
    single, among_three = (compare_arms(work)[0].needed for work in (one, two))
    assert single is not None and among_three is not None and among_three > single


def test_every_trial_diverged():
    work = workload({"a": []}, {"a": [(0.1, None), (1.0, None)]}, winners={})
    assert judged(work) == "Not decided: no trial has a value (2 diverged and 0 failed)."
    report = reported(work)
    assert "Every trial of a diverged (2)." in block(report, "ledger").warnings


def test_an_arm_that_lacks_the_metric_is_named():
    work = workload({"a": [1.0, 1.1], "b": [1.0, 1.2]})
    lacking = tuple(changed(r, metrics={}) if r.arm == "b" else r for r in work.finals)
    report = reported(replace(work, finals=lacking))
    assert any(
        line.startswith("No run of b has the metric 'eval/loss'")
        for line in block(report, "arms").warnings
    )


def test_a_target_that_nobody_met():
    goal = ReportGoal("loss", "min", "validation", "test", target=0.001)
    report = reported(workload({"a": [1.0, 1.1], "b": [1.2, 1.3]}, goal=goal))
    found = block(report, "target")
    assert found.warnings == ("No run met the target 0.001.",)
    assert [row[:3] for row in found.tables[0].rows] == [("a", 0, 2), ("b", 0, 2)]


def test_steps_and_time_to_a_target():
    goal = ReportGoal("loss", "min", "validation", "test", target=1.0)
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
    initial = {"a": {"validation/loss": 10.0}}
    work = workload({"a": [3.0, 3.1]}, {"a": points}, initial=initial)
    row = block(reported(work), "learning_rate").tables[0].rows[0]
    assert row[:2] == ("a", "matrices.learning_rate") and row[6] == 1
    assert row[7] == pytest.approx(1.2)
    # A sweep of an earlier version did not measure it, and its table is without the column.
    work = workload({"a": [3.0, 3.1]}, {"a": points})
    (table,) = block(reported(work), "learning_rate").tables
    assert "sensitivity" not in [column.name for column in table.columns]


def test_sensitivity_is_a_mean_over_seeds():
    # Seed 0: (1 + 0 + 1) / 3, seed 1: (0 + 1 + 2) / 3. Of the mean losses it would be 0.5.
    losses = {0: [2.0, 1.0, 2.0], 1: [1.0, 2.0, 3.0]}
    initial = {"a": {"validation/loss": 10.0}}
    work = workload({"a": [3.0, 3.1]}, {"a": [(0.01, 1.0)]}, initial=initial)
    rates = [0.01, 0.1, 1.0]
    trials = [
        changed(
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
    row = block(reported(replace(work, trials=tuple(trials))), "learning_rate").tables[0].rows[0]
    assert row[7] == pytest.approx((2 / 3 + 1) / 2)


def test_the_best_of_k_trials_is_the_u_statistic():
    points = [(0.001 * k, float(k)) for k in range(1, 6)]
    goal = ReportGoal("loss", "max", "validation", "test")
    work = workload({"a": [5.0, 5.0]}, {"a": points}, goal=goal)
    (figure,) = block(reported(work), "tuning").figures
    assert [row[2] for row in figure.table.rows] == pytest.approx([3, 4, 4.5, 4.8, 5])


def test_the_best_point_at_an_edge_of_the_space_is_warned_about():
    points = [(10.0**k, 1.0 - 0.1 * k) for k in range(-4, 1)]
    work = workload({"a": [1.0, 1.1]}, {"a": points})
    (warning,) = block(reported(work), "learning_rate").warnings
    assert warning.startswith("The best matrices.learning_rate of a, 1, lies at the high edge")
    sentence = "The best matrices.learning_rate of a lies at an edge of its space, and a wider one"
    assert any(sentence in x for x in reported(work).verdict)
    inner = workload({"a": [1.0, 1.1]}, {"a": [*points[:-1], (1.0, 2.0)]})
    assert not any("edge of its space" in x for x in reported(inner).verdict)
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
    initial = {"a": {"validation/loss": 5.5}}
    work = workload({"a": [1.0, 1.1]}, {"a": points}, initial=initial)
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
    spaces = {"a": ArmSpace("grid", {RATE: text})}
    work = workload({"a": [1.0, 1.1]}, {"a": points}, spaces=spaces)
    (warning,) = block(reported(work), "learning_rate").warnings
    assert said in warning


@pytest.mark.parametrize(("won", "said"), [(0, "smallest"), (3, "largest"), (None, "")])
def test_searches_whose_winner_is_mostly_the_first_or_last_value_are_named(won, said):
    """The best of all of them lay inside: 7 of 8 searches had chosen the smallest rate they had."""
    work = several_searches(8)
    winners = {(arm, n): n % 4 for arm in work.arms for n in range(8)}
    if won is not None:
        winners |= {("drug_1", n): won for n in range(7)}
    trials = [replace(x, search=n) for x in work.trials for n in range(8)]
    # Rates from .001 to .004 in a space from .0001 to 1, of which the best one is no edge.
    text = judged(replace(work, trials=tuple(trials), winners=winners))
    sentence, rate = "searches of drug_1 the", "matrices.learning_rate"
    assert ("searches of drug_1 the trial with" in text) == bool(said)
    assert (
        not said
        or f"In {7 + (won == 3)} of the 8 {sentence} trial with the {said} {rate} won" in text
    ), text
    assert not said or f"a {said[:-2]}r one may be better" in text
    zeros = [replace(x, values={RATE: 0.0} if x.number == 0 else x.values) for x in trials]
    text = judged(replace(work, trials=tuple(zeros), winners=winners))
    assert won != 0 or "searches of drug_1 the trial with" not in text


def test_what_was_compared_of_a_model_is_said(tmp_path):
    """A verdict was read as one on optimizers of all parameters."""
    text = """
    model: !models.mlp {width: 4, depth: 1, num_classes: 3}
    data: !data.digits {batch_size: 8}
    loss: !losses.softmax_cross_entropy
    steps: 3
    optimizer: !optim.optimizer
      groups:
        matrices: !optim.group {match: .*kernel, optimizer: !%s {learning_rate: 0.02}}
        rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 0.001}}
    """
    names = {"drug_1": "optim.muon", "drug_2": "optax.adamw"}

    def read_config(name: str) -> Call:
        (tmp_path / "run.yaml").write_text(textwrap.dedent(text % name))
        return configs.load([tmp_path / "run.yaml"]).root

    roots = {arm: read_config(name) for arm, name in names.items()}
    work = replace(workload({"drug_1": DRUG_1, "drug_2": DRUG_2}), configs=roots)
    said = (
        "Of the optimizer, the arms differ in the group 'matrices' only: in all of them 'rest' has"
        " optax.adamw with learning_rate 0.001, not searched."
    )
    assert said in judged(work) and said in block(reported(work), "methods").text[0]
    path = "optimizer.groups.rest.optimizer.learning_rate"
    spaces = {arm: ArmSpace("grid", {path: "values [0.1, 1]"}) for arm in names}
    assert "'rest' has optax.adamw, which is searched alike." in judged(
        replace(work, spaces=spaces)
    )
    # A rate that one arm searches only, or over other values, is a difference in that group.
    for other in (ArmSpace(), ArmSpace("grid", {path: "values [1, 10]"})):
        unlike = replace(work, spaces=spaces | {"drug_2": other})
        assert "in the group" not in judged(unlike)
    both = replace(work, configs={arm: read_config("optim.muon") for arm in names})
    assert "The arms differ in the group" not in judged(both)
    other = roots["drug_2"]
    other = Call(other.name, {**other.kwargs, "optimizer": Call("optax.adamw", {})})
    assert "in the group" not in judged(replace(work, configs=roots | {"drug_2": other}))


def test_the_ledger_counts():
    work = workload({"a": [1.0, 1.1]}, {"a": [(0.1, 1.0), (0.2, None), (0.3, 2.0)]})
    trials = list(work.trials)
    trials[0] = replace(trials[0], retries=2)
    trials[2] = changed(trials[2], end="missing", step=0, metrics={})
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
    b = replace(a, name="two", goal=ReportGoal("loss", "max", "validation", "validation"))
    report = reported(a, b)
    assert [text.split(":")[0] for text in report.verdict] == ["one", "two"]
    warnings = " ".join(block(report, "verdict").warnings)
    assert "The sweeps have different goals (one loss and two loss)" in warnings
    assert "The sweeps report on different splits (one test and two validation)." in warnings


def test_scores_across_two_workloads():
    goal = ReportGoal("loss", "min", "validation", "test", target=1.0)
    works = [workload({"a": [0.5], "b": [0.5]}, name=name, goal=goal) for name in ("one", "two")]
    for work, (a, b) in zip(works, ((10, 20), (40, 10)), strict=True):
        work._curves["final/a/0"] = curve([a, 100], [0.9, 0.5])
        work._curves["final/b/0"] = curve([b, 100], [0.9, 0.5])
    found = block(reported(*works), "workloads")
    times, scores, pairs = found.tables
    assert times.rows == (("a", 10.0, 40.0), ("b", 20.0, 10.0))  # steps: no run has seconds
    # Ratios (1, 4) and (2, 1): the exact integrals are (3 + 0) / 2 / 3 and (2 + 3) / 2 / 3.
    assert [row[1] for row in scores.rows] == pytest.approx([0.5, 5 / 6], abs=0.02)
    (row,) = pairs.rows
    assert row[:2] == ("a", "b") and row[2] == pytest.approx(math.sqrt(2 * 0.25))


def test_targets_that_no_arm_meets_leave_scores_of_zero():
    goal = ReportGoal("loss", "min", "validation", "test", target=0.01)
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
        spaces = {
            arm: ArmSpace("grid", dict.fromkeys(p, "uniform 0 to 1")) for arm, p in arms.items()
        }
        return list(axes_of([replace(work, spaces=spaces)]).values())

    rate = "optimizer.groups.x.optimizer.learning_rate"
    other = "optimizer.groups.y.optimizer.learning_rate"
    assert named(a=[rate, other, "optimizer.b2"]) == ["x.learning_rate", "y.learning_rate", "b2"]
    # A schedule's peak and a constant rate are one axis of two arms, but two axes of one arm.
    peak = f"{rate}.peak_value"
    assert named(a=[rate], b=[peak]) == ["x.learning_rate", "x.learning_rate"]
    assert named(a=[rate, peak]) == [rate, peak]


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        (("log_uniform 1e-10 to 1", "log_uniform 0.1 to 0.2"), "axes: a 10 and b 0.301."),
        (("log_uniform 0.001 to 1", "log_uniform 0.01 to 1"), "axes: a 3 and b 2."),
        (("log_uniform 0.002 to 1", "log_uniform 0.01 to 1"), ""),
        (("uniform 0 to 0.1", "uniform 0.08 to 0.1"), "axes: a 1 and b 0.2."),
        (("uniform 0 to 0.1", "uniform 0 to 10"), ""),
    ],
)
def test_spaces_of_unequal_width_are_named_in_the_verdict(spaces, said):
    searched = {
        arm: ArmSpace("sobol", {RATE: text}) for arm, text in zip("ab", spaces, strict=True)
    }
    points = {arm: [(0.1, 1.0), (0.2, 2.0)] for arm in "ab"}
    work = workload({"a": [1.0, 1.1], "b": [2.0, 2.1]}, points, spaces=searched)
    (text,) = reported(work).verdict
    assert ("unequal width" in text) == bool(said) and said in text


def test_spaces_of_unlike_kinds_are_named_in_the_verdict():
    texts = {"a": "log_uniform 0.001 to 1", "b": "values 0.1, 0.2"}
    searched = {arm: ArmSpace("sobol", {RATE: text}) for arm, text in texts.items()}
    points = {arm: [(0.1, 1.0), (0.2, 2.0)] for arm in "ab"}
    work = workload({"a": [1.0, 1.1], "b": [2.0, 2.1]}, points, spaces=searched)
    said = "The arms searched spaces of unlike kinds: log_uniform (a) and values (b)."
    assert said in conditions(work)


def tuned(rates: int, betas: int) -> list[dict[str, Any]]:
    """Returns the values of a grid."""
    values = [(0.1 * (n + 1), 0.9 + 0.01 * m) for n in range(rates) for m in range(betas)]
    return [{RATE: rate, "optimizer.b2": b2} for rate, b2 in values]


def tuned_workload(points: dict[str, list[dict[str, Any]]], **more: Any) -> Workload:
    trials = [
        run(f"trials/{arm}/{n:04d}/0", arm, 0, 1.0, n, values=values)
        for arm, of_arm in points.items()
        for n, values in enumerate(of_arm)
    ]
    spaces = {arm: ArmSpace("grid", {RATE: "values"}) for arm in points}
    finals = {arm: [1.0 + n, 1.1 + n] for n, arm in enumerate(points)}
    return replace(workload(finals), trials=tuple(trials), spaces=spaces, **more)


def test_hyperparameters_are_counted_in_the_verdict_a_table_and_the_methods():
    work = tuned_workload({"adamw": tuned(4, 2), "muon": tuned(8, 1), "sgd": tuned(1, 1)})
    report = reported(work)
    (verdict,) = report.verdict
    assert (
        "The arms tuned different numbers of hyperparameters: adamw 2 with 8 trials (4 for each)"
        " and muon 1 with 8 trials (8 for each); the same number of trials is fewer for each where"
        " more are tuned. sgd tuned no hyperparameter: in this sweep it is an untuned baseline."
    ) in verdict
    table = next(each for each in report.tables if each.name == "tuned")
    assert table.rows == (
        ("adamw", 2, 8, 4.0, f"{RATE}; optimizer.b2"),
        ("muon", 1, 8, 8.0, RATE),
        ("sgd", 0, 1, None, None),
    )
    (methods,) = block(report, "methods").text
    assert "How many were tuned: adamw 2 with 8 trials (4 for each), muon 1 with 8" in methods
    assert not any("number of hyperparameters" in x for x in block(report, "ledger").warnings)
    # A path that is linked to another counts once, as the other's.
    linked = {"adamw": [[[RATE, "optimizer.b2"]]]}
    assert "different numbers" not in judged(replace(work, linked=linked))
    # What has not ended was not tuned yet.
    last = replace(work.trials[0], summary=replace(work.trials[0].summary, end="missing"))
    unfinished = replace(work, trials=(last, *work.trials[1:]))
    assert "The arms tune different numbers" in judged(unfinished)


def test_nothing_is_said_of_arms_that_are_tuned_alike_or_not_at_all():
    for points in (tuned(4, 2), tuned(1, 1)):
        work = tuned_workload({"adamw": points, "muon": points})
        assert "hyperparameters:" not in judged(work) and "untuned" not in judged(work)
    (methods,) = block(reported(work), "methods").text
    assert "No hyperparameter was tuned: the search had 1 point for each arm" in methods
    assert "were tuned with" not in methods
    work = tuned_workload({"adamw": tuned(4, 2), "muon": tuned(4, 2)})
    (methods,) = block(reported(work), "methods").text
    assert "How many were tuned: every arm 2 with 8 trials (4 for each)." in methods


def test_the_width_of_axes_that_are_set_together_counts_once():
    axes = dict.fromkeys((RATE, "optimizer.b2"), "log_uniform 0.01 to 1")
    points = [{RATE: 0.1 * n, "optimizer.b2": 0.2 * n} for n in range(4)]
    spaces = {"a": ArmSpace("sobol", axes), "b": ArmSpace("sobol", {RATE: axes[RATE]})}
    work = tuned_workload({"a": points, "b": tuned(4, 1)})
    work = replace(work, spaces=spaces)
    assert "unequal width" in judged(work)
    assert "unequal width" not in judged(replace(work, linked={"a": [[list(axes)]]}))


def test_runs_with_other_conditions_are_named():
    work = workload({"a": [1.0, 1.1]})
    finals = [
        replace(each, fingerprint={"jax": version, "seed": each.seed})
        for each, version in zip(work.finals, ("0.10.2", "0.12.0"), strict=True)
    ]
    (verdict,) = reported(replace(work, finals=tuple(finals))).verdict
    assert verdict.endswith(
        "The runs were made under different conditions: jax 0.10.2 (final runs of a) and 0.12.0"
        " (final runs of a)."
    )


def with_code(codes: dict[str, str], began: dict[str, str] | None = None, **more: Any) -> list[str]:
    """Returns the sentences about two arms whose runs had these hashes of lab/nets.py."""
    points = {arm: [(0.1, 1.0), (0.2, 2.0)] for arm in "ab"}
    work = workload({"a": [1.0], "b": [2.0]}, points, **more)

    def had(run: Result) -> Result:
        hash = codes.get(run.name, "first")
        code = {"lab/__init__.py": "0", "lab/nets.py": hash} if hash else {"lab/__init__.py": "0"}
        time = (began or {}).get(hash, "")
        return replace(run, fingerprint={"code": code}, began=time)

    trials, finals = (tuple(map(had, runs)) for runs in (work.trials, work.finals))
    return list(changed_code(replace(work, trials=trials, finals=finals)))


def test_the_runs_of_each_arm_that_ran_after_a_change_of_the_code_are_counted():
    assert with_code({}) == []
    # A run that did not import the file.
    assert with_code({"trials/a/0001/0": ""}) == []
    edited = {"trials/a/0001/0": "new", "final/a/0": "new", "final/b/0": "new"}
    text = "1 of a's 2 trials, 1 of a's 1 final run and 1 of b's 1 final run ran after lab/nets.py"
    assert with_code(edited, code={"lab/nets.py": ["first", "new"]}) == [f"{text} had changed."]
    # Without a ledger, the order is that in which the runs began.
    assert with_code(edited, {"first": "2026-01-01", "new": "2026-01-02"}) == [
        f"{text} had changed."
    ]
    (other,) = with_code(edited, {"first": "2026-01-02", "new": "2026-01-01"})
    assert other == "1 of a's 2 trials and all of b's 2 trials ran after lab/nets.py had changed."
    # What a ledger lacks was computed before it began.
    assert with_code(edited, code={"lab/nets.py": ["first"]}) == [other]
    # A change that nothing ran with.
    assert with_code({}, code={"lab/nets.py": ["first", "new"]}) == []


def test_code_that_changed_several_times_is_told_apart():
    edited = {"trials/a/0001/0": "second", "final/a/0": "third"}
    assert with_code(edited, code={"lab/nets.py": ["first", "second", "third"]}) == [
        "1 of a's 2 trials ran after lab/nets.py had changed for the 1st time.",
        "1 of a's 1 final run ran after lab/nets.py had changed for the 2nd time.",
    ]


def test_runs_that_were_resumed_with_changed_code_are_counted():
    work = workload({"a": [1.0, 1.1], "b": [2.0, 2.1]})
    finals = tuple(
        replace(each, fingerprint={"code": {"a.py": "1"}}, code_changed=each.seed == 0)
        for each in work.finals
    )
    (text,) = changed_code(replace(work, finals=finals))
    assert text == (
        "1 of a's 2 final runs and 1 of b's 2 final runs were resumed with code that had changed."
    )


def test_processors_whose_names_begin_alike_are_told_apart():
    work = workload({"a": [1.0, 1.1]})
    names = ("Intel(R) Xeon(R) Gold 6148", "Intel(R) Xeon(R) Platinum 8480")
    finals = [
        replace(each, fingerprint={"cpu": name, "commit": "0123456789" * 4})
        for each, name in zip(work.finals, names, strict=True)
    ]
    (verdict,) = reported(replace(work, finals=tuple(finals))).verdict
    assert all(f"{name} (final runs of a)" in verdict for name in names)
    assert "commit" not in verdict


BASE = """\
model: !models.mlp {width: 64, depth: 2}
data: !data.digits {batch_size: 128}
loss: !losses.softmax_cross_entropy
steps: 500
optimizer: !optax.adamw {learning_rate: 0.001}
"""
ANOTHER = BASE.replace("width: 64", "width: 128").replace("steps: 500", "steps: 500\ndata_seed: 3")


def with_configs(tmp_path: Path, **texts: str) -> Workload:
    """Returns a workload of two arms whose runs have these configs."""
    work = workload({"a": [1.0, 1.1, 1.2, 1.1], "b": [2.0, 2.1, 2.2, 2.0]})
    for arm, text in texts.items():
        (tmp_path / arm).mkdir()
        (tmp_path / arm / "config_full.yaml").write_text(text)
    return replace(
        work, finals=tuple(replace(run, folder=tmp_path / run.arm) for run in work.finals)
    )


def test_what_arms_differ_in_beside_the_optimizer_stands_in_the_verdict(tmp_path):
    other = ANOTHER.replace("optax.adamw", "optax.sgd").replace("128}", "32, split: {seed: 3}}")
    work = with_configs(tmp_path, a=BASE, b=f"{other}precision: mixed\nlog_every: 7\n")
    text = judged(work)
    assert (
        "The arms differ in more than their optimizers: model.width 64 (a) and 128 (b);"
        " data.batch_size 128 (a) and 32 (b); data.split.seed absent (a) and 3 (b); data_seed"
        " absent (a) and 3 (b); precision absent (a) and mixed (b)." in text
    )
    assert "optax" not in text and "log_every" not in text
    both = ArmSpace("sobol", {"model.width": "values 64, 128"})
    assert "model.width" not in judged(replace(work, spaces={"a": both, "b": both}))
    # What only one arm searches is a difference.
    one = judged(replace(work, spaces={"a": both}))
    assert "model.width searched (a) and 128 (b)" in one


def test_the_verdict_says_whether_the_file_names_what_differs(tmp_path):
    cosine = "learning_rate: !schedules.warmup_cosine {peak_value: 0.1, warmup_steps: 10%}"
    other = BASE.replace("adamw {learning_rate: 0.001}", f"sgd {{{cosine}}}")
    work = with_configs(tmp_path, a=BASE, b=other.replace("steps: 500", "steps: 400"))
    words = "steps 500 (a) and 400 (b); schedule constant (a) and warmup_cosine (b)."
    # Single runs have no file.
    single = replace(work, revisions=())
    assert conditions(single) == [f"The arms differ in more than their optimizers: {words}"]
    sweep = replace(work, **revisions(4))
    assert conditions(sweep)[1:] == [
        "The file does not name these differences (steps, schedule), which may explain the result."
    ]
    named = replace(sweep, differs=("steps", "schedule"))
    assert conditions(named) == [f"As the file says, the arms differ in {words}"]
    partly = " ".join(conditions(replace(sweep, differs=("steps",))))
    assert "more than their optimizers: schedule constant" in partly
    assert "As the file says, the arms differ in steps 500 (a) and 400 (b)." in partly
    assert "(schedule), which may explain" in partly


def test_what_differs_in_a_part_of_the_optimizer_that_both_arms_have_is_in_the_verdict(tmp_path):
    optimizer = (
        "!optim.optimizer {groups: {matrices: !optim.group {match: '.*/kernel', optimizer:"
        " !optax.%s {learning_rate: 0.1}}, rest: !optim.group {match: '.*', optimizer: !optax.adamw"
        " {learning_rate: %s, eps: %s}}}}"
    )
    first, second = (
        BASE.replace("!optax.adamw {learning_rate: 0.001}", optimizer % values)
        for values in (("sgd", 1e-3, 1e-8), ("rmsprop", 1e-7, 100))
    )
    sweep = replace(with_configs(tmp_path, a=first, b=second), **revisions(4))
    assert conditions(sweep) == [
        "The arms differ in more than their optimizers: optimizer.groups.rest.optimizer"
        ".learning_rate 0.001 (a) and 1e-07 (b); optimizer.groups.rest.optimizer.eps 1e-08 (a) and"
        " 100 (b).",
        "The file does not name these differences (arguments), which may explain the result.",
    ]
    path = "optimizer.groups.rest.optimizer.learning_rate"
    spaces = {
        arm: ArmSpace("sobol", {path: f"log_uniform {low:g} to {10 * low:g}"})
        for arm, low in (("a", 1e-3), ("b", 1e-8))
    }
    named = replace(sweep, spaces=spaces, differs=("arguments", "space"))
    assert conditions(named)[0] == (
        f"The arms searched spaces of {path} that do not overlap: 0.001 to 0.01 (a) and 1e-08 to"
        " 1e-07 (b)."
    )


def test_the_only_difference_of_arms_with_one_optimizer_is_what_they_compare(tmp_path):
    work = with_configs(tmp_path, a=BASE, b=BASE.replace("steps: 500", "steps: 400"))
    sweep = replace(work, **revisions(4))
    assert conditions(sweep) == ["What is compared: steps 500 (a) and 400 (b)."]


def test_an_arm_without_results_is_not_compared(tmp_path):
    # Of an arm that has not begun, the configs of the plan have no defaults.
    work = with_configs(tmp_path, a=f"{BASE}data_seed: 3\nprecision: float32\n")
    root = configs.load([tmp_path / "a" / "config_full.yaml"]).root
    other = Call("experiment", {**root.kwargs, "steps": 400})
    searched = [{RATE: 0.1 * n} for n in (1, 2)]
    trials = [
        run(f"trials/{arm}/{n:04d}/0", arm, 0, 1.0, n, values=values)
        for arm, of_arm in {"a": searched, "b": searched[:1]}.items()
        for n, values in enumerate(of_arm)
    ]
    finals = tuple(
        each if each.arm == "a" else replace(each, summary=replace(each.summary, end="missing"))
        for each in work.finals
    )
    alone = replace(work, finals=finals, trials=tuple(trials), configs={"a": root, "b": other})
    text = judged(replace(alone, **revisions(4)))
    assert "a is the only arm with results" in text
    assert "differ" not in text and "untuned" not in text


def test_arms_with_other_functions_are_named_without_their_arguments(tmp_path):
    work = with_configs(tmp_path, a=BASE, b=BASE.replace("models.mlp", "models.vit"))
    assert "What is compared: model models.mlp (a) and models.vit (b)." in judged(work)


def test_losses_that_are_different_functions_are_not_compared(tmp_path):
    smoothed = BASE.replace("cross_entropy", "cross_entropy {label_smoothing: 0.1}")
    work = with_configs(tmp_path, a=BASE, b=smoothed)
    text = judged(work)
    assert text.startswith(
        "Not judged. The losses of the arms are not the same function (loss.label_smoothing absent"
        " (a) and 0.1 (b)), so that they cannot be compared: name a metric that both"
        " compute, such as accuracy."
    )
    assert "better" not in text and "p =" not in text
    accuracy = replace(work, goal=ReportGoal("accuracy", "max", "validation", "test"))
    finals = [
        changed(run, metrics={"eval/accuracy": run.value("eval/loss")}) for run in work.finals
    ]
    assert "is better than" in judged(replace(accuracy, finals=tuple(finals)))
    searched = {"a": ArmSpace("sobol", {"loss.label_smoothing": "uniform 0 to 0.1"})}
    assert "depends on loss.label_smoothing, which is" in judged(replace(work, spaces=searched))


def test_a_run_that_is_missing_is_not_compared():
    work = workload({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]})
    finals = list(work.finals)
    finals[5] = changed(finals[5], end="missing", metrics={})
    partial = replace(work, finals=tuple(finals))
    assert judged(replace(partial, completed=0)).startswith("Not judged yet: 2 of 3 seeds have")
    assert len(standings(partial)[1].values) == 2
    assert run("x", "a", 0, None).value("eval/loss") is None
