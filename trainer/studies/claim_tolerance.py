"""How far segments may be apart where another environment has other bits.

Versions, devices and numbers of cores round otherwise, and training amplifies that: most in the
first steps of a run. By how much is measured on segments that are drawn for that alone, of those
that begin a run and of the others apart. Start with `Tolerance`.
"""

import math
from dataclasses import dataclass

from trainer.studies.claim_segments import Recomputed

# The tolerance is so many times the median difference, because honest segments differ among each
# other: those that begin a run of a small GPT by 75 times, from 8e-5 to 6e-3.
FACTOR = 100.0
# It is at least as much for the rounding of a float32, and in any case at most WIDEST: whoever
# forged most of what is measured would else choose it.
_ROUNDING, WIDEST = 2.0**-24, 0.01
FEWEST = 3  # segments of which a median says anything


@dataclass(frozen=True)
class Tolerance:
    """The differences that two environments have in segments of a kind."""

    # It rests on the median, so that less than half of the segments, if they are forged, cannot
    # widen it; and on all metrics and parts of the state together, because the differences of one
    # metric are mostly none or one unit of rounding.

    measured: tuple[Recomputed, ...]  # on which they were measured; none of them is judged
    begins_run: bool = False  # the kind: whether they begin with the first state of a run
    judged: int = 0  # how many of the kind were drawn to be judged
    total: int = 0  # how many of the kind there are

    @property
    def median(self) -> float:
        """That of the largest differences, relative to the values; the lower one of two."""
        return sorted(each.largest for each in self.measured)[(len(self.measured) - 1) // 2]

    @property
    def allowed(self) -> float:
        """How far a metric, or a part of the state, may be apart."""
        return min(FACTOR * max(self.median, _ROUNDING), WIDEST)

    def beyond(self, segment: Recomputed) -> dict[str, float]:
        """Returns what of a segment is further apart than allowed, the furthest first."""
        found = {name: size for name, size in segment.apart.items() if size > self.allowed}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def caught(total: int, forged: int, count: int) -> float:
    """Returns the probability that a draw has at least one of some forged segments.

    It is 1 - C(total - forged, count) / C(total, count).

    Example:
        >>> round(caught(10, 1, 3), 12)
        0.3
    """
    return 1 - math.comb(total - forged, count) / math.comb(total, count)


def caught_by_tolerance(total: int, forged: int, measured: int, judged: int) -> float:
    """Returns the probability that forged segments are found by a tolerance.

    They are if at least one of them was drawn, for the measurement or to be judged, and less than
    half of the measured ones are forged, so that the median is that of an honest segment. Forged
    are `forged` of `total`, by more than the tolerance that honest ones give.

    Example:
        >>> round(caught_by_tolerance(10, 1, 3, 2), 12)
        0.5
    """
    most = (measured - 1) // 2
    few = sum(
        math.comb(forged, n) * math.comb(total - forged, measured - n) for n in range(most + 1)
    )
    missed = math.comb(total - forged, measured + judged) / math.comb(total, measured + judged)
    return few / math.comb(total, measured) - missed
