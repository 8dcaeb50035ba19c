"""How far segments may be apart where another environment has other bits.

Versions, devices and numbers of cores round otherwise, and training amplifies that. By how much is
measured on segments that are drawn for that alone, before those that are judged are held against
it. Start with `measure`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.studies.claim_segments import Recomputed

# The tolerance is so many times the median difference, because honest segments differ among each
# other: in a perceptron by 50 times, the first ones of a run most.
FACTOR = 100.0
# It is at least as much for the rounding of a float32, and in any case at most WIDEST: whoever
# forged most of what is measured would else choose it.
_ROUNDING, WIDEST = 2.0**-24, 0.01
FEWEST = 3  # segments of which a median says anything


@dataclass(frozen=True)
class Tolerance:
    """The differences that two environments have.

    Attributes:
        measured: the segments on which they were measured.
        median: the median of their largest differences, relative to the values.
    """

    measured: tuple[Recomputed, ...]
    median: float

    @property
    def allowed(self) -> float:
        """How far a metric, or a part of the state, may be apart."""
        return min(FACTOR * max(self.median, _ROUNDING), WIDEST)

    def beyond(self, segment: Recomputed) -> dict[str, float]:
        """Returns what of a segment is further apart than allowed, the furthest first."""
        found = {name: size for name, size in segment.apart.items() if size > self.allowed}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(segments: Sequence[Recomputed]) -> Tolerance:
    """Computes a tolerance from segments that were not drawn to be judged.

    It rests on the median, so that less than half of the segments, if they are forged, cannot widen
    it; and on all metrics and parts of the state together, because the differences of one metric
    are mostly none or one unit of rounding.

    Args:
        segments: at least one.
    """
    sizes = sorted(each.largest for each in segments)
    return Tolerance(tuple(segments), sizes[(len(sizes) - 1) // 2])  # the lower one of two


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
    half of the measured ones are forged, so that the median is that of an honest segment.

    Args:
        total: all segments.
        forged: how many of them are forged, by more than the tolerance that honest ones give.
        measured: how many were drawn for the measurement.
        judged: how many were drawn to be judged.

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
