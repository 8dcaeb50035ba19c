"""The sentences about a check of a claim: what was checked, what was found, what remains unknown.

Start with `sentences`.
"""

from collections.abc import Callable, Iterator

from trainer.config.wording import listing
from trainer.messages import plural
from trainer.studies.claim import Checked
from trainer.studies.claim_segments import ENDS, Recomputed
from trainer.studies.claim_tolerance import (
    FACTOR,
    FEWEST,
    WIDEST,
    Tolerance,
    caught,
    caught_by_tolerance,
)

# Of these shares it is said with which probability a forgery would have been drawn.
_SHARES = ((10, "a tenth"), (3, "a third"))
_LISTED = 4


def sentences(checked: Checked) -> Iterator[str]:
    """Yields what was checked, what was found, and what remains unknown."""
    if checked.refuted:
        yield from checked.refuted
        yield "Not verified: nothing was computed again."
        return
    yield (
        "The files agree with the ledger, plan and ledger with the claim, the configs with the"
        f" plan, and the verdict is the one that the rows of {plural(checked.runs, 'run')} give."
    )
    if checked.lockstep:
        yield f"Nothing shows that Lockstep {checked.lockstep} wrote the claim, as it says."
    for each in checked.recomputed:
        yield _found(each, checked.tolerance_of(each))
    for each in checked.tolerances:
        yield from _measured(checked, each)
    if checked.verified:
        yield _power(checked)
    elif checked.forged:
        yield "Refuted."
    elif checked.alike:
        yield from _within(checked)
    else:
        yield _unknown(checked)


def _unknown(checked: Checked) -> str:
    """Says why it is not decided whether what differs was forged."""
    if any(each.other_program for each in checked.recomputed):
        return (
            "Not verified: with other code, data or settings, something else is computed. Check it"
            " with those of the claim."
        )
    if any(not x.same and checked.tolerance_of(x) is None for x in checked.recomputed):
        return (
            "Not verified: how far results are apart under these conditions can only be measured on"
            f" at least {FEWEST} more segments of the same kind, those that begin a run or the"
            " others. Check it where it was computed."
        )
    return (
        "Not verified: this is more than the differences between the two environments explain, but"
        " no proof of a forgery: the differences of honest segments may themselves differ by more"
        f" than a factor of {FACTOR:g}. Check it where it was computed."
    )


def _found(each: Recomputed, tolerance: Tolerance | None) -> str:
    """Says what came of a segment."""
    again = f"{each.name} was computed again"
    if each.same:
        return f"{again} and has the same bits."
    size = f"differs from {each.first} on, by {each.largest:.2g} of a value at most"
    if ENDS in each.apart:
        size = f"ended {each.first}, with the same rows"
    if not each.differing:
        return (
            f"{again} under the same conditions and {size}: its files are not those of this config"
            " and code."
        )
    beyond = {} if tolerance is None else tolerance.beyond(each)
    far = f" That is more than the tolerance allows: {_listed(beyond)}." if beyond else ""
    return f"{again} and {size}. Here other conditions hold ({'; '.join(each.differing)}).{far}"


def _listed(apart: dict[str, float]) -> str:
    shown = [f"{name} by {size:.2g}" for name, size in list(apart.items())[:_LISTED]]
    return ", ".join(shown)


def _measured(checked: Checked, found: Tolerance) -> Iterator[str]:
    """Says what the tolerance is, and which of the segments that gave it are beyond it."""
    yield (
        f"How far {_kind(checked, found)} are apart under these conditions was measured on"
        f" {len(found.measured)} that were drawn for that alone: by {found.median:.2g} of a value"
        f" at the median. The tolerance is {FACTOR:g} times as much, and at most {WIDEST:g}:"
        f" {found.allowed:.2g} of each metric and part of the state."
    )
    for each in found.measured:
        if beyond := found.beyond(each):
            yield f"{each.name}, one of these, is beyond it as well: {_listed(beyond)}."


def _kind(checked: Checked, found: Tolerance) -> str:
    if not checked.segments:
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
        shares = _shares(
            total,
            _kind(checked, found),
            lambda forged, x=found: caught_by_tolerance(x.total, forged, len(x.measured), x.judged),
        )
        yield (
            f"As far as {measured + judged} of {total:,} can show: had somebody changed more than"
            f" that in {shares} probability one of them would have been found."
        )
    if checked.mixed:
        yield (
            "Only the files of the runs say in which environment each was computed, and they differ"
            f" in {listing(checked.mixed)}: whoever forged some of them may have named another one"
            " for these."
        )
    if checked.segments and not any(each.begins_run for each in checked.recomputed):
        yield "No segment that begins a run was drawn."


def _power(checked: Checked) -> str:
    """Says which forgeries the draw would have missed."""
    total, count = checked.total, len(checked.recomputed)
    what = _unit(checked)

    def probability(forged: int) -> float:
        return caught(total, forged, count)

    text = (
        f"Verified, as far as {plural(count, what)} of {total:,} can: had somebody forged"
        f" {_shares(total, f'{what}s', probability)} probability one of them would have been drawn."
    )
    if not checked.segments:
        return text
    return (
        f"{text} A forged run has at least one forged segment, and may have no more: of"
        f" {_shares(checked.runs, 'runs', probability)} probability."
    )


def _unit(checked: Checked) -> str:
    """Returns what is drawn, as a word."""
    return "segment" if checked.segments else "run"


def _shares(total: int, what: str, probability: Callable[[int], float]) -> str:
    """Returns such as "a tenth of the runs (8), with 0.29 or a third (25), with 0.71"."""
    found = []
    for part, words in _SHARES:
        forged = max(1, round(total / part))
        of = "" if found else f" of the {what}"
        found.append(f"{words}{of} ({forged}), with {probability(forged):.2f}")
    return " or ".join(found)
