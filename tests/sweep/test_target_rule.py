"""The rule of a target: the table of modded-nanogpt's optimizer track, scipy, and simulations.

TRACK has, for each of the 46 results of June 2026 in records/track_3_optimization/README.md of
KellerJordan/modded-nanogpt, the steps, the mean, the number of runs, and whether its mark says that
it passes.
"""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from trainer.sweep.target_rule import (
    CONFIRMING,
    EARLIEST,
    LASTING,
    LEVEL,
    Exchange,
    Reached,
    RuleName,
    TargetRule,
    earliest,
    lead_of,
    limit_of_added,
    limit_of_planned,
    reached,
    sigma_bound,
)

TRACK = """
3600 3.2777 1 -; 5625 3.2790 1 -; 3500 3.2767 1 -; 4875 3.2741 5 +; 3325 3.2782 10 +
3375 3.2788 20 +; 3325 3.2752 1 +; 3250 3.2778 10 +; 3250 3.2771 8 +; 3250 3.2789 20 +
3225 3.2785 16 +; 3325 3.2790 20 +; 3210 3.2785 10 +; 3150 3.2776 4 +; 3275 3.2785 15 +
3125 3.2784 8 +; 3175 3.2789 20 +; 3225 3.2776 9 +; 3125 3.2780 6 +; 3030 3.2790 30 +
4100 3.2776 4 +; 8225 3.2774 4 +; 3075 3.2790 30 +; 3175 3.2782 10 +; 3040 3.2781 5 +
3090 3.2785 10 +; 3125 3.2782 6 +; 3175 3.2790 25 +; 2990 3.2787 11 +; 2930 3.2784 16 +
2995 3.2789 20 +; 3000 3.2778 9 +; 3375 3.2779 5 +; 2925 3.2781 8 +; 3375 3.2767 2 +
3250 3.2787 10 +; 3250 3.2786 10 +; 2900 3.2786 9 +; 3125 3.2786 20 +; 2890 3.2788 16 +
2875 3.2790 20 +; 2860 3.2789 16 +; 2850 3.2786 13 +; 2750 3.2789 20 +; 2720 3.2786 10 +
2690 3.2783 8 +
"""
RULE = TargetRule(3.28, 0.0013)
EXCHANGE = Exchange(0.0045, 100)


def _rows() -> list[tuple[int, float, int, str]]:
    cells = [row.split() for row in TRACK.replace("\n", ";").split(";") if row.strip()]
    return [(int(steps), float(mean), int(n), mark) for steps, mean, n, mark in cells]


def _result(number: int) -> Reached:
    steps, mean, runs, _ = _rows()[number - 1]
    return Reached(steps, mean, runs, math.nan, math.nan, steps)


def test_the_marks_of_the_track_are_those_of_its_table():
    assert len(_rows()) == 46
    for steps, mean, runs, mark in _rows():
        found = reached(RULE, [steps], np.full((runs, 1), mean), planned=runs)
        assert (found.step == steps) == (mark == "+"), (steps, mean, runs)


@pytest.mark.parametrize(
    ("new", "old", "p"), [(11, 9, 0.69), (16, 14, 0.34), (13, 11, 0.099), (13, 8, 0.029)]
)
def test_pairs_have_the_p_values_of_the_track(new, old, p):
    """Of 16 and 14 its text compares the losses at 3125 steps, 3.2784 and 3.2790."""
    theirs = _result(old)
    if old == 14:
        theirs = Reached(3125, 3.2790, 4, math.nan, math.nan, 3125)
    found = lead_of(RULE, theirs, _result(new), EXCHANGE)
    if old == 14:  # its note has p = .34, from losses that were not rounded
        assert 0.2 < found.p < 0.4 and not found.passes
        return
    assert found.p == pytest.approx(p, abs=0.006) and not found.passes


def test_the_pair_of_the_tracks_text_has_its_statistic():
    found = lead_of(RULE, _result(6), _result(12), EXCHANGE)
    assert found.statistic == pytest.approx(0.00648, abs=5e-6) and found.passes


