"""Estimates: of the runs of an arm, of differences, and of how much the learning rate matters."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EDGE = 0.05  # the part of a range, at each end, in which a best value lies at the edge


class Estimate(NamedTuple):
    """A mean with its t interval."""

    value: float
    # the ends of the interval; None for one value, values without spread, or some not finite
    low: float | None
    high: float | None
    n: int
    deviation: float | None  # of the sample (n - 1); None if n is 1 or a value is not finite


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Returns a mean with its t interval.

    Of 95% t intervals of 3, 5, 10 or 20 normal values, 95% cover the mean; of percentile bootstrap
    intervals 74%, 85%, 89% and 92%. Of five lognormal values it is 83% and 73%.

    >>> estimate = mean_interval([1.0, 2.0, 3.0])
    >>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
    (2.0, -0.484, 4.484)
    """
    array = row_of_numbers(values)
    n = len(array)
    with np.errstate(invalid="ignore"):  # of inf and -inf it is not a number
        value = float(array.mean())
    if n == 1 or not np.isfinite(array).all():
        return Estimate(value, None, None, n, None)
    if not spread(array):
        return Estimate(value, None, None, n, 0.0)
    from scipy.special import stdtrit  # imported and called faster than scipy.stats

    deviation = float(array.std(ddof=1))
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation / math.sqrt(n)
    return Estimate(value, value - half, value + half, n, deviation)


def one_sample(values: ArrayLike, target: float, better: str = "min") -> tuple[float, float] | None:
    """Returns t and the one-sided p of a mean that is better than a target; None without spread."""
    from scipy import stats

    side = "less" if direction(better) > 0 else "greater"
    if mean_interval(values).low is None:
        return None
    test: Any = stats.ttest_1samp(row_of_numbers(values), target, alternative=side)
    return float(test.statistic), float(test.pvalue)


def iqm(values: ArrayLike) -> float:
    """Returns the interquartile mean: the mean without the lowest and the highest quarter.

    As in rliable (arXiv:2108.13264), floor(n / 4) values are left out at each end, so that up to
    three values keep all. Diverged runs do not count while they are no more than that.

    >>> iqm([1, 2, 3, 4, 5, 6, 7, 8])
    4.5
    """
    from scipy import stats

    return float(stats.trim_mean(row_of_numbers(values), 0.25))


def row_of_numbers(values: ArrayLike) -> NDArray[np.float64]:
    """Returns values as floats; raises ValueError unless they are a row of numbers without NaN."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"Give one row of at least one number, got the shape {array.shape}.")
    if np.isnan(array).any():
        raise ValueError(
            f"{int(np.isnan(array).sum())} of {array.size} values are NaN. Give a diverged run as"
            " inf, or as -inf where larger is better."
        )
    return array


def direction(better: str) -> int:
    """Returns 1 if `better` is "min" and -1 if it is "max"; raises ValueError if it is neither."""
    if better not in {"min", "max"}:
        raise ValueError(f"better must be 'min' or 'max', got {better!r}.")
    return 1 if better == "min" else -1


def lower_is_better(values: ArrayLike, better: str) -> NDArray[np.float64]:
    """Returns values as floats, with the sign changed if larger ones are better."""
    # Raises what `direction` and `row_of_numbers` raise.
    return direction(better) * row_of_numbers(values)


def spread(values: NDArray[np.float64], scale: float | None = None) -> float:
    """Returns the sample standard deviation, or 0.0 where it consists of rounding errors."""
    # The values are at least two finite numbers. `scale` is the largest number that they were
    # computed from; None for their own largest.
    deviation = float(values.std(ddof=1))
    scale = float(np.abs(values).max()) if scale is None else scale
    return deviation if deviation > 1e-12 * scale else 0.0


class Unpaired(NamedTuple):
    """The interval of a difference of means, and the two-sided p of Welch's t test."""

    low: float
    high: float
    p: float


