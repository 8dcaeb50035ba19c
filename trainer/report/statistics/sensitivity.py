"""How much the learning rate matters, and whether the best one lies at the end of its range."""

import math

import numpy as np
from numpy.typing import ArrayLike

from trainer.report.statistics.estimates import sample

# The part of a range, at each end, in which a best value counts as lying at the edge.
_EDGE = 0.05


def sensitivity(learning_rates: ArrayLike, losses: ArrayLike, initial_loss: float) -> float | None:
    """Returns the mean excess of the loss over its best, over the logarithm of the learning rate.

    It is the mean of min(loss, initial loss) - best loss (arXiv:2309.14322, section 2.2): 0 if
    every rate trains equally well, and no more than what training gained. It depends on the range
    of the rates: compare arms over the same range.

    For rates that are not evenly spaced (random, Halton, Sobol) each counts with the part of the
    logarithmic range that is nearest to it; the first and the last reach as far out as in. On an
    even grid this is the paper's mean. The trapezoidal rule, which counts the first and the last
    half, gives .8 in the example.

    Trials of one rate are averaged; the loss of one that diverged is `inf`. It is None with fewer
    than two rates, or if every trial diverged.

    >>> rates = [1e-4, 3e-4, 9e-4, 2.7e-3, 8.1e-3, 2.43e-2, 7.29e-2]
    >>> round(sensitivity(rates, [3.2, 3.1, 3, 3, 3.1, 4, float("inf")], initial_loss=10.0), 6)
    1.2
    """
    rates, values = sample(learning_rates), sample(losses)
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
    array = sample(values)
    if not low < high or (log and not low > 0):
        raise ValueError(f"[{low}, {high}] is not the range of {'a log' if log else 'an'} axis.")
    if len(np.unique(array)) < 3:
        return None
    best = float(array[best_index])
    if not low < best < high:  # it may lie outside of a range that was changed later
        return "low" if best <= low else "high"
    place = math.log(best / low) / math.log(high / low) if log else (best - low) / (high - low)
    if place <= _EDGE:
        return "low"
    return "high" if place >= 1 - _EDGE else None
