"""Times functions alternately, so that noise of the machine affects all of them."""

import statistics
import time
from collections.abc import Callable, Sequence


def interleave(
    runs: Sequence[Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Runs functions alternately and returns their times; the order is reversed every round.

    Args:
        runs: one function for each side, which runs one round of it to its end.
        rounds: the number of rounds.
        clock: returns seconds, such as time.process_time for the CPU time of all threads.

    Returns:
        For each side the seconds of its rounds.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    sides = list(zip(runs, seconds, strict=True))
    for number in range(rounds):
        for run, taken in sides if number % 2 == 0 else sides[::-1]:
            start = clock()
            run()
            taken.append(clock() - start)
    return seconds


def quartiles(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile of the ratios of the rounds.

    Args:
        ours: one number for each round, at least one.
        theirs: one number for each round, measured next to it.
    """
    # Of neighbours in time, so that a slow change of the machine's speed cancels.
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def report(
    name: str,
    ours: list[float],
    theirs: list[float],
    target: float,
    unit: str,
    other: str = "by hand",
) -> float:
    """Prints the medians, and the median ratio of the rounds with its quartiles.

    Args:
        name: what was measured.
        ours: one number for each round.
        theirs: one number for each round, measured next to it.
        target: the ratio below which the median should be.
        unit: the unit of the numbers, such as "ms".
        other: what the other side is.

    Returns:
        The median ratio.
    """
    low, middle, high = quartiles(ours, theirs)
    print(
        f"{name}: ours {statistics.median(ours):.4g} {unit}, {other} "
        f"{statistics.median(theirs):.4g} {unit}; ratio {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f}, {len(ours)} rounds; target {target})"
    )
    return middle
