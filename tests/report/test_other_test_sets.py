"""What a report says about another test set, from the results on single examples."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.report_cases import changed, workload
from trainer.engine.examples import Examples
from trainer.report.comparison import make_report
from trainer.report.pairs import Pair, compare_arms
from trainer.report.results import ReportGoal, Workload
from trainer.report.verdict import verdict
from trainer.report.write import write
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE, encode_examples, read_examples

SEEDS, EXAMPLES = 8, 200
SEARCHED = {arm: [(0.001 * (n + 1), 1.0) for n in range(12)] for arm in ("muon", "adamw")}
MAY_CHANGE = "On another test set of this size the order may change"


def shared(gap: float, of_examples: float, seed: int = 0) -> dict[str, NDArray]:
    """Returns values [seeds, examples] of two arms; adamw's are larger by about `gap`.

    Args:
        gap: the mean difference.
        of_examples: the standard deviation of an example's own difference, which all seeds share.
        seed: of the numbers.
    """
    draw = np.random.default_rng(seed)
    hard = draw.gamma(2.0, 0.3, EXAMPLES)
    muon, adamw = (hard + 0.05 * draw.standard_normal((SEEDS, EXAMPLES)) for _ in range(2))
    own = draw.standard_normal(EXAMPLES)
    return {"muon": 1 + muon, "adamw": 1 + adamw + gap + of_examples * (own - own.mean())}


def kept(
    folder: Path,
    values: Mapping[str, NDArray],
    hashes: Mapping[str, str] | None = None,
    weights: NDArray | None = None,
    metric: str = "loss",
    complete: bool = True,
    **more: Any,
) -> Workload:
    """Returns a workload whose final runs have files of their values on single examples."""
    counts = np.ones(EXAMPLES) if weights is None else weights
    rows = {arm: np.average(x, axis=1, weights=counts) for arm, x in values.items()}
    searched = {arm: SEARCHED["muon"] for arm in values}
    made = workload({arm: list(x) for arm, x in rows.items()}, searched, **more)
    finals = []
    for run in made.finals:
        place = folder / run.name
        place.mkdir(parents=True)
        sha256 = (hashes or {}).get(run.arm, "ab") * 32
        of_run = values[run.arm][run.seed]
        examples = Examples({metric: of_run}, {metric: counts}, sha256, complete)
        (place / PER_EXAMPLE_FILE).write_bytes(encode_examples(examples))
        value = float(rows[run.arm][run.seed])
        metrics = {f"eval/{metric}": value, f"validation/{metric}": value}
        finals.append(changed(run, folder=place, metrics=metrics))
    return replace(made, finals=tuple(finals))


def judged(work: Workload) -> tuple[Pair, str]:
    pairs = compare_arms(work)
    return pairs[0], verdict(work, pairs)


def interval(table: NDArray) -> tuple[float, float]:
    """Returns the interval of docs/statistics.md, by NumPy's variances and scipy's t."""
    units, examples = table.shape
    rows, columns = table.mean(1), table.mean(0)
    residual = table - rows[:, None] - columns[None] + table.mean()
    of_units, of_examples = rows.var(ddof=1) / units, columns.var(ddof=1) / examples
    both = (residual**2).sum() / ((units - 1) * (examples - 1)) / (units * examples)
    variance = max(of_units + of_examples - both, of_units, of_examples)
    freedom = variance**2 / (of_units**2 / (units - 1) + of_examples**2 / (examples - 1))
    half = stats.t.ppf(0.975, freedom) * variance**0.5
    return table.mean() - half, table.mean() + half


def test_a_claim_of_all_seeds_that_a_few_examples_made_says_so(tmp_path):
    values = shared(gap=0.04, of_examples=0.5)
    pair, said = judged(kept(tmp_path, values))
    assert pair.better == "muon" and pair.decided and pair.high is not None and pair.high < 0
    low, high = interval(values["muon"] - values["adamw"])
    assert low < 0 < high and pair.elsewhere is not None
    found = pair.elsewhere.found
    assert found is not None and (found.low, found.high) == pytest.approx((low, high), abs=2e-5)
    assert found.difference == pytest.approx(pair.difference, abs=1e-12)
    numbers = re.search(
        rf"{MAY_CHANGE} \(two-way interval (\S+) to (\S+) over 200 examples\)\.", said
    )
    assert numbers is not None, said
    shown = [float(number.replace("−", "-")) for number in numbers.groups()]
    assert shown == pytest.approx([-high, -low], rel=1e-3)  # of the improvement
    assert said.index("is better than") < said.index(MAY_CHANGE) < said.index("One search an arm")


def test_a_claim_that_holds_on_other_test_sets_says_nothing_about_them(tmp_path):
    pair, said = judged(kept(tmp_path, shared(gap=0.04, of_examples=0.05)))
    assert pair.decided and pair.elsewhere is not None and pair.elsewhere.found is not None
    high = pair.elsewhere.found.high
    assert high is not None and high < 0
    assert "test set" not in said and "is better than" in said


def test_an_equivalence_of_all_seeds_that_other_examples_may_undo_says_so(tmp_path):
    values = shared(gap=0.0, of_examples=0.5)
    pair, _ = judged(kept(tmp_path / "any", values))
    assert pair.low is not None and pair.high is not None
    relevant = 1.2 * max(-pair.low, pair.high)
    goal = replace(kept(tmp_path / "same", values).goal, relevant=relevant)
    pair, said = judged(kept(tmp_path / "relevant", values, goal=goal))
    assert pair.relevance == "equivalent" and "are equivalent" in said
    assert pair.elsewhere is not None and (found := pair.elsewhere.found) is not None
    assert found.low is not None and found.high is not None
    assert max(-found.low, found.high) > relevant
    assert re.search(r"On another test set of this size \w+ and \w+ may differ by", said), said
    # Of many examples that differ little, another test set says the same.
    values = shared(gap=0.0, of_examples=0.001)
    pair, said = judged(kept(tmp_path / "little", values, goal=goal))
    assert pair.relevance == "equivalent" and "test set of this size" not in said


@pytest.mark.parametrize("noise", [0.02, 0.0])
def test_the_improvement_of_an_accuracy_is_its_increase(tmp_path, noise):
    """Muon is right on three examples more, in all seeds; without noise, signs decide."""
    draw = np.random.default_rng(1)
    right = np.tile(draw.random(EXAMPLES) < 0.9, (SEEDS, 1))
    muon = right ^ (draw.random(right.shape) < noise)
    adamw = right ^ (draw.random(right.shape) < noise)
    muon[:, :3], adamw[:, :3] = True, False
    values = {"muon": muon.astype(float), "adamw": adamw.astype(float)}
    goal = ReportGoal("accuracy", "max", "validation", "test")
    pair, said = judged(kept(tmp_path, values, metric="accuracy", goal=goal))
    assert pair.better == "muon" and pair.difference > 0 and pair.decided
    assert pair.test == ("paired t test" if noise else "test of signs")
    low, high = interval(values["muon"] - values["adamw"])
    found = pair.elsewhere and pair.elsewhere.found
    assert found and (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    assert low < 0 < high
    shown = re.search(r"may change \(two-way interval (\S+) to (\S+) over 200 examples\)", said)
    assert shown is not None, said
    ends = [float(number.replace("−", "-")) for number in shown.groups()]
    assert ends == pytest.approx([low, high], rel=1e-3)


def test_a_second_outcome_uses_its_own_values(tmp_path):
    """`report SWEEP --metric=accuracy` reads correctness, not the loss."""
    values = shared(gap=0.04, of_examples=0.5)
    second = ReportGoal("accuracy", "max", "validation", "test", primary="loss")
    work = kept(tmp_path, {"muon": -values["muon"], "adamw": -values["adamw"]}, metric="accuracy")
    pair, said = judged(replace(work, goal=second))
    assert pair.better == "muon" and MAY_CHANGE in said
    low, high = interval(values["adamw"] - values["muon"])
    found = pair.elsewhere and pair.elsewhere.found
    assert found and (found.low, found.high) == pytest.approx((low, high), abs=2e-5)
    (pair, *_), loss = compare_arms(work), "loss"
    assert work.goal.metric == loss and pair.elsewhere is None  # no file has it


def test_searches_are_units_with_the_mean_over_their_final_seeds(tmp_path):
    values = shared(gap=0.04, of_examples=0.5)
    work = kept(tmp_path, values, searches=4)
    finals = tuple(replace(run, search=run.seed // 2) for run in work.finals)
    work = replace(work, finals=finals, units=tuple(range(4)), revisions=work.revisions[:1])
    revision = replace(work.revisions[0], units=4)
    pair, _ = judged(replace(work, revisions=(revision,)))
    table = (values["muon"] - values["adamw"]).reshape(4, 2, EXAMPLES).mean(1)
    assert pair.n == 4 and pair.elsewhere is not None
    found = pair.elsewhere.found
    assert found is not None and found.units == 4
    assert (found.low, found.high) == pytest.approx(interval(table), abs=2e-5)


def test_sequences_of_unequal_lengths_are_weighted_by_their_tokens(tmp_path):
    draw = np.random.default_rng(2)
    lengths = draw.integers(1, 50, EXAMPLES).astype(float)
    values = shared(gap=0.04, of_examples=0.3)
    pair, _ = judged(kept(tmp_path, values, weights=lengths))
    table = values["muon"] - values["adamw"]
    ratio = np.average(table, axis=1, weights=lengths).mean()
    linear = lengths / lengths.mean() * (table - ratio) + ratio
    found = pair.elsewhere and pair.elsewhere.found
    assert found and found.difference == pytest.approx(ratio, abs=1e-9)
    assert (found.low, found.high) == pytest.approx(interval(linear), abs=2e-5)


def test_arms_that_were_scored_on_other_examples_are_named(tmp_path):
    values = shared(gap=0.04, of_examples=0.05)
    pair, said = judged(kept(tmp_path, values, hashes={"muon": "cd"}))
    assert pair.decided and pair.elsewhere is not None and pair.elsewhere.found is None
    assert (
        "The arms were not scored on the same test examples, so that nothing can be said about"
        " another test set." in said
    )


def test_searches_that_were_scored_on_other_examples_are_named(tmp_path):
    """Such as after the data were edited: it was said of the arms, which have the same ones."""
    work = kept(tmp_path, shared(gap=0.04, of_examples=0.05))
    for run in work.finals:
        found = read_examples(run.folder)
        assert found is not None
        if run.seed >= 6:
            content = encode_examples(replace(found, sha256="cd" * 32))
            (run.folder / PER_EXAMPLE_FILE).write_bytes(content)
    _, said = judged(work)
    assert "The seeds were not scored on the same test examples" in said


def test_without_the_values_of_a_run_a_claim_says_so(tmp_path):
    """Whoever removed them could else hide that the order may change on another test set."""
    work = kept(tmp_path, shared(gap=0.04, of_examples=0.5))
    (work.finals[3].folder / PER_EXAMPLE_FILE).unlink()
    pair, said = judged(work)
    assert pair.decided and pair.elsewhere is not None and pair.elsewhere.found is None
    assert (
        "Runs of muon have no results on single test examples, so that nothing can be said about"
        " another test set." in said
    )
    report = make_report([work], tmp_path / "report")
    names = [table.name for panel in report.panels for b in panel.blocks for table in b.tables]
    assert "pairs" in names and "pairs_test_sets" not in names


def test_what_is_not_decided_has_its_interval_in_the_table_only(tmp_path):
    work = kept(tmp_path, shared(gap=0.0, of_examples=0.5))
    pair, said = judged(work)
    assert not pair.decided and said.startswith("Not decided") and "test set" not in said
    write(make_report([work], tmp_path / "report"), tmp_path / "report", ["csv"])
    with open(tmp_path / "report" / "tables" / "pairs_test_sets.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["examples"] == "200" and float(row["low"]) < 0 < float(row["high"])
    assert float(row["examples_error"]) > float(row["units_error"]) > 0


def test_an_unfinished_sweep_has_no_interval_for_other_test_sets(tmp_path):
    """Nor those that are not judged for another reason: whoever looks at it would judge."""
    work = kept(tmp_path, shared(gap=0.04, of_examples=0.05))
    pair, said = judged(replace(work, completed=0))
    assert pair.elsewhere is None and not pair.looks and said.startswith("Not")
    pair, _ = judged(replace(work, faults=("final.json (it was changed)",)))
    assert pair.elsewhere is None


def test_the_first_examples_are_called_so(tmp_path):
    _, said = judged(kept(tmp_path, shared(gap=0.04, of_examples=0.5), complete=False))
    assert "over the first 200 examples)." in said


def test_with_three_arms_each_pair_is_named(tmp_path):
    values = shared(gap=0.04, of_examples=0.5)
    values["sgd"] = values["adamw"] + 1.0
    pairs = compare_arms(work := kept(tmp_path, values))
    said = verdict(work, pairs)
    assert "On another test set of this size the order of muon and adamw may change" in said
    assert "muon and sgd may change" not in said
    assert "is better than that found for adamw and sgd" in said


def test_every_format_has_the_sentence_and_the_table(tmp_path):
    work = kept(tmp_path, shared(gap=0.04, of_examples=0.5))
    folder = tmp_path / "report"
    write(make_report([work], folder), folder, ["html", "markdown", "latex", "csv"])
    page, markdown = ((folder / name).read_text() for name in ("index.html", "report.md"))
    latex = "".join(file.read_text() for file in sorted(folder.rglob("*.tex")))
    for text in (page, markdown, latex):
        plain = " ".join(text.split())
        assert MAY_CHANGE in plain and "Pairs of arms on other test sets" in plain
        assert "with Satterthwaite" in plain
