"""The sentences about a check of a claim: what was checked, what was found, what remains unknown.

Start with `claim_sentences`.
"""

from collections.abc import Callable, Iterator
from functools import partial

from trainer.config.wording import listing
from trainer.messages import plural
from trainer.studies import claim_segments as segments
from trainer.studies.claim import Checked

_LISTED = 4
_KEEP = " With `claims` in its file, a sweep keeps what it takes to compute all of them again."


def claim_sentences(checked: Checked) -> Iterator[str]:
    """Yields what was checked, what was found, and what remains unknown."""
    if checked.refuted:
        yield from checked.refuted
        yield "Not verified: no run was computed again."
        return
    yield _agreement(checked)
    yield from (*checked.underived, *checked.caveats)
    if checked.public:
        yield (
            f"Drawn by the claim with the SHA-256 {checked.claim} and by the public number"
            f" {checked.public}, so that anybody can draw the same again."
        )
    if checked.lockstep:
        yield f"Nothing shows that Lockstep {checked.lockstep} wrote the claim, as it says."
    if checked.other_code:
        yield f"The code here is not that of the claim: {listing(checked.other_code, _LISTED)}."
    for each in checked.recomputed:
        yield _found(each, checked.tolerance_of(each))
    for each in checked.tolerances:
        yield from _measured(checked, each)
    if checked.tolerances and checked.mixed:
        yield (
            f"The runs name environments that differ in {listing(checked.mixed)}. Whoever forged"
            " some of them may have named another one for these: the tolerance is therefore that of"
            " segments of all runs, whatever they name."
        )
    if checked.verified:
        yield _power(checked)
    elif checked.forged:
        yield "Refuted."
    elif checked.alike:
        yield from _within(checked)
    else:
        yield _unknown(checked)


def _agreement(checked: Checked) -> str:
    """Says which files agree with which."""
    rows = f"that the rows of {plural(checked.runs, 'run')} give."
    if checked.sweeps is not None:
        return (
            f"The files of {plural(checked.sweeps, 'sweep')} agree with their ledgers, these with"
            " that of the referee, and that with the claim; the seeds with its secret, the configs"
            f" with the tries and rules, and the verdicts are those {rows}"
        )
    derived = "" if checked.underived else "the plan with the file of the sweep, "
    return (
        f"The files agree with the ledger, {derived}plan and ledger with the claim, the configs"
        f" with the plan, and the verdict is the one {rows}"
    )


def _unknown(checked: Checked) -> str:
    """Says why it is not decided whether what differs was forged."""
    if checked.other_code or any(each.other_program for each in checked.recomputed):
        return (
            "Not verified: with other code, data or settings, something else is computed. Check it"
            " with those of the claim."
        )
    if any(not x.same and checked.tolerance_of(x) is None for x in checked.recomputed):
        return (
            "Not verified: how far results are apart under these conditions can only be measured on"
            f" at least {segments.FEWEST} more segments of the same kind, those that begin a run or"
            " the others, with this code and these data. Check it where it was computed."
        )
    return (
        "Not verified: this is more than the differences between the two environments explain, but"
        " no proof of a forgery: the differences of honest segments may themselves differ by more"
        f" than a factor of {segments.FACTOR:g}. Check it where it was computed."
    )


def _found(each: segments.Recomputed, tolerance: segments.Tolerance | None) -> str:
    """Says what came of a segment."""
    again = f"{each.name} was computed again"
    if each.same:
        return f"{again} and has the same bits."
    size = f"differs from {each.first} on, by {each.largest:.2g} of a value at most"
    if all(name.startswith(segments.EXAMPLES) for name in each.apart):
        size = f"has the same rows, and other results on {each.first}"
    if segments.ENDS in each.apart:
        size = f"ended {each.first}, with the same rows"
    if not each.differing:
        return (
            f"{again} under the conditions that the files name and {size}: its files are not those"
            " of this config and code, or the code opens other files here."
        )
    beyond = {} if tolerance is None else tolerance.beyond(each)
    far = f" That is more than the tolerance allows: {_listed(beyond)}." if beyond else ""
    return f"{again} and {size}. Here other conditions hold ({'; '.join(each.differing)}).{far}"


def _listed(apart: dict[str, float]) -> str:
    return ", ".join(f"{name} by {size:.2g}" for name, size in list(apart.items())[:_LISTED])


def _measured(checked: Checked, found: segments.Tolerance) -> Iterator[str]:
    """Says what the tolerance is, and which of the segments that gave it are beyond it."""
    yield (
        f"How far {_kind(checked, found)} are apart under these conditions was measured on"
        f" {len(found.measured)} that were drawn for that alone: by {found.median:.2g} of a value"
        f" at the median. The tolerance is {segments.FACTOR:g} times as much, and at most"
        f" {segments.WIDEST:g}: {found.allowed:.2g} of each metric and part of the state."
    )
    for each in found.measured:
        if beyond := found.beyond(each):
            yield f"{each.name}, one of these, is beyond it as well: {_listed(beyond)}."


def _kind(checked: Checked, found: segments.Tolerance) -> str:
    if checked.segments is None:
        return "runs"
    begin = "begin a run" if found.begins_run else "begin with a kept state"
    return f"segments that {begin}"


def _within(checked: Checked) -> Iterator[str]:
    """Says what it means that all that was drawn is within the tolerances."""
    yield (
        "It agrees within the differences that the two environments have, which is less than the"
        " same bits: a change within the tolerance is not excluded."
    )
    for found in checked.tolerances:
        measured, judged, total = len(found.measured), found.judged, found.total
        power = partial(segments.caught_by_tolerance, total, measured=measured, judged=judged)
        yield (
            f"As far as {measured + judged} of {total:,} {_kind(checked, found)} can show: had"
            " somebody changed one of them by more than that, it would have been found"
            f" {_few(total, power)}."
        )
    if checked.segments is not None and not any(each.begins_run for each in checked.recomputed):
        yield "No segment that begins a run was drawn."


def _power(checked: Checked) -> str:
    """Says which forgeries the draw would have missed."""
    total = checked.runs if checked.segments is None else checked.segments
    count = len(checked.recomputed) - checked.last
    last = f"the last segments of all compared runs and of the trials that won ({checked.last:,})"
    if not total:
        return f"Verified: {last} have the same bits, and the compared runs have no others."
    few = _few(total, lambda forged: segments.caught(total, forged, count))
    if checked.segments is None:
        return (
            f"Verified, as far as {plural(count, 'run')} of {total:,} can: had somebody forged one"
            f" of them, it would have been drawn {few}. The last evaluations, on which the verdict"
            f" rests, were computed again of these runs only.{'' if checked.sweeps else _KEEP}"
        )
    return (
        f"Verified, as far as {last} can, and {count:,} of the {plural(total, 'other segment')} of"
        " the compared runs, which were drawn. A forged run has at least one forged segment, and"
        f" may have no more: had somebody forged one of the {total:,}, it would have been drawn"
        f" {few}."
    )


def _few(total: int, probability: Callable[[int], float]) -> str:
    """Returns such as "with a probability of 0.19, and of two at least one with 0.35"."""
    text = f"with a probability of {probability(1):.2f}"
    return text if total < 2 else f"{text}, and of two at least one with {probability(2):.2f}"
