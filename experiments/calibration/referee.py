"""Simulates loops of tries: what a referee keeps, and what is kept by looking at one seed.

    python -m experiments.calibration.referee        # the table of docs/referee.md

Each loop has 200 tries, some of which are real: by one standard deviation of a pair's difference
better than the smallest improvement that matters. The others are exactly that much better, which is
the hardest case, because every other false try loses more often. Verdicts are `Levels.judge`'s, as
those of `python -m trainer referee`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.report.statistics.decide import limit_of_t
from trainer.report.statistics.keeps import Levels, e_of_wins

LOOPS, TRIES, PAIRS, SCREEN, ERROR = 400, 200, 60, 4, 0.1
_LIMIT_OF_8 = limit_of_t(8, 0.05)

# (generator, pairs, real) -> by how much the run with a change is better than its partner, beyond
# what matters, in standard deviations
Draw = Callable[[np.random.Generator, int, bool], NDArray]


def normal(rng: np.random.Generator, pairs: int, real: bool) -> NDArray:
    """Draws pairs of normal runs."""
    return rng.standard_normal(pairs) + real


def skewed(rng: np.random.Generator, pairs: int, real: bool) -> NDArray:
    """Draws pairs in which the runs with the change are lognormal(0.5), and half are won."""
    change = rng.lognormal(0.0, 0.5, pairs)
    # The other runs are normal with a quarter of its spread. The median and the standard deviation
    # of the difference are those of 10 million draws.
    return 0.15 * rng.standard_normal(pairs) - change + 1.01006 + 0.622 * real


def diverging(rng: np.random.Generator, pairs: int, real: bool) -> NDArray:
    """Draws pairs in which one run in ten with the change diverges."""
    return np.where(rng.random(pairs) < 0.1, -np.inf, normal(rng, pairs, real))


@dataclass(frozen=True)
class Loop:
    """What was kept in loops of tries, on average over the loops.

    Attributes:
        real: how many real tries were kept.
        false: the share of the keeps that were not real; 0 in a loop without keeps.
        any_false: in how many loops there was such a keep.
        runs: how many runs were computed.
    """

    real: float
    false: float
    any_false: float
    runs: float


class Decisions:
    """What `Levels.judge` decides of up to `PAIRS` pairs, from a table of all wins and losses."""

    def __init__(self, keeps: int):
        levels = Levels.of(ERROR, TRIES, keeps)
        wins, losses = np.indices((PAIRS + 1, PAIRS + 1))
        self._keep = e_of_wins(wins, losses) >= levels.keep
        # It also ends where those that are left cannot keep it any more.
        within = np.minimum(np.maximum(PAIRS - losses, 0), PAIRS)
        self._ends = self._keep | (e_of_wins(losses, wins) >= levels.discard)
        self._ends |= ~self._keep[within, losses]

    def judge(self, won: NDArray) -> tuple[bool, int]:
        """Returns whether a change is kept, and after how many pairs that is decided."""
        wins = np.cumsum(won)
        losses = np.arange(1, len(won) + 1) - wins
        ends = self._ends[wins, losses]
        last = int(ends.argmax()) if ends.any() else len(won) - 1
        return bool(self._keep[wins[last], losses[last]]), last + 1


_DECISIONS = [Decisions(keeps) for keeps in range(TRIES)]


def one_seed(rng: np.random.Generator, draw: Draw, real: bool, keeps: int) -> tuple[bool, int]:
    """Keeps what is better on one seed; returns whether it is kept, and how many runs that took."""
    return bool(draw(rng, 1, real)[0] > 0), 1


def eight_pairs(rng: np.random.Generator, draw: Draw, real: bool, keeps: int) -> tuple[bool, int]:
    """Keeps what is better at p < .05 by a paired t test of 8 pairs."""
    values = draw(rng, 8, real)
    return bool(values.mean() > _LIMIT_OF_8 * values.std(ddof=1) / np.sqrt(8)), 16


def referee(rng: np.random.Generator, draw: Draw, real: bool, keeps: int) -> tuple[bool, int]:
    """Keeps what the pairs decide, without a screen."""
    kept, pairs = _DECISIONS[keeps].judge(draw(rng, PAIRS, real) > 0)
    return kept, 2 * pairs


def screened(rng: np.random.Generator, draw: Draw, real: bool, keeps: int) -> tuple[bool, int]:
    """Keeps what passes a screen of some pairs on known seeds, and then is kept by other pairs."""
    return _after_a_screen(rng, draw, real, keeps, 1)


def climbing(rng: np.random.Generator, draw: Draw, real: bool, keeps: int) -> tuple[bool, int]:
    """Keeps as `screened`, of a proposer who submits the best of 10 on the seeds of the screen."""
    return _after_a_screen(rng, draw, real, keeps, 10)


def _after_a_screen(
    rng: np.random.Generator, draw: Draw, real: bool, keeps: int, best_of: int
) -> tuple[bool, int]:
    screens = [draw(rng, SCREEN, real).mean() for _ in range(best_of)]
    kept, runs = False, best_of * SCREEN
    if max(screens) > 0:
        kept, more = referee(rng, draw, real, keeps)
        runs += more
    return kept, runs


def loops(
    policy: Callable[..., tuple[bool, int]], share: float, draw: Draw = normal, count: int = LOOPS
) -> Loop:
    """Simulates loops of 200 tries, a share of which is real."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        real = rng.random(TRIES) < share
        kept, runs = np.zeros(TRIES, bool), 0
        for index in range(TRIES):
            kept[index], more = policy(rng, draw, bool(real[index]), int(kept.sum()))
            runs += more
        false = int((kept & ~real).sum())
        found.append((int((kept & real).sum()), false / max(1, kept.sum()), false > 0, runs))
    return Loop(*np.mean(found, axis=0))


