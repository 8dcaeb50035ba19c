"""Says in sentences which arm is better, and how sure that is."""

from collections.abc import Sequence

from trainer.report.pairs import Pair, standings
from trainer.report.results import Workload
from trainer.report.statistics import Estimate
from trainer.report.wording import joined, p_text, plural, shown

_NAMED = 4  # the most arms that a sentence lists


def verdict(workload: Workload, pairs: Sequence[Pair]) -> str:
    """Returns the verdict in a sentence or two; of what there is, if runs are missing.

    Args:
        workload: the results.
        pairs: from `compare_arms`.
    """
    missing = any(run.end == "missing" for run in (*workload.trials, *workload.finals))
    text = _verdict(workload, pairs)
    return f"So far: {text}" if missing and standings(workload) else text


def _verdict(workload: Workload, pairs: Sequence[Pair]) -> str:
    ordered, words = standings(workload), workload.goal.words
    if not ordered:
        return _without_runs(workload)
    first = ordered[0]
    if first.diverged:
        return f"Not decided: runs of every arm diverged, so that none has a mean {words}."
    if len(ordered) == 1:
        return (
            f"{first.arm} is the only arm with results: its mean {words} is"
            f" {estimate_text(first.mean)}. There is nothing to compare it with."
        )
    leading = [pair for pair in pairs if pair.better == first.arm]
    closest = leading[0]
    against = [pair.worse for pair in leading if pair.decided]
    if len(against) == len(leading):
        others = "" if len(leading) == 1 else f" and the other {plural(len(leading) - 1, 'arm')}"
        return (
            f"{first.arm} is better than {closest.worse}{others}: its mean {words} is"
            f" {_by(closest, workload, pairs)}."
        )
    open_pairs = [pair for pair in leading if not pair.decided]
    closest = open_pairs[0]
    others = [pair.worse for pair in open_pairs]
    if len(others) > _NAMED:
        others = [f"{len(others)} other arms"]
    text = (
        f"Not decided between {joined([first.arm, *others])}. The"
        f" mean {words} of {first.arm} is {_by(closest, workload, pairs)}."
        f" {_would_decide(closest)}"
    )
    return text + (f" {first.arm} is better than {joined(against)}." if against else "")


def _without_runs(workload: Workload) -> str:
    ended = [run for run in (*workload.trials, *workload.finals) if run.end != "missing"]
    if ended and all(run.end == "diverged" for run in ended) and len(ended) == len(workload.trials):
        return "Not decided: every trial diverged. Lower learning rates would be a wider space."
    if not ended:
        return "Not decided: nothing is computed yet."
    row = workload.goal.reported
    if workload.finals and not any(row in run.metrics for run in workload.finals):
        return f"Not decided: no run has the metric {row!r}."
    return "Not decided: the winners have not run on fresh seeds yet."


def _by(pair: Pair, workload: Workload, pairs: Sequence[Pair]) -> str:
    """Says by how much the first arm of a pair is better, and how sure that is."""
    word = "smaller" if workload.goal.sign > 0 else "larger"
    than = f" than that of {pair.worse}" if len(pairs) > 1 else ""
    seeds = plural(pair.n, "seed")
    if pair.corrected is None:
        return f"{word}{than} by {shown(abs(pair.difference.value))} (no test with {seeds})"
    test = f"{pair.test} over {seeds}, {p_text(pair.corrected)}"
    tested = sum(each.p is not None for each in pairs)
    if tested > 1:
        test += f" after Holm's correction for {tested} pairs"
    low, high = pair.difference.low, pair.difference.high
    if low is None or high is None:
        return f"{word}{than} ({test}, because runs diverged)"
    # The difference is better minus worse: the improvement has the other sign for a minimum.
    ends = (-high, -low) if workload.goal.sign > 0 else (low, high)
    return (
        f"{word}{than} by {shown(abs(pair.difference.value))} (95% interval {shown(ends[0])} to"
        f" {shown(ends[1])}; {test})"
    )


def _would_decide(pair: Pair) -> str:
    if pair.p is None:
        return "At least two seeds are needed for an interval, and six for a test by signs."
    if pair.needed is None:
        return "No number of seeds up to 10,000 would decide a difference of this size."
    if pair.needed <= pair.n:
        return (
            f"About {pair.needed:,} seeds decide a single difference of this size with a power of"
            " 0.8; the correction over pairs asks for more."
        )
    return (
        f"About {pair.needed:,} seeds would decide a difference of this size with a power of 0.8."
    )


def estimate_text(estimate: Estimate) -> str:
    """Returns a mean with its interval, in words."""
    if estimate.low is None or estimate.high is None:
        return f"{shown(estimate.value)} (no interval with {plural(estimate.n, 'seed')})"
    interval = f"{shown(estimate.low)} to {shown(estimate.high)}"
    return f"{shown(estimate.value)} (95% interval {interval}, {plural(estimate.n, 'seed')})"
