"""The rule of decision, against scipy's tests, integrals, and rates known from simulation."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from trainer.report.statistics.decide import (
    Looks,
    _fisher_test,
    collapsed,
    decide,
    detectable_effect,
    e_of_signs,
    e_of_t,
    fewest_signs,
    fewest_units,
    looks_after_change,
    looks_at_any,
    looks_of_plan,
    relevance,
)
from trainer.report.statistics.estimates import two_way

DRAWS = 20_000


def normal(effect: float, units: int, draws: int = DRAWS, seed: int = 1) -> np.ndarray:
    """Returns draws of two arms whose paired differences have standard deviation 1."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((draws, 2, units)) / math.sqrt(2)
    values[:, 0] -= effect
    return values


def test_the_planned_look_is_scipys_paired_t_test_at_four_percent_over_the_pairs() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 7)) + np.array([0.0, 0.1, 1.0, 3.0])[:, None]
    found = decide(values, looks_of_plan(7))
    assert found.pairs == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    for index, (a, b) in enumerate(found.pairs):
        test = stats.ttest_1samp(values[a] - values[b], 0.0)
        interval = test.confidence_interval(1 - 0.04 / 6)
        assert found.p[index] == pytest.approx(min(1.0, 1.25 * 6 * test.pvalue))
        assert found.low[index] == pytest.approx(interval.low)
        assert found.high[index] == pytest.approx(interval.high)
        assert found.difference[index] == pytest.approx(np.mean(values[a] - values[b]))
    assert found.decided.tolist() == [0, 0, -1, 0, -1, -1]


def test_a_difference_is_decided_exactly_where_its_interval_excludes_zero_and_p_is_small() -> None:
    for looks in (looks_of_plan(5), looks_of_plan(5, (8, 12)), looks_at_any(12)):
        for effect in (0.0, 1.0):
            found = decide(normal(effect, 12), looks)
            excludes = (found.low > 0) | (found.high < 0)
            assert (excludes == (found.decided != 0)).all()
            assert ((found.p < 0.05) == (found.decided != 0)).all()
            assert (found.decided * found.difference >= 0).all()


@pytest.mark.parametrize(("t", "n"), [(0.0, 2), (0.7, 3), (4.0, 8), (-6.0, 5), (3.0, 40)])
def test_the_e_value_of_t_is_its_bayes_factor_with_a_normal_prior(t: float, n: int) -> None:
    def weighted(effect: float) -> float:
        prior = stats.norm.pdf(effect, scale=2.0)  # variance 1 / c, c = 1/4
        return float(stats.nct.pdf(t, n - 1, effect * math.sqrt(n)) * prior)

    marginal, _ = integrate.quad(weighted, -12, 12, points=[t / math.sqrt(n)], limit=200)
    assert e_of_t(t, n) == pytest.approx(marginal / stats.t.pdf(t, n - 1), rel=1e-5)


def test_the_e_value_of_signs_is_its_bayes_factor_with_jeffreys_prior() -> None:
    for wins, losses in ((0, 0), (6, 0), (5, 3), (10, 1)):
        density = stats.beta(wins + 0.5, losses + 0.5)
        # Bayes' rule at one half: posterior / prior = likelihood / marginal likelihood.
        expected = stats.beta(0.5, 0.5).pdf(0.5) / density.pdf(0.5)
        assert e_of_signs(wins, losses) == pytest.approx(expected)


def test_later_intervals_end_where_the_e_value_of_the_mean_is_the_bound() -> None:
    values = np.random.default_rng(3).standard_normal((2, 9))
    found = decide(values, Looks(None, (9,)), comparisons=3)
    differences = values[0] - values[1]
    for end in (found.low[0], found.high[0]):
        t = stats.ttest_1samp(differences, end).statistic
        assert e_of_t(t, 9) == pytest.approx(300.0)
    assert found.p[0] == pytest.approx(
        min(1, 5 * 3 / e_of_t(stats.ttest_1samp(differences, 0).statistic, 9))
    )


