"""The sensitivity to the learning rate, and whether the best value lies on an edge."""

from math import inf

import numpy as np
import pytest

from trainer.report.statistics.estimates import edge, sensitivity

LOSSES = [3.2, 3.1, 3.0, 3.0, 3.1, 4.0, inf]


def test_on_an_even_grid_it_is_the_papers_mean() -> None:
    rates = 10.0 ** np.linspace(-4, -1, 7)
    assert sensitivity(rates, LOSSES, initial_loss=10.0) == pytest.approx(1.2)
    order = np.random.default_rng(0).permutation(7)
    assert sensitivity(rates[order], np.array(LOSSES)[order], 10.0) == pytest.approx(1.2)
    # The trapezoidal rule counts both ends half.
    excess = np.minimum(LOSSES, 10.0) - 3.0
    assert np.trapezoid(excess, np.log(rates)) / np.log(1e3) == pytest.approx(0.8)


def test_uneven_rates_count_with_their_part_of_the_logarithmic_range() -> None:
    # Logarithms 0, 1, 3: the middles are at .5 and 2, the ends at -.5 and 4.
    rates, losses = np.exp([0.0, 1.0, 3.0]), [2.0, 1.0, 4.0]
    assert sensitivity(rates, losses, 10.0) == pytest.approx((1.0 * 1 + 0.0 * 1.5 + 3.0 * 2) / 4.5)


def test_many_random_rates_approach_the_mean_over_the_range() -> None:
    logs = np.random.default_rng(0).uniform(-4.0, 0.0, 4000)
    value = sensitivity(np.exp(logs), (logs + 1.0) ** 2, 100.0)
    assert value == pytest.approx((3.0**3 + 1.0**3) / 3 / 4, rel=1e-2)


def test_trials_of_one_rate_are_averaged() -> None:
    rates = [1e-3, 1e-3, 1e-2, 1e-2, 1e-1]
    assert sensitivity(rates, [2.0, 4.0, 1.0, 1.0, inf], 5.0) == pytest.approx((2 + 0 + 4) / 3)


def test_losses_are_cut_at_the_initial_one() -> None:
    rates = [1e-3, 1e-2, 1e-1]
    assert sensitivity(rates, [1.0, 7.0, inf], 2.0) == pytest.approx((0 + 1 + 1) / 3)
    assert (
        sensitivity(rates, [5.0, 7.0, inf], 2.0) == 0.0
    )  # nothing was gained, nothing can be lost
    assert sensitivity(rates, [1.0, 1.0, 1.0], 2.0) == 0.0


def test_without_two_rates_or_a_finite_loss_there_is_none() -> None:
    assert sensitivity([0.1], [1.0], 2.0) is None
    assert sensitivity([0.1, 0.1], [1.0, 2.0], 2.0) is None
    assert sensitivity([0.1, 0.2], [inf, inf], 2.0) is None


@pytest.mark.parametrize(
    ("rates", "losses", "initial", "message"),
    [
        ([0.1, 0.0], [1, 2], 3.0, "positive and finite"),
        ([0.1, inf], [1, 2], 3.0, "positive and finite"),
        ([0.1, 0.2], [1], 3.0, "2 learning rates and 1 losses"),
        ([0.1, 0.2], [1, np.nan], 3.0, "1 of 2 values are NaN"),
        ([0.1, 0.2], [1, 2], inf, "initial loss must be finite, got inf"),
        ([], [], 3.0, "at least one number"),
    ],
)
def test_bad_values_are_refused(rates: list, losses: list, initial: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sensitivity(rates, losses, initial)


@pytest.mark.parametrize(
    ("values", "best", "low", "high", "log", "end"),
    [
        ([1e-3, 1e-2, 1e-1], 0, 1e-3, 1e-1, True, "low"),
        ([1e-3, 1e-2, 1e-1], 1, 1e-3, 1e-1, True, None),
        ([1e-1, 1e-2, 1e-3], 0, 1e-3, 1e-1, True, "high"),
        # The outermost value of a random sample, well inside of the space: no edge.
        ([0.2, 0.5, 0.8], 0, 0.0, 1.0, False, None),
        ([0.2, 0.5, 0.8], 2, 0.0, 1.0, False, None),
        ([0.001, 0.003, 0.0096], 2, 0.0003, 0.03, True, None),
        # Not the outermost, but in the outermost 5%: of the logarithm on a logarithmic axis.
        ([0.001, 0.04, 0.5, 0.9], 1, 0.0, 1.0, False, "low"),
        ([0.001, 0.06, 0.5, 0.9], 1, 0.0, 1.0, False, None),
        ([1e-4, 1.4e-4, 1e-2, 1.0], 1, 1e-4, 1.0, True, "low"),
        ([1e-4, 1.7e-4, 1e-2, 1.0], 1, 1e-4, 1.0, True, None),
        ([0.1, 0.5, 0.96, 0.99], 2, 0.0, 1.0, False, "high"),
        ([0.1, 0.5, 0.94, 0.99], 2, 0.0, 1.0, False, None),
        # Two values have no middle; repeated ones are one.
        ([0.9, 0.99], 1, 0.9, 0.99, False, None),
        ([0.9, 0.99, 0.99, 0.9], 1, 0.9, 0.99, False, None),
    ],
)
def test_the_edge_of_a_range(
    values: list[float], best: int, low: float, high: float, log: bool, end: str | None
) -> None:
    assert edge(values, best, low, high, log) == end


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="is not the range of an axis"):
        edge([1.0, 2.0, 3.0], 0, 1.0, 1.0, False)
    with pytest.raises(ValueError, match="is not the range of a log axis"):
        edge([1.0, 2.0, 3.0], 0, 0.0, 1.0, True)