def test_an_error_of_the_exchange_widens_the_comparison():
    """The variance of the whole difference, by a simulation of means and of the exchange."""
    old, new = _result(6), _result(12)
    exchange = Exchange(0.0045, 100, error=0.0012)
    draws = np.random.default_rng(0).normal(size=(3, 400_000))
    means = RULE.sigma / math.sqrt(20) * draws[:2]
    worth = 0.50 * (0.0045 + 0.0012 * draws[2])
    deviation = np.std(old.mean + means[0] - new.mean - means[1] + worth)
    z = (old.mean - new.mean + 0.5 * 0.0045) / deviation
    found = lead_of(RULE, old, new, exchange)
    assert found.statistic / RULE.sigma == pytest.approx(z, rel=5e-3)
    assert found.p > lead_of(RULE, old, new, EXCHANGE).p


def test_the_e_value_is_the_mixture_of_likelihood_ratios():
    for runs in (1, 2, 8, 50):
        z = limit_of_added(runs, LEVEL)

        def ratio(effect: float, runs: int = runs, z: float = z) -> float:
            return math.exp(effect * z * math.sqrt(runs) - runs * effect**2 / 2)

        mixture, _ = integrate.quad(
            lambda effect, ratio=ratio: 2 * stats.norm.pdf(effect) * ratio(effect), 0, 12
        )
        assert mixture == pytest.approx(1 / LEVEL, rel=1e-6)


def test_runs_that_are_added_until_it_passes_are_seldom_wrong():
    """A mean exactly at the target; after each run somebody looks, up to 400 runs."""
    level, draws = 0.05, 4000
    scores = np.random.default_rng(1).normal(size=(draws, 400)).cumsum(1)
    runs = np.arange(1, 401)
    z = scores / np.sqrt(runs)
    limits = np.array([limit_of_added(n, level) for n in runs])
    wrong = np.mean((z >= limits).any(1))
    naive = np.mean((z >= limit_of_planned(level)).any(1))
    assert wrong < level < naive / 4


def test_a_number_of_runs_that_may_be_chosen_is_wrong_eight_times_as_often():
    """A mean exactly at the target: n from 4 to 40 is tried, or is 8, and more runs are added."""
    rng, chosen, fixed, batches = np.random.default_rng(5), 0.0, 0.0, 10
    rule = TargetRule(0.0, 1.0)
    limits = np.array([rule.limit(n, planned=8) for n in range(8, 41)])
    for _ in range(batches):
        z = rng.normal(size=(50_000, 40)).cumsum(1) / np.sqrt(np.arange(1, 41))
        chosen += np.mean((z[:, 3:] >= rule.limit(8, planned=8)).any(1)) / batches
        fixed += np.mean((z[:, 7:] >= limits).any(1)) / batches
    assert chosen == pytest.approx(0.0083, abs=5e-4)
    assert fixed == pytest.approx(0.0012, abs=1.5e-4)


def test_a_confirmation_undoes_what_a_hundred_tries_do():
    """A hundred configurations at the target, 8 runs each; somebody else runs those that pass."""
    rng, rule, races = np.random.default_rng(6), TargetRule(0.0, 1.0), 20_000
    passes = rng.normal(size=(races, 100)) >= rule.limit(8, planned=8)
    again = rng.normal(size=(races, 100)) >= rule.limit(8, planned=8, level=CONFIRMING)
    assert np.mean(passes.any(1)) == pytest.approx(0.095, abs=0.006)
    assert np.mean((passes & again).any(1)) == pytest.approx(0.005, abs=0.0015)


def test_more_runs_than_were_planned_need_more_evidence():
    rule = TargetRule(0.0, 1.0)
    values = np.full((10, 1), -3.5 / math.sqrt(10))
    assert reached(rule, [1], values, planned=10).step == 1
    assert reached(rule, [1], values, planned=9).step is None


def _curves(draws: int, slope: float, seed: int) -> np.ndarray:
    """Ten runs [draws, 10, 12] whose evaluations have a common part, as those of a run have."""
    rng = np.random.default_rng(seed)
    noise = 0.8 * rng.normal(size=(draws, 10, 1)) + 0.6 * rng.normal(size=(draws, 10, 12))
    return noise + slope * np.arange(11, -1, -1)