@pytest.mark.long
def test_looking_after_every_unit_is_wrong_in_three_percent_and_has_its_known_power() -> None:
    """The rates that FACTS gives for c = 1/4 and e >= 20, from another simulation."""
    values = normal(0.0, 64)
    found = np.zeros(DRAWS, bool)
    for units in range(3, 65):
        found |= decide(values, Looks(None, (units,), later_level=0.05)).decided[:, 0] != 0
    assert found.mean() == pytest.approx(0.029, abs=0.004)
    at_once = (decide(values, looks_at_any(64)).decided != 0).mean()
    assert 0.015 < at_once <= found.mean()  # without claims that later looks contradict
    for effect, powers in ((1.5, {5: 0.22, 8: 0.56, 16: 0.98}), (2.0, {5: 0.41, 8: 0.86})):
        values = normal(effect, 16)
        for units, power in powers.items():
            look = Looks(None, (units,), later_level=0.05)
            share = (decide(values, look).decided < 0).mean()
            assert share == pytest.approx(power, abs=0.01)


def test_a_plan_that_is_extended_keeps_its_known_power() -> None:
    """A t test at .04, then e >= 100, at d = 1.5 and n = 5, 10, 16 units: .66, .69, .93."""
    values = normal(1.5, 16)
    shares = [
        (decide(values, looks).decided < 0).mean()
        for looks in (looks_of_plan(5), looks_of_plan(5, (10,)), looks_of_plan(5, (10, 16)))
    ]
    assert shares == pytest.approx([0.66, 0.69, 0.93], abs=0.015)


def test_an_extension_needs_an_e_value_of_one_hundred_for_each_pair() -> None:
    rng = np.random.default_rng(8)
    values = rng.standard_normal((2000, 2, 12))
    values[:, 0] -= 2.4
    t = stats.ttest_1samp(values[:, 0] - values[:, 1], 0.0, axis=1).statistic
    e = e_of_t(t, 12)
    for looks, bound in (
        (Looks(None, (12,)), 100),
        (looks_after_change(1, (12,)), 200),
        (looks_after_change(3, (12,)), 800),
    ):
        assert ((decide(values, looks).decided[:, 0] != 0) == (e > bound)).all()
        several = decide(values, looks, comparisons=6).decided[:, 0]
        assert ((several != 0) == (e > 6 * bound)).all()
    assert 100 < np.median(e) < 10_000  # or the bounds above would decide all or nothing


def test_diverged_runs_are_the_worst_for_either_direction_of_the_goal() -> None:
    worst = [math.inf] * 4
    found = decide([worst, [1.0, 1.1, 1.2, 1.3]], looks_of_plan(4))
    assert found.decided.tolist() == [1] and found.test.tolist() == ["diverged"]
    assert math.isnan(found.p[0]) and math.isnan(found.low[0])
    found = decide([[-math.inf] * 4, [1.0, 1.1, 1.2, 1.3]], looks_of_plan(4), "max")
    assert found.decided.tolist() == [-1]
    three = decide([worst[:3], [1.0, 1.1, 1.2]], looks_of_plan(3))
    assert three.decided.tolist() == [0] and three.test.tolist() == [""]
    # Over three pairs four units are too few, also for an arm that diverged in all of them.
    four = decide([worst, [1.0, 1.1, 1.2, 1.3]], looks_of_plan(4), comparisons=3)
    assert four.decided.tolist() == [0] and four.test.tolist() == [""]
    # A run of the other arm diverged as well: that is no case without a test.
    other = decide([worst, [1.0, 1.1, math.inf, 1.3]], looks_of_plan(4))
    assert other.decided.tolist() == [0]


@pytest.mark.parametrize(("later", "level"), [(False, 0.04), (True, 0.01)])
@pytest.mark.parametrize("pairs", [1, 3, 6, 15, 28])
def test_a_look_decides_from_the_units_on_at_which_fishers_exact_test_can(later, level, pairs):
    fewest = fewest_units(level / pairs)
    known = {False: [4, 5, 6, 6, 7], True: [5, 6, 7, 7, 8]}[later]
    assert fewest == known[[1, 3, 6, 15, 28].index(pairs)]
    for n in (fewest - 1, fewest):
        table = [[n, 0], [0, n]]  # diverged or not, of one arm and of the other
        assert (stats.fisher_exact(table).pvalue <= level / pairs) == (n == fewest)
        looks = Looks(None, (n,)) if later else looks_of_plan(n)
        # The smallest differences against which their spread is nothing.
        values = np.array([np.linspace(0, 1e-6, n), np.linspace(1, 1 + 3e-6, n)])
        for x, y in (values, ([math.inf] * n, values[1])):
            found = decide([x, y], looks, comparisons=pairs)
            assert (found.decided[0] != 0) == (n == fewest)
        assert math.isnan(decide(values, looks, comparisons=pairs).p[0]) == (n < fewest)


