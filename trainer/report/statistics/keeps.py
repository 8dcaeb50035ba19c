"""Keeps or discards a change by pairs of runs that are added one by one, and by the changes before.

A pair is won if the run with the change is better than its partner of the same seed by more than
the smallest difference that matters. The null hypothesis is that a pair is won with a probability
of at most 1/2: that a typical run is not better by more than that. `e_of_wins` is an e-value
against it after every pair, and e-LOND (Xu and Ramdas, "Online multiple testing with e-values",
2024, arXiv:2311.06412) says how large it must be.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike, NDArray

Verdict = Literal["keep", "discard", "undecided"]


def e_of_wins(wins: ArrayLike, losses: ArrayLike) -> NDArray:
    """Returns the e-value of pairs against a probability of winning of at most 1/2.

    It is the Bayes factor with the prior Beta(1/2, 1/2) for the probability, restricted to the
    probabilities above 1/2. While that of winning is at most 1/2, whatever happened before, it is a
    supermartingale: it ever exceeds 1/a with a probability of at most a.

    >>> e_of_wins([8, 4, 0], [0, 4, 8]).round(3).tolist()
    [100.475, 0.273, 0.071]
    """
    import numpy as np
    from scipy.special import betainc, betaln

    w, k = np.asarray(wins, np.float64) + 0.5, np.asarray(losses, np.float64) + 0.5
    logarithm = (w + k) * math.log(2) + betaln(w, k) - betaln(0.5, 0.5)
    # The restricted prior is twice as large: 2 * 2 ** (wins + losses) is 2 ** (w + k).
    return np.exp(np.minimum(logarithm, 700.0)) * betainc(k, w, 0.5)


@dataclass(frozen=True)
class Levels:
    """The e-values that decide about a change."""

    keep: float  # that of winning, from which on it is kept
    discard: float  # that of losing, from which on it is discarded

    @classmethod
    def of(cls, error: float, most: int, keeps: int) -> "Levels":
        """Returns the levels of a change, of at most `most`, after `keeps` were kept.

        The expected share of keeps that are false is at most `error`, after any number of changes:
        a false keep is at most one part in keeps + 1 of those so far, and its e-value is at least
        most / (error * (keeps + 1)) with a probability of at most the reciprocal.

        >>> Levels.of(error=0.1, most=200, keeps=0), Levels.of(error=0.1, most=200, keeps=3)
        (Levels(keep=2000.0, discard=10.0), Levels(keep=500.0, discard=10.0))
        """
        return cls(most / (error * (keeps + 1)), 1 / error)

    def verdict(self, wins: int, losses: int) -> Verdict:
        """Returns what these pairs decide."""
        if e_of_wins(wins, losses) >= self.keep:
            return "keep"
        return "discard" if e_of_wins(losses, wins) >= self.discard else "undecided"

    def judge(self, won: Iterable[bool]) -> tuple[Verdict, int, int]:
        """Returns the verdict at the first pair that decides, and the wins and losses until it.

        >>> Levels(keep=50, discard=10).judge([True, True, False] + [True] * 20)
        ('keep', 11, 1)
        """
        wins = losses = 0
        for each in won:
            wins, losses = wins + each, losses + (not each)
            if (verdict := self.verdict(wins, losses)) != "undecided":
                return verdict, wins, losses
        return "undecided", wins, losses

    def pairs_to_decision(self, wins: int, losses: int, left: int) -> int:
        """Returns how many more pairs can decide at the earliest; 0 if `left` cannot keep it.

        >>> Levels(keep=2000, discard=10).pairs_to_decision(0, 0, 60)
        5
        """
        if e_of_wins(wins + left, losses) < self.keep:
            return 0
        numbers = range(1, left + 1)
        return next(
            n
            for n in numbers
            if self.verdict(wins + n, losses) == "keep"
            or self.verdict(wins, losses + n) == "discard"
        )

    def power(self, chance: float, pairs: int) -> list[float]:
        """Returns the probability of a keep after 1, 2, ... pairs that are won with a probability.

        >>> round(Levels(keep=2000, discard=10).power(0.84, 46)[-1], 3)
        0.835
        """
        import numpy as np

        found: list[float] = []
        kept, going = 0.0, np.ones(1)  # the probabilities of 0, 1, ... wins without a verdict
        for n in range(1, pairs + 1):
            going = np.append(going * (1 - chance), 0.0) + np.append(0.0, going * chance)
            wins = np.arange(n + 1)
            keep = e_of_wins(wins, n - wins) >= self.keep
            kept += float(going[keep].sum())
            going[keep | (e_of_wins(n - wins, wins) >= self.discard)] = 0.0
            found.append(kept)
        return found


def pairs_needed(levels: Levels, effect: float, power: float = 0.8, most: int = 1000) -> int | None:
    """Returns in how many pairs a change is kept with a power; None if more than `most`.

    `effect` is by how much the mean difference exceeds the smallest one that matters, in standard
    deviations of a normal difference.

    >>> [pairs_needed(Levels(keep=2000, discard=10), effect) for effect in (0.5, 1.0, 1.5)]
    [167, 46, 23]
    """
    from scipy.special import ndtr

    # The first numbers of pairs are looked at before more: it takes a time of their square.
    for pairs in (most // 20, most):
        found = levels.power(float(ndtr(effect)), pairs)
        if found[-1] >= power:
            return next(n for n, kept in enumerate(found, 1) if kept >= power)
    return None


def typical_difference(differences: ArrayLike, error: float = 0.05) -> tuple[float, float] | None:
    """Returns an interval of the median of independent differences, after any number of them.

    It has the values that no e-value contradicts, and covers the median of every sequence with a
    probability of 1 - `error` whenever one looks; also of values that are infinite. It is None
    where so few differences exclude nothing.

    >>> typical_difference([0.5, 0.1, 0.3, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2])
    (0.2, 1.1)
    """
    import numpy as np

    values = np.sort(np.asarray(differences, np.float64))
    n, level = len(values), 2 / error
    above = np.arange(n, 0, -1)  # of a median just below each value
    excluded = int((e_of_wins(above, n - above) >= level).sum())
    # Between two values, as many are above as below the one from the other end.
    return (float(values[excluded - 1]), float(values[n - excluded])) if excluded else None