def _wrong(name: RuleName, slope: float, target_at: int) -> float:
    """How often a step is claimed at which the expected value is not better than the target."""
    values = _curves(60_000, slope, seed=2).mean(1)
    expected = slope * np.arange(11, -1, -1)
    target = expected[target_at]
    rule = TargetRule(target, 1.0, rule=name)
    first = earliest(name, rule.statistic(values, 10), rule.margin)
    return float(np.mean((first >= 0) & (expected[first] >= target)))


@pytest.mark.long
def test_how_often_the_claim_of_a_step_is_false():
    """The track's curve falls by .85 sigma from one evaluation to the next; then a flat one."""
    for name in (EARLIEST, LASTING):
        assert _wrong(name, 0.85, target_at=8) < 1.3 * LEVEL
    assert _wrong(LASTING, 0.0, target_at=0) < 1.3 * LEVEL
    assert _wrong(EARLIEST, 0.0, target_at=0) > 2 * LEVEL


def test_the_lasting_step_is_the_first_of_those_that_pass_to_the_end():
    values = np.array([[1.0, -9.0, 1.0, -9.0, -9.0]])
    steps = [10, 20, 30, 40, 50]
    first = reached(TargetRule(0.0, 1.0, rule=EARLIEST), steps, values, planned=1)
    last = reached(TargetRule(0.0, 1.0), steps, values, planned=1)
    assert (first.step, last.step) == (20, 40)  # the lasting one is the default


def test_the_largest_value_may_be_the_best():
    rule = TargetRule(0.9, 0.01, better="max")
    found = reached(rule, [1, 2], [[0.92, 0.96], [0.9, 0.95]], planned=2)
    assert found.step == 2 and found.mean == pytest.approx(0.955)
    old, new = (Reached(s, m, 10, 0, 0, s) for s, m in ((200, 0.92), (150, 0.93)))
    assert lead_of(rule, old, new, Exchange(0.01)).passes


def test_a_run_that_diverged_does_not_reach_a_target():
    values = [[3.0, 3.0], [3.0, math.inf]]
    assert reached(TargetRule(3.28, 0.0013, rule=EARLIEST), [1, 2], values, planned=2).step == 1
    assert reached(RULE, [1, 2], values, planned=2).step is None
    assert reached(RULE, [1], [[3.0], [math.inf]], planned=2).step is None


def test_sigma_is_bounded_by_the_chi_square_of_scipy():
    values = np.random.default_rng(3).normal(size=25)
    expected = values.std(ddof=1) * math.sqrt(24 / stats.chi2.ppf(0.1, 24))
    assert sigma_bound(values) == pytest.approx(expected, rel=1e-12)


def test_a_sigma_of_few_runs_is_wrong_less_often_as_a_bound():
    """An entry of ten runs with its mean at the target; the sigma is that of 20 other runs."""
    rng = np.random.default_rng(4)
    draws = 200_000
    deviations = rng.normal(size=(draws, 20)).std(axis=1, ddof=1)
    z = rng.normal(size=draws)
    bound = math.sqrt(19 / stats.chi2.ppf(0.1, 19))
    plug_in = np.mean(z >= limit_of_planned(LEVEL) * deviations)
    bounded = np.mean(z >= limit_of_planned(LEVEL) * deviations * bound)
    assert plug_in > 2 * LEVEL > 2 * bounded


@pytest.mark.parametrize(
    ("values", "why"), [(np.zeros(19), "at least 20"), ([math.inf] * 20, "finite")]
)
def test_a_sigma_of_unfit_runs_is_refused(values, why):
    with pytest.raises(ValueError, match=why):
        sigma_bound(values)


@pytest.mark.parametrize("wrong", [{"loss": 0.0}, {"steps": 0}, {"error": -1.0}])
def test_an_exchange_out_of_its_range_is_refused(wrong):
    with pytest.raises(ValueError, match="exchange is a loss above 0"):
        Exchange(**{"loss": 0.1, **wrong})


def test_results_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 runs were planned, and 2"):
        reached(RULE, [1], [[0.0], [0.0]], planned=3)
    with pytest.raises(ValueError, match="has not reached"):
        lead_of(RULE, _result(1), Reached(None, 3.3, 1, 0, 0, 1), EXCHANGE)