def test_signs_decide_from_the_units_on_that_are_recommended() -> None:
    for pairs, known in zip((1, 3, 6, 15, 28), (6, 8, 9, 10, 11), strict=True):
        assert fewest_signs(0.04 / pairs) == known
        for n in (known - 1, known):
            a, b = [1.0] * n, [math.inf, *np.linspace(2, 3, n - 1)]
            found = decide([a, b], looks_of_plan(n), comparisons=pairs)
            assert (found.decided[0] != 0) == (n == known)
            sign = stats.binomtest(n, n).pvalue
            assert (sign < 0.04 / pairs) == (n == known)


def test_a_look_with_too_few_units_counts_neither_then_nor_later() -> None:
    worst, fine = [math.inf] * 10, np.linspace(1, 2, 10)
    # Three planned units are too few, and five later ones the first that can decide.
    for revisions, decided in (((), 0), ((4,), 0), ((4, 5), 1), ((4, 5, 10), 1)):
        found = decide([worst, fine], looks_of_plan(3, revisions))
        assert found.decided.tolist() == [decided], revisions
    assert looks_of_plan(3, (4, 5, 10)).deciding(1) == Looks(None, (5, 10))
    assert looks_of_plan(3, (4, 5, 10)).deciding(3) == Looks(None, (10,))


def test_a_partly_diverged_pair_is_decided_by_signs_from_six_units_on() -> None:
    a, b = [1.0] * 6, [2.0, 2.1, 2.2, math.inf, 2.4, 2.5]
    found = decide([a, b], looks_of_plan(6))
    sign = stats.binomtest(6, 6).pvalue
    assert found.test.tolist() == ["signs"]
    assert found.p[0] == pytest.approx(1.25 * sign)
    assert found.decided.tolist() == [-1]
    assert math.isnan(found.difference[0])
    assert decide([a[:5], b[:5]], looks_of_plan(5)).test.tolist() == [""]
    # Over three pairs six signs are too few.
    assert decide([a, b], looks_of_plan(6), comparisons=3).decided.tolist() == [0]


def test_a_unit_that_gained_less_than_half_of_the_median_unit_collapsed() -> None:
    """Over the metric before the first step; the median is that of both arms."""
    a, b = [0.30, 0.31, 2.30, 0.29, 0.30], [0.32, 0.33, 0.31, 1.307, 0.34]
    # Gains over 2.3, of which the median is (1.98 + 1.99) / 2: half of it is reached at 1.3075.
    first, second = collapsed(a, b, (2.3, 2.3))
    assert first.tolist() == [False, False, True, False, False]
    assert not second.any()
    assert collapsed(a, [*b[:3], 1.308, b[4]], (2.3, 2.3))[1].tolist() == [0, 0, 0, 1, 0]
    # Of an accuracy, larger values are gains, also where the arms begin elsewhere.
    first, second = collapsed([0.9, 0.5, 0.8], [0.9, 0.8, 0.1], (0.1, 0.1), "max")
    assert (first.tolist(), second.tolist()) == ([False] * 3, [False, False, True])
    assert collapsed([0.9, 0.5, 0.8], [0.9, 0.8, 0.1], (0.4, 0.1), "max")[0].tolist() == [0, 1, 0]
    # Where the median unit gained nothing, or the metric before is not known, only inf counts.
    for initial in (0.2, math.nan):
        first, second = collapsed([0.3, math.inf], [0.3, 0.4], (initial, initial))
        assert (first.tolist(), second.tolist()) == ([False, True], [False, False])