def welch(a: ArrayLike, b: ArrayLike, level: float = 0.05) -> Unpaired | None:
    """Compares two samples of different seeds, with unequal variances allowed (Welch 1947).

    It is None if a sample has a single number, or neither has any spread.

    >>> result = welch([1.0, 2.0, 3.0], [1.5, 2.3, 3.9])
    >>> round(result.p, 4), round(result.low, 3), round(result.high, 3)
    (0.5691, -3.137, 2.004)
    """
    from scipy.special import stdtr, stdtrit

    first, second = row_of_numbers(a), row_of_numbers(b)
    if min(len(first), len(second)) < 2 or not math.hypot(spread(first), spread(second)):
        return None
    # Not scipy's test, which warns about an arm without spread; this one allows it.
    variances = [spread(each) ** 2 / len(each) for each in (first, second)]  # of the means
    error, difference = math.sqrt(sum(variances)), float(first.mean() - second.mean())
    shares = zip(variances, (first, second), strict=True)
    degrees = sum(variances) ** 2 / sum(v**2 / (len(each) - 1) for v, each in shares)
    margin = float(stdtrit(degrees, 1 - level / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error))
    return Unpaired(difference - margin, difference + margin, p)


class Improvement(NamedTuple):
    """The probability that a is better than b, where ties count half."""

    value: float
    low: float
    high: float


def probability_of_improvement(a: ArrayLike, b: ArrayLike, better: str = "min") -> Improvement:
    """Estimates P(A > B): how often a run of one arm is better than a run of the other.

    The paper takes a percentile bootstrap, whose 95% interval for pairs is a point if one arm
    always wins, and which covers P = .9 in 40%, 53%, 80% and 93% of samples at n = 5, 8, 16 and 29.
    Here it is Clopper and Pearson's interval for the number of wins, which covers at least as often
    as it says at every n and P, and decides where a sign test would.

    >>> result = probability_of_improvement([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7])
    >>> result.value, round(result.low, 4), result.high
    (1.0, 0.5407, 1.0)
    """
    from scipy.special import betaincinv

    first, second = lower_is_better(a, better), lower_is_better(b, better)
    if len(first) != len(second):
        raise ValueError(
            f"Paired arms need the same seeds, got {len(first)} and {len(second)} values."
        )
    wins = (first < second) + 0.5 * (first == second)
    won, n, tail = float(wins.sum()), len(wins), (1 - 0.95) / 2  # half a number for ties
    low = float(betaincinv(won, n - won + 1, tail)) if won > 0 else 0.0
    high = float(betaincinv(won + 1, n - won, 1 - tail)) if won < n else 1.0
    return Improvement(float(wins.mean()), low, high)


class TwoWay(NamedTuple):
    """A mean difference with an interval for other units and other examples of the same size."""

    units: int  # the number of searches or seeds
    examples: int
    difference: float  # the mean over both
    # the ends of the interval; None for a single unit or example, or without spread
    low: float | None
    high: float | None
    units_deviation: float | None  # the standard error from the units alone
    examples_deviation: float | None  # that from the examples alone


