"""Tuning curves, compared with opda and with all subsets; their bands, by simulation."""

import itertools
import math
import warnings
from math import inf

import numpy as np
import pytest
from scipy import stats

from trainer.report.statistics.best_of_k import (
    _coverage,
    bands,
    expected_best,
    expected_best_v,
    median_best,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # opda's own
    from opda.nonparametric import EmpiricalDistribution


def losses(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(size=size)


def test_the_known_answers() -> None:
    values = [3.0, 1.0, 5.0, 2.0, 4.0]
    curve = expected_best(values, "max")
    assert curve == pytest.approx([3.0, 4.0, 4.5, 4.8, 5.0])
    assert expected_best_v(values, "max")[[0, 1, 2, 4]] == pytest.approx([3, 3.8, 4.2, 4.584])


@pytest.mark.parametrize("better", ["min", "max"])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_curves_are_those_of_opda(size: int, better: str) -> None:
    values, k = losses(size), np.arange(1, size + 1)
    points = EmpiricalDistribution(values)
    minimize = better == "min"
    for ours, theirs in (
        (expected_best, points.u_tuning_curve),
        (expected_best_v, points.v_tuning_curve),
        (median_best, points.quantile_tuning_curve),
    ):
        expected = theirs(k, minimize=minimize)
        if ours is median_best and size % 2 == 0:  # opda takes the smaller of the middle two
            middle = np.sort(values)[size // 2 - 1 : size // 2 + 1]
            expected[0] = middle.min() if minimize else middle.max()
        np.testing.assert_allclose(ours(values, better), expected, rtol=1e-12)


@pytest.mark.parametrize("values", [[0.3, 0.3, 0.1, 2.0, 0.7], [0.3, inf, 0.1, inf, 0.7]])
def test_the_u_statistic_is_the_mean_over_all_subsets(values: list[float]) -> None:
    curve = [
        np.mean([min(subset) for subset in itertools.combinations(values, k)])
        for k in range(1, len(values) + 1)
    ]
    np.testing.assert_allclose(expected_best(values), curve)
    np.testing.assert_allclose(expected_best([-v for v in values], "max"), np.negative(curve))


def test_diverged_trials_make_means_infinite_and_leave_medians() -> None:
    values = [0.5, 0.1, inf, 0.4, inf, inf]
    assert np.isinf(expected_best(values)).tolist() == [True] * 3 + [False] * 3
    assert np.isinf(expected_best_v(values)).all()
    assert median_best(values).tolist() == [0.5, 0.4, 0.4, 0.1, 0.1, 0.1]
    assert median_best(np.negative(values), "max").tolist() == [-0.5, -0.4, -0.4, -0.1, -0.1, -0.1]
    assert median_best([inf, inf, 0.1])[0] == inf
    for curve in (expected_best, expected_best_v, median_best):
        assert np.isinf(curve([inf, inf])).all()


def test_a_curve_of_a_thousand_trials_has_no_rounding_errors() -> None:
    values = losses(1000)
    curve = expected_best(values)
    assert curve[0] == pytest.approx(values.mean(), rel=1e-13)
    assert curve[-1] == values.min()
    assert (np.diff(curve) <= 0).all()
    np.testing.assert_allclose(expected_best(np.full(1000, 0.1)), 0.1, rtol=1e-12)


# The bands.


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64, 140])
def test_the_probability_of_limits_is_kolmogorovs(size: int) -> None:
    ranks = np.arange(1, size + 1)  # scipy's own probability is exact up to 140
    for distance in stats.kstwo(size).ppf([0.1, 0.5, 0.95]):
        low = np.clip(ranks / size - distance, 0.0, 1.0)
        high = np.clip((ranks - 1) / size + distance, 0.0, 1.0)
        expected = stats.kstwo(size).cdf(distance)
        assert _coverage(low, high) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("better", ["min", "max"])
@pytest.mark.parametrize(("size", "confidence"), [(1, 0.9), (5, 0.5), (16, 0.95), (40, 0.8)])
def test_bands_are_those_that_opda_simulates(size: int, confidence: float, better: str) -> None:
    values, k, minimize = losses(size), np.arange(1, size + 1), better == "min"
    below, _, above = EmpiricalDistribution.confidence_bands(
        values,
        confidence,
        a=0.0,
        method="ld_equal_tailed",
        n_jobs=1,
        generator=np.random.default_rng(1),
    )
    low, high = bands(values, confidence, better)
    low = np.maximum(low, 0.0)  # theirs ends at a, the smallest possible value
    # A band of opda that is a little wider or narrower, by its sampling error, has other steps at
    # few k; each differs by one order statistic at most.
    theirs = [band.quantile_tuning_curve(k, minimize=minimize) for band in (above, below)]
    edges = np.concatenate([[0.0], np.sort(values), [inf]])
    for ours, other in zip((low, high), theirs, strict=True):
        apart = np.searchsorted(edges, ours) - np.searchsorted(edges, other)
        assert np.abs(apart).max() <= 1
        assert np.count_nonzero(apart) <= size // 8


def true_medians(size: int) -> np.ndarray:
    """Returns the median best of k uniform numbers."""
    return 1 - 0.5 ** (1 / np.arange(1, size + 1))


@pytest.mark.parametrize(("size", "confidence"), [(5, 0.95), (16, 0.95), (64, 0.8)])
def test_the_whole_band_holds_as_often_as_it_says(size: int, confidence: float) -> None:
    rng, truth, repeats = np.random.default_rng(size), true_medians(size), 1500
    held = narrow = 0
    for _ in range(repeats):
        values = rng.random(size)
        low, high = bands(values, confidence)
        held += bool(((low <= truth) & (truth <= high)).all())
        draws = np.sort(values[rng.integers(0, size, (200, size))], axis=1)
        medians = draws[:, np.ceil(true_medians(size) * size - 1e-9).astype(int) - 1]
        low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
        narrow += bool(((low <= truth) & (truth <= high)).all())
    # It holds for every quantile, and so for the medians of these k at least as often.
    error = 3 * math.sqrt(confidence * (1 - confidence) / repeats)
    assert confidence - error < held / repeats < 1.0
    assert narrow / repeats < confidence - 0.2  # the pointwise bootstrap, at every k at once


def test_a_band_holds_with_ties_and_diverged_trials() -> None:
    # A third of the trials diverge, the others give one of five values.
    size, rng, held = 16, np.random.default_rng(0), 0
    outcomes = np.array([0.1, 0.2, 0.3, 0.4, 0.5, inf])
    chances = np.array([0.05, 0.1, 0.15, 0.2, 1 / 6, 1 / 3])
    truth = outcomes[np.searchsorted(np.cumsum(chances), true_medians(size))]
    for _ in range(1000):
        low, high = bands(rng.choice(outcomes, size, p=chances))
        assert not np.isnan(low).any() and not np.isnan(high).any()
        held += bool(((low <= truth) & (truth <= high)).all())
    assert held >= 940


@pytest.mark.parametrize("size", [1, 2, 9, 100])
@pytest.mark.parametrize("better", ["min", "max"])
def test_a_band_contains_its_curve_and_narrows_with_less_confidence(size: int, better: str) -> None:
    values = losses(size)
    curve = median_best(values, better)
    before = (np.full(size, -inf), np.full(size, inf))
    for confidence in (0.99, 0.9, 0.5):
        low, high = bands(values, confidence, better)
        assert (low <= curve).all() and (curve <= high).all()
        assert (low >= before[0]).all() and (high <= before[1]).all()
        for end in (low, high):
            ordered = np.sort(end) if better == "max" else np.sort(end)[::-1]
            assert end.tolist() == ordered.tolist()
        before = (low, high)


def test_where_trials_set_no_limit_the_band_is_infinite() -> None:
    low, high = bands(losses(5))
    assert low[-1] == -inf and high[0] == inf
    low, high = bands(losses(5), better="max")
    assert low[0] == -inf and high[-1] == inf


def test_bad_values_are_refused() -> None:
    for curve in (expected_best, expected_best_v, median_best, bands):
        with pytest.raises(ValueError, match="at least one number"):
            curve([])
        with pytest.raises(ValueError, match="1 of 2 values are NaN.*as inf"):
            curve([1.0, np.nan])
        with pytest.raises(ValueError, match="'min' or 'max', got 'up'"):
            curve([1.0], better="up")
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        bands([1.0, 2.0], confidence=95)
