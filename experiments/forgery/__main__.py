"""Prints what a forger of a sweep risks, as tables in Markdown.

    python -m experiments.forgery       # the tables of docs/forgers.md

The probabilities are closed forms, and are compared with 20,000 draws of the function by which
`claim verify` draws. How often forged units decide a verdict is simulated, with the limit of the t
test of a report. All seeds are fixed; it takes half a minute.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.report.statistics.decide import PLANNED_LEVEL, limit_of_t
from trainer.studies.claim import drawn
from trainer.studies.claim_segments import caught

DRAWS = 20_000
SEGMENTS = 8  # of a run; the last one is always computed again
UNITS = 5
TRIED = 10_000  # claims, or their hashes, that a forger tries
FORGED = (1, 2, 3, 5)


@dataclass(frozen=True)
class Draw:
    """How one verifier, or several, draw from the segments that are not the last of a run.

    Attributes:
        what: from what, in words.
        total: from how many segments.
        count: how many each verifier draws.
        verifiers: how many verifiers there are, each with a number of their own.
    """

    what: str
    total: int
    count: int
    verifiers: int = 1

    def found(self, forged: int) -> float:
        """Returns the probability that at least one of some forged segments is drawn."""
        return 1 - (1 - caught(self.total, forged, self.count)) ** self.verifiers

    def simulated(self, forged: int, draws: int = DRAWS) -> float:
        """Returns the share of `draws` in which at least one of some forged segments is drawn."""
        names = [f"final/a/{n // 7} from step {n % 7}" for n in range(self.total)]
        bad, found = set(names[:: self.total // forged][:forged]), 0
        for number in range(draws):
            publics = (f"{number}-{each}" for each in range(self.verifiers))
            found += any(bad & set(drawn(names, b"a claim", x)[: self.count]) for x in publics)
        return found / draws


def _of_runs(runs: int, count: int, verifiers: int = 1) -> Draw:
    what = f"{runs} compared runs, all but their last segments"
    return Draw(what, runs * (SEGMENTS - 1), count, verifiers)


# Of a sweep of two arms with five units each, and of an arm alone.
ONE, THREE = _of_runs(2 * UNITS, 3), _of_runs(2 * UNITS, 12, 3)
OF_DRAWS = (
    *(
        _of_runs(runs, count, verifiers)
        for runs in (UNITS, 2 * UNITS)
        for count in (3, 12)
        for verifiers in (1, 3)
    ),
    Draw("all segments of all 44 runs of a sweep", 44 * SEGMENTS, 3),
)
GROUND = ((1, 3), (2, 3), (5, 12), (5, 25))  # forged, and drawn, of the segments of five runs


def flips(forged: int, draws: int = DRAWS) -> tuple[float, float]:
    """Simulates how often forged units decide a comparison that was not decided.

    Two arms without a difference have five units each, whose values are normal. The difference
    between the arms in each of `forged` units is made that of the best of the other units.

    Returns the share of undecided comparisons that are then decided for the arm that the forger
    wants, with the best choice of the units; and for either arm, if the forger does not care which.
    """
    values = np.random.default_rng(0).standard_normal((draws, 2, UNITS))
    differences = values[:, 0] - values[:, 1]
    undecided = differences[~decided(differences) & ~decided(-differences)]
    one, other = flipped(undecided, forged), flipped(-undecided, forged)
    return float(one.mean()), float((one | other).mean())


def decided(differences: NDArray) -> NDArray[np.bool_]:
    """Returns which comparisons are decided for the arm with the larger values.

    It is the paired t test of the planned look. `differences` are [comparisons, units].
    """
    n = differences.shape[1]
    t = differences.mean(1) / (differences.std(1, ddof=1) / math.sqrt(n))
    return t > limit_of_t(n, PLANNED_LEVEL)


def flipped(differences: NDArray, forged: int) -> NDArray[np.bool_]:
    """Returns which comparisons some choice of forged units decides for the arm that they favor."""
    found = np.zeros(len(differences), bool)
    for chosen in map(list, itertools.combinations(range(differences.shape[1]), forged)):
        edited = differences.copy()
        edited[:, chosen] = np.delete(differences, chosen, axis=1).max(1, keepdims=True)
        found |= decided(edited)
    return found


def of_sweeps(sweeps: int) -> float:
    """Returns how likely one of some sweeps of two equal arms has a verdict by chance."""
    return 1 - (1 - PLANNED_LEVEL) ** sweeps


def tables(draws: int = DRAWS) -> str:
    """Returns all tables in Markdown; `draws` are those of the simulated flips."""
    flipped = {forged: flips(forged, draws) for forged in (1, 2)}
    parts = (_deeds(), _draws(), _flips(flipped), _ground())
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts)


def _deeds() -> Iterator[str]:
    """Yields the table of what a forger may do, what finds it, and how likely that is."""
    check, verify = "`sweep check`, `claim verify`", "`claim verify`"
    some, three = f"{ONE.count} of {ONE.total} segments", f"three who draw {THREE.count} each"
    yield from _head("what they do", "what finds it", "with what probability")
    rows = [
        ("edit a file of a run, and not the ledger", f"{check}: its hash", "1"),
        ("remove a result, and not its line", f"{check}: it is missing", "1"),
        ("compute a result again", "its second line, named beside the verdict", "1"),
        ("remove results and the ledger, and begin another", f"{check}: it began late", "1"),
        ("name another environment in run.json", f"{check}: the ledger lacks it", "1"),
        (
            "leave out a search and number the others anew, move seeds, or tell another space or"
            " method",
            f"{check}: the file of the sweep gives another plan",
            "1",
        ),
        (
            "leave out the last searches or trials, or an arm, in the file of the sweep as well",
            "the hash of the plan, if published before",
            "1",
        ),
        ("change seeds, spaces, goal or rule", "the hash of the plan, if published before", "1"),
        ("write the ledger and the claim anew", "the hash of either, if published before", "1"),
        (
            "do so, and edit the last evaluation of a compared run of a sweep with `claims`",
            verify,
            "1",
        ),
        (
            "the same without `claims` in its file",
            f"{verify}, if the run is among those drawn: 3 of 80",
            _p(caught(80, 1, 3)),
        ),
        (
            "do so, and leave the results of single test examples as they were",
            f"{check}: their mean is another one",
            "1",
        ),
        (
            "do so, and remove or damage those of some runs, or call them incomplete",
            f"{check}: the other runs of the arm have them",
            "1",
        ),
        (
            "the same of all compared runs, call them left out, or edit them so that means stay",
            f"{verify} with `claims`; without, as above",
            f"1; {_p(caught(80, 1, 3))}",
        ),
        (
            "do so, and call a run diverged or stopped early",
            f"{check}: its rows have the last evaluation",
            "1",
        ),
        ("do so, and edit or remove metrics before step 1", f"{verify}: by more than 5%", "1"),
        *(
            (
                f"do so, and let {runs} to a better state",
                f"{verify}: {some}; {three}",
                f"{_p(ONE.found(forged))}; {_p(THREE.found(forged))}",
            )
            for forged, runs in ((1, "a compared run jump"), (2, "two compared runs jump"))
        ),
        (
            f"try {TRIED:,} claims until the draw misses the two",
            "a public number that is later than the claim",
            f"{_p(ONE.found(2))}, as for one claim",
        ),
        (
            "name another environment, or other data, in the forged runs and the ledger",
            f"{verify}: not verified, and not called refuted",
            "as without",
        ),
        (
            "edit by less than the tolerance; by .01 where most segments are forged",
            f"{verify} in the environment of the runs, and nothing elsewhere",
            "as above; 0",
        ),
        (
            "let the best trial of a rival's search lose",
            f"{verify} by whole runs, 3 of 44, and not by segments",
            _p(caught(44, 1, 3)),
        ),
        (
            "compute 10 sweeps in secret, and publish the one with a verdict",
            "nothing in its folder",
            f"0; there is one with {_p(of_sweeps(10))}",
        ),
        ("tune in secret, or narrow the space of a rival", "nothing in its folder", "0"),
        ("compute by other code, under the same names", "reading the code", "0"),
        ("edit times", "nothing", "0"),
    ]
    yield from map(_row, rows)


def _draws() -> Iterator[str]:
    heads = [f"{forged} forged" for forged in FORGED]
    yield from _head("drawn from", "segments", "drawn", "verifiers", *heads)
    for each in OF_DRAWS:
        counts = (f"{x}" for x in (each.total, each.count, each.verifiers))
        yield _row([each.what, *counts, *(_p(each.found(x), 3) for x in FORGED)])


def _flips(flipped: dict[int, tuple[float, float]]) -> Iterator[str]:
    yield from _head(
        f"forged units of {UNITS}",
        "decided for a given arm",
        "decided for either arm",
        f"and not found by one verifier who draws {ONE.count} of {ONE.total}",
        f"by three who draw {THREE.count} each",
    )
    for forged, (one, either) in flipped.items():
        missed = (either * (1 - x.found(forged)) for x in (ONE, THREE))
        yield _row([f"{forged}", *map(_p, (one, either, *missed))])


def _ground() -> Iterator[str]:
    total = UNITS * (SEGMENTS - 1)
    yield from _head(
        f"forged segments of {total}",
        "drawn",
        "found by a number that comes later",
        f"one of {TRIED:,} claims is not found by its hash alone",
        "claims to try, on average",
    )
    for forged, count in GROUND:
        p = caught(total, forged, count)
        numbers = (f"{p:.4f}", f"{1 - p**TRIED:.4f}", f"{1 / (1 - p):,.1f}")
        yield _row([f"{forged}", f"{count}", *numbers])


def _p(probability: float, digits: int = 2) -> str:
    """Returns such as ".31"; "1.00" if it rounds to 1."""
    return f"{probability:.{digits}f}".removeprefix("0")


def _head(*cells: str) -> Iterator[str]:
    yield _row(cells)
    yield _row("---" for _ in cells)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the tables, and how far simulated draws are from them."""
    argparse.ArgumentParser(prog="python -m experiments.forgery").parse_args()
    print(tables())
    apart = max(abs(x.found(k) - x.simulated(k)) for x in (OF_DRAWS[0], ONE, THREE) for k in FORGED)
    print(f"Shares of {DRAWS:,} draws are within {apart:.3f} of these probabilities.")


if __name__ == "__main__":
    main()
