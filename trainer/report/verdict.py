"""Says in sentences which arm is better, and how sure that is."""

from collections.abc import Sequence

from trainer.messages import plural
from trainer.report.pairs import Pair, level_text, standings
from trainer.report.results import Workload
from trainer.report.statistics import Estimate
from trainer.report.wording import joined, p_text, shown

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
    if first.valueless:
        return f"Not decided: every arm has runs without a value, so that none has a mean {words}."
    if len(ordered) == 1:
        return (
            f"{first.arm} is the only arm with results: its mean {words} is"
            f" {estimate_text(first.mean)}. There is nothing to compare it with."
        )
    involved = [pair for pair in pairs if first.arm in (pair.better, pair.worse)]
    against = [pair for pair in involved if pair.decided and pair.better == first.arm]
    others = [pair for pair in involved if pair not in against]
    if not others:
        closest = against[0]
        rest = ["", " and the other arm"]
        more = rest[len(against) - 1] if len(against) < 3 else f" and the other {len(against) - 1}"
        return (
            f"{first.arm} is better than {closest.worse}{more}: its"
            f" {_how(closest, workload, pairs, '')}.{_cost(workload, first.arm, closest.worse)}"
        )
    names = [pair.worse if pair.better == first.arm else pair.better for pair in others]
    if len(names) > _NAMED:
        names = [f"{len(names)} other arms"]
    text = f"Not decided between {joined([first.arm, *names])}."
    text += f" {_open(others[0], workload, pairs, first.arm)}"
    better = joined([pair.worse for pair in against])
    return text + (f" {first.arm} is better than {better}." if against else "")


def _open(pair: Pair, workload: Workload, pairs: Sequence[Pair], first: str) -> str:
    """Says how two arms differ between which nothing is decided."""
    how = f"The {_how(pair, workload, pairs, f' of {pair.better}')}."
    if pair.better == first:
        return f"{how} {_would_decide(pair, pairs)}".rstrip()
    seeds = plural(pair.n, "compared seed")
    return f"The mean of {first} is the best, but not on the {seeds}. {how}"


def _without_runs(workload: Workload) -> str:
    trials = [run for run in workload.trials if run.end != "missing"]
    finals = [run for run in workload.finals if run.end != "missing"]
    if not trials and not finals:
        return "Not decided: no run has ended."
    row = workload.goal.reported
    if finals and not any(row in run.metrics for run in finals):
        return f"Not decided: no run has the metric {row!r}."
    unused = not any(run.value(workload.goal.selected) is not None for run in trials)
    if trials and len(trials) == len(workload.trials) and unused:
        counts = [f"{sum(r.end == end for r in trials)} {end}" for end in ("diverged", "failed")]
        return f"Not decided: no trial has a value ({joined(counts)})."
    return "Not decided: the winners have not run on fresh seeds yet."


def _how(pair: Pair, workload: Workload, pairs: Sequence[Pair], of: str) -> str:
    """Says by how much the first arm of a pair is better, and how sure that is.

    Args:
        pair: the pair.
        workload: the results.
        pairs: all pairs of the workload.
        of: " of ARM", or "" where the sentence names the arm before.
    """
    seeds, words = plural(pair.n, "seed"), workload.goal.words
    test = f"no test with {seeds}"
    if pair.corrected is not None:
        test = f"{pair.test} over {seeds}, {p_text(pair.corrected)}"
        tested = sum(each.p is not None for each in pairs)
        if tested > 1:
            test += f" after Holm's correction for {tested} pairs"
    if pair.valueless:
        return f"runs{of} rank better, where one without a value is the worst ({test})"
    size = abs(pair.difference.value)
    if size == 0:
        return f"mean {words}{of} is equal to that of {pair.worse} ({test})"
    word = "smaller" if workload.goal.sign > 0 else "larger"
    low, high = pair.difference.low, pair.difference.high
    interval = ""
    if low is not None and high is not None:
        # The difference is better minus worse: the improvement has the other sign for a minimum.
        ends = (-high, -low) if workload.goal.sign > 0 else (low, high)
        interval = f"95% interval {shown(ends[0])} to {shown(ends[1])}; "
    than = f" than that of {pair.worse}" if len(pairs) > 1 else ""
    return f"mean {words}{of} is {word}{than} by {shown(size)} ({interval}{test})"


def _cost(workload: Workload, first: str, second: str) -> str:
    """Says how the FLOPs of a step differ between two arms, if they do by over 5%."""
    flops = [{run.flops for run in workload.finals_of(arm)} for arm in (first, second)]
    if any(len(each) != 1 or not all(each) for each in flops):
        return ""
    ratio = float(flops[0].pop() or 1) / float(flops[1].pop() or 1)
    if 1 / 1.05 < ratio < 1.05:
        return ""
    return f" A step of {first} takes {ratio:.2f} times the FLOPs of one of {second}."


def _would_decide(pair: Pair, pairs: Sequence[Pair]) -> str:
    """Says with how many seeds a difference would be decided, if that can be said."""
    if pair.p is None:
        return "At least two seeds are needed for an interval, and six for a test by signs."
    if pair.difference.low is None or not pair.difference.value:
        return ""
    if pair.needed is None:
        return "No number of seeds up to 10,000 would decide a difference of this size."
    level = f", at the level {level_text(pairs)}" if len(pairs) > 1 else ""
    return (
        f"About {pair.needed:,} seeds would decide a difference of this size with a power of"
        f" 0.8{level}."
    )


def estimate_text(estimate: Estimate) -> str:
    """Returns a mean with its interval, in words."""
    if estimate.low is None or estimate.high is None:
        return f"{shown(estimate.value)} (no interval with {plural(estimate.n, 'seed')})"
    interval = f"{shown(estimate.low)} to {shown(estimate.high)}"
    return f"{shown(estimate.value)} (95% interval {interval}, {plural(estimate.n, 'seed')})"