def on_the_same_seeds(share: float, count: int = LOOPS) -> Loop:
    """Simulates a referee that computes every try on the same seeds, which a proposer climbs.

    The runs of the baseline are computed once, and those of a try have half of their variance from
    the best try before, which the proposer varies.
    """
    rng, half = np.random.default_rng(0), np.sqrt(0.5)
    found = []
    for _ in range(count):
        real = rng.random(TRIES) < share
        kept, runs = np.zeros(TRIES, bool), PAIRS
        baseline = rng.standard_normal(PAIRS) * half  # its luck on these seeds
        best = rng.standard_normal(PAIRS) * half
        for index in range(TRIES):
            own = half * best + half * half * rng.standard_normal(PAIRS)
            kept[index], more = _DECISIONS[int(kept.sum())].judge(own - baseline + real[index] > 0)
            best = own if own.mean() > best.mean() else best
            baseline = own if kept[index] else baseline
            runs += more
        false = int((kept & ~real).sum())
        found.append((int((kept & real).sum()), false / max(1, kept.sum()), false > 0, runs))
    return Loop(*np.mean(found, axis=0))


def rows(count: int = LOOPS) -> Iterator[tuple[str, str, float, Loop]]:
    """Yields what decided, what was drawn, the share of real tries, and what was kept."""
    for share in (0.0, 0.05, 0.1, 0.3):
        yield "better on one seed", "normal", share, loops(one_seed, share, count=count)
        yield "p < .05 over 8 pairs", "normal", share, loops(eight_pairs, share, count=count)
        yield "referee, no screen", "normal", share, loops(referee, share, count=count)
        yield "referee", "normal", share, loops(screened, share, count=count)
    hard = {"one skewed arm": skewed, "one run in ten diverges": diverging}
    for name, draw in hard.items():
        for share in (0.0, 0.1):
            yield "referee", name, share, loops(screened, share, draw, count)
    for share in (0.0, 0.1):
        yield "referee", "the best of 10 on the screen", share, loops(climbing, share, count=count)
        yield "the same seeds for all", "climbed", share, on_the_same_seeds(share, count)


def table(count: int = LOOPS) -> str:
    """Returns the table in Markdown."""
    head = [
        "kept by",
        "runs are",
        "real tries",
        "real kept",
        "false share",
        "loops with a false",
        "runs",
    ]
    lines = [_row(head), _row(["---", "---", *["---:"] * 5])]
    for policy, drawn, share, found in rows(count):
        expected = f"{share * TRIES:.0f}"
        numbers = f"{found.real:.1f}", f"{found.false:.3f}", f"{found.any_false:.2f}"
        lines.append(_row([policy, drawn, expected, *numbers, f"{found.runs:,.0f}"]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(table())