def test_with_a_collapsed_unit_signs_and_fishers_test_decide_at_half_of_the_level() -> None:
    rng = np.random.default_rng(3)
    fine = 0.3 + 0.01 * rng.standard_normal((2, 12))
    for n, gone, which in ((10, 6, "fisher"), (10, 5, "signs"), (12, 1, "signs")):
        a, b = fine[0, :n].copy(), fine[1, :n] + 0.2
        a[:gone] = 2.3
        found = decide([a, b], looks_of_plan(n), initial=[2.3, 2.3])
        table = stats.fisher_exact([[gone, n - gone], [0, n]]).pvalue
        wins = int((np.where(np.arange(n) < gone, np.inf, a) < b).sum())
        signs = stats.binomtest(wins, n).pvalue
        # So few that Fisher's test could not decide leave the whole level to signs.
        p = 2 * min(table, signs) if table < 0.02 else signs
        assert found.test.tolist() == [which]
        assert found.p[0] == pytest.approx(min(1.0, 1.25 * p))
        assert np.isnan([found.difference[0], found.low[0], found.high[0]]).all()
        assert (found.decided[0] != 0) == (p < 0.04)
        # Without the metric before the first step they are values as others.
        assert decide([a, b], looks_of_plan(n)).test.tolist() == ["t"]


def test_fishers_test_of_equally_many_units_is_scipys() -> None:
    for n in (3, 5, 8, 13):
        a, b = np.divmod(np.arange((n + 1) ** 2), n + 1)
        known = [
            stats.fisher_exact([[i, n - i], [j, n - j]]).pvalue for i, j in zip(a, b, strict=True)
        ]
        assert _fisher_test(a, b, n) == pytest.approx(np.array(known), rel=1e-9)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_equal_arms_of_which_some_units_collapse_are_rarely_told_apart(share: float) -> None:
    """A t test is as wrong as their failures are rare: they are a tail."""
    for units in (5, 6, 8, 10):
        rng = np.random.default_rng(units)
        values = 0.3 + 0.01 * rng.standard_normal((DRAWS, 2, units))
        values += np.where(rng.random(values.shape) < share, 2.0, 0.0)
        found = decide(values, looks_of_plan(units), initial=[2.303, 2.303])
        assert (found.decided != 0).mean() < 0.043


def test_equal_differences_are_no_proof_without_spread() -> None:
    """Five accuracies that all differ by one example have an infinite t."""
    a = np.array([0.97, 0.975, 0.9725, 0.98, 0.9675])
    assert decide([a, a + 1 / 360], looks_of_plan(5), "max").decided.tolist() == [0]
    same = decide([a, a], looks_of_plan(5), "max")
    assert same.difference.tolist() == [0.0] and same.decided.tolist() == [0]


def test_skewed_differences_are_judged_once_at_a_stricter_level() -> None:
    looks = looks_of_plan(8, (16,), skewed=True)
    values = normal(1.2, 16)
    found = decide(values, looks)
    t = stats.ttest_1samp(values[:, 0, :8] - values[:, 1, :8], 0.0, axis=1)
    assert ((found.decided[:, 0] != 0) == (t.pvalue < 0.034)).all()


def test_looks_that_contradict_each_other_decide_nothing() -> None:
    first = np.full(5, -1.0) + np.array([0.01, -0.01, 0.02, -0.02, 0.0])
    then = np.full(40, 3.0) + np.tile([0.01, -0.01], 20)
    values = np.stack([np.concatenate([first, then]), np.zeros(45)])
    assert decide(values, looks_of_plan(5)).decided.tolist() == [-1]
    both = decide(values, looks_of_plan(5, (45,)))
    assert both.decided.tolist() == [0] and both.p[0] == 1.0


def test_a_difference_of_given_size_is_found_with_the_power_that_is_promised() -> None:
    for units in (4, 5, 8):
        effect = detectable_effect(units, alpha=0.04)
        assert effect is not None
        share = (decide(normal(effect, units), looks_of_plan(units)).decided < 0).mean()
        assert share == pytest.approx(0.8, abs=0.01)
    assert detectable_effect(1) is None


