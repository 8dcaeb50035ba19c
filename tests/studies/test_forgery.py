"""What a forger can and cannot do: the figures of docs/forgers.md, against others' formulas."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.forgery.__main__ import (
    FORGED,
    GROUND,
    OF_DRAWS,
    ONE,
    THREE,
    TRIED,
    decided,
    flipped,
    flips,
    of_sweeps,
    tables,
)
from tests import short
from tests.runs import ROOT
from trainer.studies.claim import drawn

PAGE = (ROOT / "docs" / "forgers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def printed() -> str:
    return tables()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_tables_of_the_page_are_what_the_script_prints(printed) -> None:
    assert len(rows(printed)) > 30
    assert rows(PAGE) == rows(printed)


def test_a_draw_finds_what_the_hypergeometric_distribution_says() -> None:
    for draw in OF_DRAWS:
        for forged in FORGED:
            missed = stats.hypergeom.pmf(0, draw.total, forged, draw.count) ** draw.verifiers
            assert draw.found(forged) == pytest.approx(1 - missed)
    # Of the issue: three uniform draws from all segments of 44 runs.
    assert (round(OF_DRAWS[-1].found(5), 3), round(OF_DRAWS[-1].found(2), 3)) == (0.042, 0.017)


@short.parametrize("draw", [ONE, THREE, OF_DRAWS[0]], ids=["one", "three", "of five runs"])
def test_the_function_that_draws_finds_as_much(draw) -> None:
    for forged in FORGED:
        p, draws = draw.found(forged), 2_000
        slack = 4 * math.sqrt(p * (1 - p) / draws)
        assert draw.simulated(forged, draws) == pytest.approx(p, abs=slack)


def test_one_forged_unit_of_five_decides_a_third_and_two_nearly_all() -> None:
    assert flips(1)[1] == pytest.approx(0.31, abs=0.01)
    assert flips(2)[1] == pytest.approx(0.98, abs=0.005)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 300, 5))
    found = stats.ttest_rel(x, y, axis=1)
    expected = (found.pvalue < 0.04) & (found.statistic > 0)
    assert list(decided(x - y)) == list(expected) and expected.any()
    # The worst difference is made that of the second best unit: t = 0.9 / 0.1 with 4 degrees.
    one = np.array([[0.8, 1.0, 0.9, 0.8, -9.0], [0.1, -9.0, 9.0, -8.0, 8.0]])
    assert list(flipped(one, 1)) == [True, False]


def test_a_draw_by_the_hash_of_the_claim_alone_can_be_ground() -> None:
    """A forger writes claims until the draw misses; a number that comes later stops that."""
    forged, count = GROUND[2]
    names = [f"s{n}" for n in range(35)]
    tries = []
    for series in range(300):
        number = 1
        while set(names[:forged]) & set(drawn(names, f"{series} {number}".encode(), "")[:count]):
            number += 1
        tries.append(number)
    mean = 1 / stats.hypergeom.pmf(0, 35, forged, count)  # of a geometric distribution
    assert np.mean(tries) == pytest.approx(mean, abs=4 * mean / math.sqrt(300))
    assert 1 - (1 - 1 / mean) ** TRIED == pytest.approx(1)
    assert f"{mean:,.1f}" in PAGE


def test_of_many_sweeps_without_a_difference_one_has_a_verdict() -> None:
    assert of_sweeps(10) == pytest.approx(stats.binom.sf(0, 10, 0.04))
