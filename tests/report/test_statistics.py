"""Intervals, tests, P(A > B) and power: known answers, degenerate cases and coverage.

The losses of the SoftCap record of modded-nanogpt are in ../shared/statistics beside the checkout,
or in the folder that KNOWN_STATISTICS names.
"""

import math
import os
from math import inf
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestIndPower, TTestPower

from tests import short
from tests.runs import ROOT
from trainer.report.statistics.decide import (
    NOETHER,
    _power_of_t,
    needed,
    needed_range,
    needed_unpaired,
    seeds_for_power,
)
from trainer.report.statistics.estimates import (
    Estimate,
    Improvement,
    iqm,
    mean_interval,
    one_sample,
    probability_of_improvement,
    welch,
)

KNOWN = Path(os.environ.get("KNOWN_STATISTICS") or ROOT.parent / "shared" / "statistics")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def holds(estimate: Estimate | Improvement, truth: float) -> bool:
    """Returns whether an interval contains the truth; there must be one."""
    assert estimate.low is not None and estimate.high is not None
    return estimate.low <= truth <= estimate.high


def percentile_bootstrap(values: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    means = values[rng.integers(0, len(values), (400, len(values)))].mean(axis=1)
    return tuple(np.quantile(means, [0.025, 0.975]))


# One arm.


def test_the_interval_of_a_mean_is_students() -> None:
    # The sleep data of Student (1908): R's t.test(extra[1:10] - extra[11:20]) gives these.
    differences = [-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4]
    estimate = mean_interval(differences)
    expected = (-1.58, -2.4598858, -0.7001142)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(expected, abs=1e-7)
    assert (estimate.n, estimate.deviation) == (10, pytest.approx(1.229995, abs=1e-6))
    narrow = mean_interval(differences, 0.8)
    t = stats.t.ppf(0.9, 9) * stats.sem(differences)
    assert (narrow.low, narrow.high) == pytest.approx((-1.58 - t, -1.58 + t))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Estimate(3.0, None, None, 1, None)),
        ([3.0, 3.0], Estimate(3.0, None, None, 2, 0.0)),
        ([0.1] * 5, Estimate(pytest.approx(0.1), None, None, 5, 0.0)),
        ([1.0, inf, 2.0], Estimate(inf, None, None, 3, None)),
        ([-inf], Estimate(-inf, None, None, 1, None)),
    ],
)
def test_what_has_no_interval_has_none(values: list[float], expected: Estimate) -> None:
    assert mean_interval(values) == expected


def test_infinities_of_both_signs_have_no_mean() -> None:
    estimate = mean_interval([inf, -inf])
    assert math.isnan(estimate.value) and estimate.low is None


@pytest.mark.parametrize("n", [3, 5, 10])
def test_t_intervals_cover_where_percentile_bootstraps_do_not(n: int) -> None:
    rng, repeats = np.random.default_rng(n), 800
    t = bootstrap = 0
    for values in normal(repeats, n, seed=n):
        t += holds(mean_interval(values), 0.0)
        low, high = percentile_bootstrap(values, rng)
        bootstrap += low <= 0.0 <= high
    assert t / repeats == pytest.approx(0.95, abs=0.02)
    assert bootstrap / repeats == pytest.approx({3: 0.74, 5: 0.85, 10: 0.89}[n], abs=0.04)


@pytest.mark.long
def test_t_intervals_of_lognormal_values_cover_less() -> None:
    values, mean = np.exp(normal(1500, 5)), math.exp(0.5)
    found = [mean_interval(row) for row in values]
    assert np.mean([holds(e, mean) for e in found]) == pytest.approx(0.83, abs=0.03)


@pytest.mark.skipif(not KNOWN.is_dir(), reason=f"the known statistics are not in {KNOWN}")
def test_the_t_test_of_softcap() -> None:
    losses = np.loadtxt(KNOWN / "softcap_losses.csv", skiprows=1)
    result = one_sample(losses, 3.28)
    assert result is not None
    t, p = result
    mean = mean_interval(losses)
    assert (mean.n, mean.value) == (80, pytest.approx(3.27914, abs=5e-6))
    assert mean.deviation == pytest.approx(0.00191, abs=5e-6)
    assert (t, p) == (pytest.approx(-4.015, abs=5e-4), pytest.approx(6.7e-5, abs=5e-7))
    assert one_sample(-losses, -3.28, "max")[1] == pytest.approx(p)
    assert one_sample(losses, 3.28, "max")[1] == pytest.approx(1 - 6.7e-5, abs=5e-7)


