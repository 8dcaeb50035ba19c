"""The sentences about a check of a claim: what was checked, what was found, what remains unknown.

Start with `sentences`.
"""

from collections.abc import Callable, Iterator

from trainer.messages import plural
from trainer.studies.claim import Checked
from trainer.studies.claim_segments import Recomputed
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
    for each in checked.recomputed:
        yield _found(each, checked.tolerance)
    if checked.verified:
        yield _power(checked)
    elif checked.forged:
        yield "Refuted."
    elif checked.tolerance is not None:
        yield from _measured(checked, checked.tolerance)
        yield from _within(checked, checked.tolerance)
    elif any(each.other_program for each in checked.recomputed):
        yield (
            "Not verified: with other code, data or settings, something else is computed. Check it"
            " with those of the claim."
        )
    else:
        yield (
            "Not verified: how far results are apart under these conditions can only be measured on"
            f" at least {FEWEST} more segments, and the sweep has too few. Check it where it was"
            " computed."
        )


def _found(each: Recomputed, tolerance: Tolerance | None) -> str:
    """Says what came of a segment."""
    again = f"{each.name} was computed again"
    if each.same:
        return f"{again} and has the same bits."
    size = f"differs from {each.first} on, by {each.largest:.2g} of a value at most"
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
        "How far results are apart under these conditions was measured on"
        f" {plural(len(found.measured), _unit(checked))} that were drawn for that alone: by"
        f" {found.median:.2g} of a value at the median. The tolerance is {FACTOR:g} times as much,"
        f" and at most {WIDEST:g}: {found.allowed:.2g} of each metric and part of the state."
    )
    for each in found.measured:
        if beyond := found.beyond(each):
            yield f"{each.name}, one of these, is beyond it as well: {_listed(beyond)}."


def _within(checked: Checked, found: Tolerance) -> Iterator[str]:
    """Says whether all that was drawn is within the tolerance, and what that means."""
    if not checked.alike:
        yield (
            "Not verified: this is more than the differences between the two environments explain,"
            " but no proof of a forgery: the differences of honest segments may themselves differ"
            f" by more than a factor of {FACTOR:g}. Check it where it was computed."
        )
        return
    measured, judged = len(found.measured), len(checked.recomputed)
    what = _unit(checked)

    def probability(forged: int) -> float:
        return caught_by_tolerance(checked.total, forged, measured, judged)

    yield (
        "It agrees within the differences that the two environments have, which is less than the"
        " same bits: a change within the tolerance is not excluded. As far as"
        f" {plural(measured + judged, what)} of {checked.total:,} can show: had somebody"
        f" changed more than that in {_shares(checked.total, f'{what}s', probability)} probability"
        " one of them would have been found."
    )


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
