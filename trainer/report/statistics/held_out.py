"""The error of a difference that comes from the held-out examples, added to that from seeds."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from trainer.report.statistics.estimates import spread


@dataclass(frozen=True)
class TwoWay:
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

    The variance of the mean is V = Vs + Vi - Vsi, and at least the larger of Vs and Vi: Vs is the
    variance of the S means of units over S, Vi that of the n means of examples over n, and Vsi the
    residual mean square over S n, which both of them contain. The degrees of freedom are
    Satterthwaite's, V^2 / (Vs^2 / (S - 1) + Vi^2 / (n - 1)).

    In simulations with S = 3 to 8 and n = 360 the interval covers 95% to 97%, and an interval over
    seeds alone 87% to 95%: all seeds share their test examples.

    A weighted mean over examples, such as one over tokens, is a ratio of two sums that both vary
    with the examples. Its variance is that of the linearized ratio (Cochran, "Sampling Techniques",
    1977, section 6.3): of the means of w (d - R) / mean(w) with the weighted mean R.

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