def test_the_t_test_of_one_value_or_equal_ones_has_no_p() -> None:
    for values in ([1.0], [2.0, 2.0], [1.0, inf]):
        assert one_sample(values, 3.0) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 4.5),
        ([8, 1, 7, 2, 6, 3, 5, 100], 5.25),
        ([1, 2, 3], 2.0),  # floor(3 / 4) = 0: nothing is left out
        ([1, 2, 3, inf], 2.5),
        ([1, 2, inf, inf], inf),
        ([1, 2, 3, 4, 50], 3.0),
    ],
)
def test_the_interquartile_mean(values: list[float], expected: float) -> None:
    assert iqm(values) == expected


# Two arms.


def test_the_sleep_of_student_unpaired() -> None:
    # R's t.test(extra ~ group) gives p = .07939 and the interval -3.3654832 to .2054832.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = welch(first, second)
    assert result is not None
    assert result.p == pytest.approx(0.07939, abs=5e-6)
    assert (result.low, result.high) == pytest.approx((-3.3654832, 0.2054832), abs=1e-6)


def test_unpaired_tests_are_those_of_scipy() -> None:
    a, b = normal(6, seed=1), normal(9, seed=2) * 3 + 0.5
    result, expected = welch(a, b, level=0.01), stats.ttest_ind(a, b, equal_var=False)
    assert result is not None
    assert result.p == pytest.approx(expected.pvalue)
    assert (result.low, result.high) == pytest.approx(expected.confidence_interval(0.99))


@pytest.mark.parametrize("n", [3, 8])
def test_welchs_interval_covers_with_unequal_spreads(n: int) -> None:
    a, b = normal(400, n, seed=n), 3 * normal(400, n, seed=n + 1)
    found = [welch(*rows) for rows in zip(a, b, strict=True)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) == pytest.approx(0.95, abs=0.03)


def test_one_arm_may_be_constant_and_not_both() -> None:
    result = welch([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    expected = mean_interval([-1.0, -2.0, -3.0])
    assert result is not None
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high))
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    assert welch([1.0], [2.0, 3.0]) is None


# The probability of improvement.


def test_wins_and_ties() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 5.0]
    assert probability_of_improvement(a, b).value == 2.5 / 4
    assert probability_of_improvement(b, a).value == 1.5 / 4
    assert probability_of_improvement(a, b, better="max").value == 1.5 / 4


def wins(won: int, n: int) -> Improvement:
    return probability_of_improvement(np.arange(n), np.full(n, won - 0.5))