@pytest.mark.parametrize(
    ("values", "looks", "message"),
    [
        ([[1.0, 2.0], [math.nan, 1.0]], looks_of_plan(2), "NaN"),
        ([[1.0, 2.0], [2.0, 1.0]], looks_of_plan(3), "need 2 units or more, and have 2"),
        ([[1.0, 2.0]], looks_of_plan(2), "two arms"),
    ],
)
def test_what_cannot_be_decided_is_refused(values: list, looks: Looks, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(values, looks)


def test_the_kinds_of_relevance_follow_the_interval_of_the_improvement() -> None:
    low = [1.1, 0.1, 0.1, -0.5, -1.5, 0.5, math.nan]
    high = [2.0, 0.9, 1.5, 0.5, 0.5, 1.0, math.nan]
    kinds = relevance(low, high, 1.0).tolist()
    assert kinds == ["more", "less", "better", "equivalent", "open", "better", "open"]


@pytest.mark.parametrize("units", [3, 5, 8])
def test_the_two_way_interval_covers_where_seeds_alone_do_not(units: int) -> None:
    rng = np.random.default_rng(units)
    covered = alone = 0
    for _ in range(1000):
        # The examples are shared by all units, and vary more than units do.
        table = 0.5 * rng.standard_normal((1, 360)) + 0.02 * rng.standard_normal((units, 1))
        table = table + 0.3 * rng.standard_normal((units, 360))
        result = two_way(table)
        assert result.low is not None and result.high is not None
        covered += result.low < 0 < result.high
        interval = stats.ttest_1samp(table.mean(1), 0.0).confidence_interval(0.95)
        alone += interval.low < 0 < interval.high
    assert 0.93 <= covered / 1000 <= 0.985
    assert alone / 1000 < 0.92


def test_the_two_way_variance_is_that_of_the_random_effects_model() -> None:
    """Unbiased for the true variance of the mean, as Owen's two-factor model gives it."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        table = 0.2 * rng.standard_normal((1, 50)) + 0.1 * rng.standard_normal((8, 1))
        table = table + rng.standard_normal((8, 50))
        result = two_way(table)
        assert result.units_deviation is not None and result.examples_deviation is not None
        found.append((result.units_deviation**2, result.examples_deviation**2))
    of_units, of_examples = np.mean(found, 0)
    assert of_units == pytest.approx(0.1**2 / 8 + 1 / 400, rel=0.05)
    assert of_examples == pytest.approx(0.2**2 / 50 + 1 / 400, rel=0.05)


def test_a_table_without_spread_or_with_a_single_row_has_no_two_way_interval() -> None:
    assert two_way([[1.0, 1.0], [1.0, 1.0]]).low is None
    assert two_way([[1.0, 2.0]]).low is None
    with pytest.raises(ValueError, match="table"):
        two_way([1.0, 2.0])


def test_weighted_examples_have_the_interval_of_a_ratio() -> None:
    """Sequences of 1 to 60 tokens: the mean over tokens varies with the lengths, too."""
    rng = np.random.default_rng(3)
    covered = unweighted = 0
    for _ in range(1000):
        lengths = rng.integers(1, 60, 300)
        # A difference that is larger for short sequences. Its mean over all tokens is 0: there are
        # 30 in a sequence on average.
        of_example = 6 / lengths - 6 / 30
        of_example = of_example + 0.5 * rng.standard_normal(300)
        table = of_example + 0.03 * rng.standard_normal((5, 1))
        table = table + 0.3 * rng.standard_normal((5, 300))
        result = two_way(table, weights=lengths)
        assert result.low is not None and result.high is not None
        np.testing.assert_allclose(
            result.difference, np.average(table, axis=1, weights=lengths).mean(), atol=1e-12
        )
        covered += result.low < 0 < result.high
        plain = two_way(table)
        assert plain.low is not None and plain.high is not None
        unweighted += plain.low < 0 < plain.high
    assert 0.93 <= covered / 1000 <= 0.985
    assert unweighted / 1000 < 0.5


def test_equal_weights_change_nothing_and_others_must_fit() -> None:
    table = np.random.default_rng(0).standard_normal((3, 20))
    plain, weighted = two_way(table), two_way(table, weights=np.full(20, 7.0))
    for name, value in plain._asdict().items():
        assert weighted._asdict()[name] == pytest.approx(value), name
    for wrong in (np.ones(19), np.zeros(20), np.full(20, math.nan)):
        with pytest.raises(ValueError, match="20 positive weights"):
            two_way(table, weights=wrong)
