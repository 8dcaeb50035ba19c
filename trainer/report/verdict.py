"""Writes the verdict: which arm is better, how sure that is, and what the runs do not show.

Start with `verdict`. The methods of `_Writer` each return a sentence or a part of one.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from trainer.messages import joined, plural
from trainer.report.conditions import conditions
from trainer.report.document import p_sentence, shown
from trainer.report.pairs import (
    ROUNDING,
    EarlierLook,
    Pair,
    Standing,
    looks_of,
    reason_not_to_judge,
    standings,
)
from trainer.report.results import Workload, at_edge, axes_of, scans, winners_at_ends
from trainer.report.statistics import decide

_NAMED = 4  # the most arms that a sentence lists
_LONGEST = 200  # characters of a reason


def verdict(workload: Workload, pairs: Sequence[Pair]) -> str:
    """Returns the verdict as a paragraph: a claim, and what limits it."""
    # With one search an arm, the claim is about the configurations that were found; with several,
    # about the arms. For a workload with missing runs it says what there is so far, and for one
    # whose files disagree, which these are.
    if workload.faults:  # the means cannot be trusted either
        return reason_not_to_judge(workload)
    text, goal = _verdict(workload, pairs), workload.goal
    if goal.primary:
        text += (
            f" The {goal.metric} is a second outcome: the winners were selected by their"
            f" {goal.primary}, and the error of 5% is that of each outcome alone."
        )
    return text


def _verdict(workload: Workload, pairs: Sequence[Pair]) -> str:
    if not (ordered := standings(workload)):
        return _without_runs(workload)
    first = ordered[0]
    if all(each.valueless for each in ordered) and not any(pair.decided for pair in pairs):
        words = workload.goal.words
        return f"Not decided: every arm has runs without a value, so that none has a mean {words}."
    if len(ordered) == 1:
        mean, units = first.mean, plural(first.mean.n, workload.unit)
        interval = f"no interval with {units}"
        if mean.low is not None and mean.high is not None:
            interval = f"95% interval {shown(mean.low)} to {shown(mean.high)}, {units}"
        text = (
            f"{first.arm} is the only arm with results: its mean {workload.goal.words} is"
            f" {shown(mean.value)} ({interval}). There is nothing to compare it with."
        )
        return " ".join([text, *_limits(workload)])
    writer = _Writer(workload, pairs)
    if not any(pair.looks for pair in pairs):
        why = reason_not_to_judge(workload) or _progress(workload, ordered)
        means = ", ".join(
            f"{each.arm} {shown(each.mean.value)}"
            if math.isfinite(each.mean.value)
            else f"{each.arm} without a mean ({each.valueless} of {len(each.values)} have no value)"
            for each in ordered
        )
        return " ".join([f"{why} The mean {workload.goal.words}: {means}.", *_limits(workload)])
    if workload.ablated:
        return writer.ablation()
    beaten = {pair.worse for pair in pairs if pair.decided}
    # An arm without a mean, because a run has no value, may still be better by counting signs.
    return writer.judged(next((each for each in ordered if each.arm not in beaten), first).arm)


def _without_runs(workload: Workload) -> str:
    trials = [run for run in workload.trials if run.end != "missing"]
    finals = [run for run in workload.finals if run.end != "missing"]
    row = workload.goal.reported
    if not trials and not finals:
        return "Not decided: no run has ended."
    if finals and all(run.end == "failed" for run in finals):
        return f"Not decided. {' '.join(_failed_runs(workload))}"
    if finals and not any(row in run.summary.metrics for run in finals):
        return f"Not decided: no run has the metric {row!r}."
    unused = not any(run.value(workload.goal.selected) is not None for run in trials)
    if trials and len(trials) == len(workload.trials) and unused:
        ends = ("diverged", "failed", *(("pruned",) if workload.cuts else ()))
        counts = [f"{sum(r.end == end for r in trials)} {end}" for end in ends]
        return f"Not decided: no trial has a value ({joined(counts)})."
    return "Not decided: the winners have not run on fresh seeds yet."


def _failed_runs(workload: Workload) -> Iterator[str]:
    """Yields a sentence about the compared runs and the trials that failed, if there are any."""
    runs, compared = workload.failed, {run.name for run in workload.finals}
    if not runs:
        return
    first = runs[0].summary.why.partition(". ")[0].rstrip(".")
    why = f" ({first[:_LONGEST]})" if first else ""
    which = "compared runs" if all(run.name in compared for run in runs) else "runs"
    others = f" and {len(runs) - 1:,} more {which}" if len(runs) > 1 else ""
    arms = list(dict.fromkeys(run.arm for run in runs))
    how = "repeat them"
    if workload.path is not None:
        how = f"`python -m trainer sweep work {workload.path} --failed` computes them again"
    yield (
        f"{runs[0].name}{why}{others} failed. A failed run is no result, and {joined(arms)}"
        f" {'is' if len(arms) == 1 else 'are'} not judged: {how}."
    )


def _limits(workload: Workload) -> Iterator[str]:
    """Yields sentences about what limits a verdict besides its numbers."""
    yield from _failed_runs(workload)
    yield from conditions(workload)
    names = axes_of([workload])
    every = [scan for arm in workload.arms for scan in scans(workload, arm)]
    if found := [f"{names[scan.path]} of {scan.arm}" for scan in every if at_edge(workload, scan)]:
        what = "lie at edges of their spaces" if len(found) > 1 else "lies at an edge of its space"
        yield f"The best {joined(found, _NAMED)} {what}, and a wider one may have a better point."
    for scan in every:
        if not at_edge(workload, scan) and (found := winners_at_ends(workload, scan)):
            count, searches, end = found
            beyond = {"smallest": "smaller", "largest": "larger"}[end]
            yield (
                f"In {count} of the {searches} searches of {scan.arm} the trial with the {end}"
                f" {names[scan.path]} won: a {beyond} one may be better."
            )


def recommended_units(workload: Workload) -> int:
    """Returns how many units of each arm a sweep of these arms should have, at least."""
    # From so many on, signs can decide, which are counted where a run diverges or collapses.
    return decide.fewest_signs(decide.PLANNED_LEVEL / workload.comparisons)


class _Writer:
    """Writes the sentences about a workload and all of its pairs."""

    def __init__(self, workload: Workload, pairs: Sequence[Pair]):
        self._workload, self._pairs = workload, pairs
        self._goal = workload.goal
        self._smaller = "smaller" if workload.goal.sign > 0 else "larger"

    # Who is better.

    def judged(self, first: str) -> str:
        """Returns the verdict on judged arms; `first` is the best arm that no other one beats."""
        involved = [pair for pair in self._pairs if first in pair.arms]
        against = [pair for pair in involved if pair.decided and pair.better == first]
        others = [pair for pair in involved if pair not in against]
        equal = all(pair.relevance == "equivalent" for pair in others)
        parts = [
            self._no_first(first, others, against) if others else self._better(against),
            _cost(self._workload, (others or against)[0]),
            _typical(self._workload, against),
            *self._on_other_test_sets(against, others if equal else ()),
            self._meaning_of_collapsed(involved),
            *_limits(self._workload),
            self._when_judged(involved[0]),
            self._one_search(against),
        ]
        return " ".join(filter(None, parts))

    def ablation(self) -> str:
        """Returns the verdict on an arm that was compared with itself without each part."""
        whole, unit = self._workload.ablated, self._workload.unit
        texts = "It is better than", "It is worse than", "Not decided:", "No interval:"
        found: dict[str, list[str]] = {text: [] for text in texts}
        better, worse, undecided, lost = found.values()
        for pair in self._pairs:
            ours = pair.better == whole
            name, at = (pair.worse, 1) if ours else (pair.better, 0)
            if pair.without_mean or pair.low is None or pair.high is None:
                bad, of = pair.diverged[at] + pair.collapsed[at], plural(pair.n, unit)
                lost.append(f"{name} (diverged or collapsed in {bad} of {of})" if bad else name)
                continue
            low, high = self._goal.gain(pair.low, pair.high)
            low, high = (low, high) if ours else (-high, -low)
            gain = abs(pair.difference) if ours else -abs(pair.difference)
            kind = undecided if not pair.decided else better if ours else worse
            kind.append(f"{name} {shown(gain)} ({shown(low)} to {shown(high)})")
        tests = f"paired t tests over {plural(max(p.n for p in self._pairs), unit)}"
        parts = [
            f"By how much {self._subject(whole)} has a better mean {self._goal.words} than without"
            f" a part, with simultaneous 95% intervals ({tests})."
        ]
        parts += [f"{text} {joined(names)}." for text, names in found.items() if names]
        parts += [*_limits(self._workload), self._when_judged(self._pairs[0])]
        if self._workload.searches == 1:
            parts.append(
                "With one search an arm this is about the configurations that were found:"
                f" `searches: {recommended_units(self._workload)}` is about the arms."
            )
        return " ".join(filter(None, parts))

    def _better(self, against: Sequence[Pair]) -> str:
        """Says that an arm is better than all others, and names the closest of them."""
        closest, rest = against[0], [pair.worse for pair in against[1:]]
        if len(rest) >= _NAMED:
            rest = [f"the other {len(rest)}"]
        more = f"{',' if len(rest) > 1 else ' and'} {joined(rest)}" if rest else ""
        subject, other = self._subject(closest.better, True), self._object(closest.worse)
        claim = f"{subject} is better than {other}{more}"
        if closest.test == "" and closest.without_mean:
            units = plural(closest.n, self._workload.unit)
            kinds = (closest.diverged[1], "diverged"), (closest.collapsed[1], "collapsed")
            what = " or ".join(word for count, word in kinds if count)
            all_of = f"{closest.worse} {what} in all of {units}, and {closest.better} in none"
            return f"{claim}: {all_of}."
        than = f" than that of {closest.worse}" if len(against) > 1 else ""
        how = self._size_and_test(closest, than)
        return f"{claim}{self._relevance(closest)}: its {how}, on this data set and model."

    def _relevance(self, pair: Pair) -> str:
        """Says whether a difference matters, if the goal says which one does."""
        if (relevant := self._goal.relevant) is None:
            return ""
        return {
            "more": f" by more than {shown(relevant)}, the difference that matters",
            "less": f", by less than the {shown(relevant)} that matter",
            "better": f"; whether by {shown(relevant)}, the difference that matters, is open",
        }.get(pair.relevance or "", "")

    def _no_first(self, first: str, others: Sequence[Pair], against: Sequence[Pair]) -> str:
        """Says which pairs are undecided or equivalent, and which arms the first one beats."""
        names = [pair.worse if pair.better == first else pair.better for pair in others]
        equal = all(pair.relevance == "equivalent" for pair in others)
        if len(names) > _NAMED:
            names = [f"{len(names)} other arms"]
        closest, between = others[0], self._between([first, *names])
        if equal:
            named = self._workload.searches > 1  # an arm's name begins the sentence, as it is
            head = between if named else f"{between[0].upper()}{between[1:]}"
            text = (
                f"{head} are equivalent: the {self._goal.words} differs"
                f" by less than {shown(self._goal.relevant or 0)}, the difference that matters."
            )
        else:
            text = f"Not decided between {between.rstrip(',')}."
        of = f" of {closest.better}"
        size = self._size_and_test(closest, f" than that of {closest.worse}", of)
        how = f"The {size}, on this data set and model."
        with_mean = all(map(math.isfinite, self._workload.units_of(first).values()))
        if closest.better != first and with_mean:
            units = plural(closest.n, f"compared {self._workload.unit}")
            but = "" if closest.without_mean else f", but not on the {units}"
            how = f"The mean of {first} is the best{but}. {how}"
        text += f" {how}"
        if closest.rounding:
            text += f" That is less than {ROUNDING:g} of the values, which rounding can make."
        elif not equal:
            text += self._would_decide(closest)
        better = joined([self._object(pair.worse) for pair in against])
        return text + (f" {self._subject(first, True)} is better than {better}." if against else "")

    def _between(self, names: Sequence[str]) -> str:
        """Returns the names of the arms of undecided pairs, as a part of a sentence."""
        if self._workload.searches == 1:
            found = "found for" if self._workload.trials else "of"
            return f"the configurations {found} {joined(names)}"
        first, *more = {self._workload.points_of_search(arm) for arm in self._workload.arms}
        best = "the trials" if more else f"{first} trials"
        return f"{joined(names)}, each the best of {best} in its space,"

    def _size_and_test(self, pair: Pair, than: str, of: str = "") -> str:
        """Says by how much the first arm of a pair is better, and how sure that is."""
        # `than` is " than that of ARM" or ""; `of` is " of ARM", or "" if it was named.
        units, words = plural(pair.n, self._workload.unit), self._goal.words
        test = f"no test with {units}"
        if pair.p is not None:
            all_pairs = f"all {count} pairs and " if (count := len(self._pairs)) > 1 else ""
            if self._workload.families > 1:
                all_pairs = "all pairs of all rungs and "
            test = f"{pair.test} over {units}, {p_sentence(pair.p)}"
            test += f" adjusted for {all_pairs}all looks"
        if pair.without_mean:
            kinds = ("diverged", pair.diverged), ("collapsed", pair.collapsed)
            bad = [
                f"{count} of {arm} {word}"
                for word, counts in kinds
                for count, arm in zip(counts, pair.arms, strict=True)
                if count
            ]
            one = sum(pair.diverged) + sum(pair.collapsed) == 1
            worst = "counts as the worst one" if one else "count as the worst ones"
            return f"runs{of} are better more often; {joined(bad)}, and {worst} ({test})"
        if (size := abs(pair.difference)) == 0:
            return f"mean {words}{of} is equal to that of {pair.worse} ({test})"
        interval = ""
        if pair.low is not None and pair.high is not None:
            interval = f"simultaneous 95% interval {self._ends(pair.low, pair.high)}; "
        times = ""
        if self._goal.relevant is None and pair.deviation:
            times = f", {_deviations(size / pair.deviation)}"
        return (
            f"mean {words}{of} is {self._smaller}{than} by {shown(size)}{times} ({interval}{test})"
        )

    def _ends(self, low: float, high: float) -> str:
        """Returns the interval of an improvement from that of better minus worse."""
        return " to ".join(map(shown, self._goal.gain(low, high)))

    def _would_decide(self, pair: Pair) -> str:
        """Says what the units find, or how many would find the difference that matters."""
        relevant, workload = self._goal.relevant, self._workload
        if pair.without_mean:
            enough = recommended_units(workload)
            return f" Signs can decide from {enough} units on." if pair.n < enough else ""
        if pair.p is None or pair.low is None:  # without an interval, signs were counted
            return ""
        if relevant is None:
            if pair.finds is None:
                return ""
            return (
                f" With {plural(pair.n, workload.unit)}, a difference of {_deviations(pair.finds)}"
                " is found with a power of 0.8."
            )
        many, has = "more than 10,000", ""
        if pair.needed is not None and pair.needed_range is not None:
            low, high = pair.needed_range
            many = f"about {pair.needed:,} ({low:,} to {high:,})"
            has = f", and this one has {pair.n:,}" if pair.needed <= pair.n else ""
        return (
            f" The difference that matters, {shown(relevant)}, takes {many} {workload.unit_plural}"
            f" of a fresh sweep (power 0.8){has}."
        )

    # What limits it.

    def _meaning_of_collapsed(self, pairs: Sequence[Pair]) -> str:
        """Says which units collapsed, if any did."""
        if (gone := next((pair for pair in pairs if any(pair.collapsed)), None)) is None:
            return ""
        return (
            f"A {self._workload.unit} collapsed if its {self._goal.words} gained less than half of"
            " what that of the median one of the pair gained over the value before the first step,"
            f" {shown(gone.initial[0])}."
        )

    def _on_other_test_sets(self, against: Sequence[Pair], equal: Sequence[Pair]) -> list[str]:
        """Says which claims, of an order or of an equivalence, may not hold on other test sets."""
        relevant = self._goal.relevant or 0.0
        # Other examples in some runs are said of what is not decided, too.
        elsewhere = [pair.elsewhere for pair in self._pairs if pair.elsewhere]
        sentences, unknown = [], [known.why for known in elsewhere if known.unlike]
        for pair in equal:
            found = pair.elsewhere.found if pair.elsewhere else None
            if found is None or found.low is None or found.high is None:
                continue
            if max(-found.low, found.high) >= relevant:
                sentences.append(
                    f"On another test set of this size {joined(pair.arms)} may differ by"
                    f" {shown(relevant)} (two-way interval {self._ends(found.low, found.high)})."
                )
        for pair in against:
            if (known := pair.elsewhere) is None:
                continue
            if (found := known.found) is None:
                unknown.append(known.why)
            elif found.low is not None and found.high is not None and found.low <= 0 <= found.high:
                of = f" of {joined(pair.arms)}" if len(against) > 1 else ""
                over = plural(found.examples, "example")
                over = over if known.complete else f"the first {over}"
                sentences.append(
                    f"On another test set of this size the order{of} may change (two-way interval"
                    f" {self._ends(found.low, found.high)} over {over})."
                )
        for why in unknown[:1]:
            sentences.append(f"{why}, so that nothing can be said about another test set.")
        return sentences

    def _when_judged(self, pair: Pair) -> str:
        """Says when the results were judged, unless that was once, as planned."""
        units = self._workload.unit_plural
        if self._workload.looks == "any":
            words = f"The results may be judged after any number of {units}, as the file says."
            return words if len(pair.looks) > 1 else ""
        steps = itertools.pairwise(self._workload.revisions)
        added = [x for before, x in steps if x.units > before.units and x.compared_known]
        known = ""
        if any(not each.winners_known for each in added):
            known = f"When {units} were added, trials of earlier ones had ended, which is a look."
        if not self._workload.revisions or len(pair.looks) < 2:
            return known

        def earlier(look: EarlierLook) -> str:
            arms, p = " and ".join(pair.arms), "" if look.p is None else f" ({p_sentence(look.p)})"
            what = f"{look.better} was better" if look.better else f"{arms} were not decided"
            when = f", with runs until {look.until}" if look.until else ""
            return f"at {look.n:,}{when}, {what}{p}"

        looks = joined([f"{n:,}" for n in pair.looks])
        said = "; ".join(map(earlier, pair.earlier))
        text = (
            f"The results were judged at {looks} {units}, and the interval holds for all looks."
            f" Before, {said}."
        )
        return f"{text} {known}".rstrip()

    def _one_search(self, against: Sequence[Pair]) -> str:
        """Says what one search an arm does not show, after a claim that an arm is better."""
        if self._workload.searches > 1 or not against:
            return ""
        better, worse = against[0].arms
        if not any(self._workload.points_of_search(arm) > 1 for arm in (better, worse)):
            return (
                f"Nothing was searched for: this does not show that {better} is better than {worse}"
                " with other hyperparameters."
            )
        return (
            f"One search an arm does not show that {better} is better than {worse}: other trials"
            f" may find other configurations; `searches: {recommended_units(self._workload)}` would"
            " tell."
        )

    def _subject(self, arm: str, start: bool = False) -> str:
        """Returns an arm as the subject of a claim."""
        trials = self._workload.points_of_search(arm)
        if self._workload.searches > 1:
            return f"{arm}, best of {trials} trials in its space,"
        the = "The" if start else "the"
        if trials > 1:
            return f"{the} configuration found for {arm} (best of {trials} trials)"
        return f"{the} configuration of {arm}"

    def _object(self, arm: str) -> str:
        """Returns the arm with which a claim compares."""
        trials = self._workload.points_of_search(arm)
        if self._workload.searches > 1:
            return f"{arm}, best of {trials} in its space"
        return f"that found for {arm}" if trials > 1 else f"that of {arm}"


def _deviations(size: float) -> str:
    return f"{size:.2g} standard deviation{'' if f'{size:.2g}' == '1' else 's'}"


def _cost(workload: Workload, pair: Pair) -> str:
    """Says how the FLOPs of a step differ between two arms, if they do by over 5%."""
    flops = [{run.flops for run in workload.finals_of(arm)} for arm in pair.arms]
    if any(len(each) != 1 or not all(each) for each in flops):
        return ""
    ratio = float(flops[0].pop() or 1) / float(flops[1].pop() or 1)
    if 1 / 1.05 < ratio < 1.05:
        return ""
    return f"A step of {pair.better} takes {ratio:.2f} times the FLOPs of one of {pair.worse}."


def _typical(workload: Workload, against: Sequence[Pair]) -> str:
    """Says that a claim is about typical units, and how many of them may fail unseen."""
    if not against or against[0].without_mean:
        return ""
    n, units = against[0].n, workload.unit_plural
    known = all(map(math.isfinite, against[0].initial))
    bad = "collapsed or diverged" if known else "diverged"
    text = (
        f"This is about typical {units}: none of the {n:,} of an arm {bad}, and up to"
        f" {1 - 0.05 ** (1 / n):.0%} of its {units} may."
    )
    if not known:
        text += (
            f" Whether one collapsed is not known, because the {workload.goal.words} before the"
            " first step is not."
        )
    return text


def _progress(workload: Workload, ordered: Sequence[Standing]) -> str:
    """Says how many units have ended."""
    total = len(workload.units)
    every = len(ordered) == len(workload.arms)
    ended = min(len(each.values) for each in ordered) if every else 0
    if workload.rung and ended == total and workload.completed == 0:
        return "Not judged yet: other rungs of the ladder have not ended."
    if workload.failed and all(run.end != "missing" for run in workload.finals):
        return "Not decided."
    if ended != total and workload.revisions:
        noun = plural(total, workload.unit).partition(" ")[2]
        return f"Not judged yet: {ended:,} of {total:,} {noun} have ended in every arm."
    level, how = decide.looks_of_file(workload.looks, 2, workload.skewed).level, ""
    taken = [looks_of(workload, pair, ended) for pair in itertools.combinations(workload.arms, 2)]
    later = [looks.later_level for looks in taken if looks is not None and not looks.planned]
    if later and workload.looks == "planned":
        level, how = min(later), ", because winners or arms are new since results were known"
    units = plural(ended or 1, workload.unit)
    fewest = decide.fewest_units(level / workload.comparisons)
    if ended < fewest:
        return (
            f"Not decided: {units} of each arm cannot decide anything; with"
            f" {plural(workload.comparisons, 'pair')} of arms it takes at least {fewest}{how}."
        )
    return f"Not decided: there is no test with {units}."