@pytest.mark.parametrize("n", [1, 5, 8, 29])
def test_the_interval_of_pairs_is_clopper_and_pearsons(n: int) -> None:
    for won in range(n + 1):
        result, exact = wins(won, n), stats.binomtest(won, n).proportion_ci(method="exact")
        assert (result.low, result.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize("n", [5, 8, 16, 29])
def test_the_interval_of_pairs_covers_every_probability(n: int) -> None:
    found = [wins(won, n) for won in range(n + 1)]
    with np.errstate(divide="ignore"):
        percentile = [stats.binom.ppf([0.025, 0.975], n, won / n) / n for won in range(n + 1)]
    percentile[0], percentile[n] = (0.0, 0.0), (1.0, 1.0)
    for chance in [0.5, 0.6, 0.75, 0.9, 0.95, 0.99]:
        weights = stats.binom.pmf(np.arange(n + 1), n, chance)
        assert weights @ [holds(e, chance) for e in found] >= 0.95
    chance = 0.9  # what the docstring says of the bootstrap, of infinitely many resamples
    weights = stats.binom.pmf(np.arange(n + 1), n, 0.9)
    covered = weights @ [low <= chance <= high for low, high in percentile]
    assert covered == pytest.approx({5: 0.40, 8: 0.53, 16: 0.80, 29: 0.93}[n], abs=0.005)


def test_the_interval_of_pairs_covers_with_ties() -> None:
    # Accuracies on few examples: a third of the pairs are ties.
    for n in (5, 8, 16):
        draws = np.random.default_rng(n).choice([-1.0, 0.0, 1.0], (1500, n), p=[0.6, 0.3, 0.1])
        found = [probability_of_improvement(row, np.zeros(n)) for row in draws]
        assert np.mean([holds(e, 0.75) for e in found]) >= 0.95


@pytest.mark.parametrize(
    ("won", "n", "low", "high"),
    [
        (5, 5, 0.478, 1.0),  # .025^(1/5)
        (6, 6, 0.541, 1.0),
        (10, 16, 0.354, 0.848),
        (62, 100, 0.517, 0.715),
        (0, 30, 0.0, 0.116),  # the other arm is better
    ],
)
def test_the_interval_is_clopper_and_pearsons(won: int, n: int, low: float, high: float) -> None:
    found = wins(won, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


def test_arms_are_exchanged_by_better_and_by_order() -> None:
    a, b = normal(2, 7)
    there, back = (probability_of_improvement(*arms) for arms in ((a, b), (b, a)))
    assert (back.value, back.low, back.high) == pytest.approx(
        (1 - there.value, 1 - there.high, 1 - there.low)
    )
    assert probability_of_improvement(a, b, better="max") == back


# Power.


def test_the_seeds_for_a_power() -> None:
    assert [seeds_for_power(d) for d in (0.5, 0.8, 1, 1.5, 2)] == [34, 15, 10, 6, 5]
    assert seeds_for_power(-0.8) == 15
    assert (seeds_for_power(1e6), seeds_for_power(0.0), seeds_for_power(0.02)) == (2, None, None)
    assert (seeds_for_power(0.8, power=0.9), seeds_for_power(0.8, alpha=0.01)) == (19, 22)


@pytest.mark.parametrize("alpha", [0.05, 0.005])
@pytest.mark.parametrize("effect", [-0.7, 0.1, 0.3, 1.0, 2.5])
def test_the_power_of_t_tests_is_that_of_statsmodels(effect: float, alpha: float) -> None:
    for n in (2, 3, 8, 40, 1000):
        paired, unpaired = (n - 1, effect * math.sqrt(n)), (2 * n - 2, effect * math.sqrt(n / 2))
        for test, at in ((TTestPower(), paired), (TTestIndPower(), unpaired)):
            ours, known = _power_of_t(*at, alpha), float(test.power(effect, n, alpha))
            if math.isnan(ours) or math.isnan(known):  # scipy's noncentral t, far in its tail
                assert abs(at[1]) > 5 and not known < 0.98
            else:
                assert ours == pytest.approx(known, rel=1e-7)


@pytest.mark.parametrize("effect", [0.5, 2.0])
def test_the_power_is_reached_by_simulation(effect: float) -> None:
    n = seeds_for_power(effect)
    draws = normal(4000, n) + effect
    share = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert 0.78 < share < 0.92
    assert (stats.ttest_1samp(draws[:, :-1], 0.0, axis=1).pvalue < 0.05).mean() < 0.82


def test_the_n_that_would_decide() -> None:
    differences = np.array([1.0, -1.0, 2.0, 0.0, 0.5])
    effect = 0.5 / differences.std(ddof=1)
    found = needed(differences, 0.5)
    assert found == seeds_for_power(effect) == needed(-10 * differences, 5.0)
    for undecidable in ([1.0], [1.0, 1.0], [1.0, inf]):
        assert needed(undecidable, 0.5) is None
    assert needed([1.0, -1.0], 0.0) is None and needed([1.0, -1.0], 1e-3) is None
    # G*Power and R's power.t.test(delta = .5, sd = 1, power = .8): 64 in each arm.
    a = np.array([-1.0, 1.0]) / math.sqrt(2)
    assert needed_unpaired(a, a, 0.5) == needed_unpaired(a, a + 3.0, 0.5) == 64
    assert needed_unpaired(a, a, 0.0) is None and needed_unpaired(a, [1.0], 0.5) is None


@short.parametrize("n", [5, 8, 16])
def test_the_range_of_the_n_that_would_decide_covers_it_in_four_of_five_samples(n) -> None:
    """And of heavy-tailed differences in fewer, as the docstring says."""
    rng = np.random.default_rng(n)
    for draw, deviation, low, high in (
        (rng.standard_normal, 1.0, 0.79, 0.86),
        (lambda size: rng.standard_t(3, size), math.sqrt(3.0), 0.47, 0.73),
    ):
        truth = seeds_for_power(0.5 / deviation)
        covered = 0
        for _ in range(400):
            found = needed(draw(n), 0.5)
            assert found is not None and truth is not None
            first, last = needed_range(found, n - 1)
            assert first <= found <= last
            covered += first <= truth <= last
        assert low - 0.05 < covered / 400 < high + 0.05


def test_noethers_n() -> None:
    assert NOETHER == math.ceil((2 * stats.norm.ppf(0.95)) ** 2 / (6 * (0.75 - 0.5) ** 2))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 and 1 values"):
        probability_of_improvement([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="1 of 2 values are NaN"):
        welch([1.0, np.nan], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one number"):
        welch([], [])
    with pytest.raises(ValueError, match="'min' or 'max', got 'lower'"):
        probability_of_improvement([1.0, 2.0], [1.0, 3.0], better="lower")
    with pytest.raises(ValueError, match="at least one number, got the shape \\(1, 2\\)"):
        mean_interval([[1.0, 2.0]])
    with pytest.raises(ValueError, match="'min' or 'max', got 'up'"):
        one_sample([1.0, 2.0], 0.0, "up")
