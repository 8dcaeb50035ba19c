"""Times two functions alternately, so that noise of the machine affects both."""

import statistics
import time
from collections.abc import Callable


def interleave(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Runs two functions alternately and returns their times; the order is swapped every round.

    Args:
        ours: runs one round of the measured side to its end.
        theirs: runs one round of the other side to its end.
        rounds: the number of rounds.
        clock: returns seconds, such as time.process_time for the CPU time of all threads.

    Returns:
        The seconds of each round of `ours`, and of `theirs`.
    """
    seconds: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    for number in range(rounds):
        for run in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            start = clock()
            run()
            seconds[run].append(clock() - start)
    return seconds[ours], seconds[theirs]


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
    # Of neighbours in time, so that a slow change of the machine's speed cancels.
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(
        f"{name}: ours {statistics.median(ours):.4g} {unit}, {other} "
        f"{statistics.median(theirs):.4g} {unit}; ratio {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f}, {len(ratios)} rounds; target {target})"
    )
    return middle