def two_way(differences: ArrayLike, weights: ArrayLike | None = None) -> TwoWay:
    """Returns the mean of differences [units, examples] of two arms, such as those of the loss.

    docs/statistics.md has the formulas and the simulated coverage. A weighted mean over examples,
    such as one over tokens, is a ratio of two sums that both vary with the examples: its variance
    is that of the linearized ratio (Cochran, "Sampling Techniques", 1977, section 6.3).

    >>> result = two_way([[0.1, 0.5, 0.3], [0.2, 0.4, 0.6]])
    >>> round(result.difference, 3), round(result.low, 3), round(result.high, 3)
    (0.35, -0.136, 0.836)
    """
    table = np.asarray(differences, np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ValueError(f"Give a table [units, examples] of finite numbers: {table.shape}.")
    units, examples = table.shape
    if weights is not None:
        counts = np.asarray(weights, np.float64)
        if counts.shape != (examples,) or not (np.isfinite(counts) & (counts > 0)).all():
            raise ValueError(f"Give {examples} positive weights, one for each example.")
        ratio = np.average(table, axis=1, weights=counts).mean()
        table = counts / counts.mean() * (table - ratio) + ratio
    mean = float(table.mean())
    if min(units, examples) < 2:
        return TwoWay(units, examples, mean, None, None, None, None)
    rows, columns = table.mean(1), table.mean(0)
    scale = float(np.abs(table).max())
    of_units, of_examples = spread(rows, scale) ** 2 / units, spread(columns, scale) ** 2 / examples
    residual = table - rows[:, None] - columns + mean
    both = float((residual**2).sum()) / ((units - 1) * (examples - 1)) / (units * examples)
    variance = max(of_units + of_examples - both, of_units, of_examples)
    errors = math.sqrt(of_units), math.sqrt(of_examples)
    if not variance:
        return TwoWay(units, examples, mean, None, None, *errors)
    from scipy.special import stdtrit

    freedom = variance**2 / (of_units**2 / (units - 1) + of_examples**2 / (examples - 1))
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    return TwoWay(units, examples, mean, mean - half, mean + half, *errors)


def sensitivity(learning_rates: ArrayLike, losses: ArrayLike, initial_loss: float) -> float | None:
    """Returns the mean excess of the loss over its best, over the logarithm of the learning rate.

    It is the mean of min(loss, initial loss) - best loss (arXiv:2309.14322, section 2.2): 0 if
    every rate trains equally well, and no more than what training gained. It depends on the range
    of the rates: compare arms over the same range.

    For rates that are not evenly spaced (random, Halton, Sobol) each counts with the part of the
    logarithmic range that is nearest to it; the first and the last reach as far out as in. On an
    even grid this is the paper's mean.

    Trials of one rate are averaged; the loss of one that diverged is `inf`. It is None with fewer
    than two rates, or if every trial diverged.

    >>> rates = [1e-4, 3e-4, 9e-4, 2.7e-3, 8.1e-3, 2.43e-2, 7.29e-2]
    >>> round(sensitivity(rates, [3.2, 3.1, 3, 3, 3.1, 4, float("inf")], initial_loss=10.0), 6)
    1.2
    """
    rates, values = row_of_numbers(learning_rates), row_of_numbers(losses)
    if len(rates) != len(values):
        raise ValueError(f"Got {len(rates)} learning rates and {len(values)} losses.")
    if not (rates > 0).all() or not np.isfinite(rates).all():
        raise ValueError("Learning rates must be positive and finite for a logarithmic axis.")
    if not math.isfinite(initial_loss):
        raise ValueError(f"The initial loss must be finite, got {initial_loss}.")
    logs, trial_rate = np.unique(np.log(rates), return_inverse=True)
    if len(logs) < 2 or not np.isfinite(values).any():
        return None
    cut = np.minimum(values, initial_loss)
    means = np.bincount(trial_rate, cut) / np.bincount(trial_rate)
    steps = np.diff(logs)
    widths = (np.append(steps, steps[-1]) + np.insert(steps, 0, steps[0])) / 2
    return float(widths @ (means - means.min()) / widths.sum())


def edge(values: ArrayLike, best_index: int, low: float, high: float, log: bool) -> str | None:
    """Returns the end of its range, "low" or "high", at which the best value lies, or None.

    The best value lies at an edge if it is in the outermost 5% of the range (of its logarithm if
    `log`), whether or not a trial had a value beyond it. It is None too if the trials have fewer
    than three different values. `values` are those of each trial on this axis, `best_index` is the
    best trial, and `low` and `high` are the ends of the range.

    >>> edge([0.001, 0.01, 0.1, 1.0], best_index=3, low=0.001, high=1.0, log=True)
    'high'
    """
    array = row_of_numbers(values)
    if len(np.unique(array)) < 3:
        return None
    if not low < high or (log and not low > 0):
        raise ValueError(f"[{low}, {high}] is not the range of {'a log' if log else 'an'} axis.")
    best = min(max(float(array[best_index]), low), high)  # the range may have been changed later
    place = math.log(best / low) / math.log(high / low) if log else (best - low) / (high - low)
    return "low" if place <= _EDGE else "high" if place >= 1 - _EDGE else None


def finite(value: float) -> float | None:
    """Returns a number, None if it is not finite."""
    return value if math.isfinite(value) else None
