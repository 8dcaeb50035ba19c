"""docs/references.md has the rows that `python -m tests.references` prints, within their bounds."""

import re
from dataclasses import replace
from functools import partial

import optax
import pytest

from tests import originals, references, short
from tests.recorded import Recorded, mu
from tests.references import (
    ALL,
    AUTHORS,
    DIFFERENT,
    FILES,
    HEADINGS,
    OPTAX,
    OTHER_AUTHORS,
    OTHER_FILES,
    RECORDED,
    RECORDED_HEADING,
    Row,
    recorded_cells,
)
from tests.runs import ROOT

PAGE = ROOT / "docs" / "references.md"


def committed(recorded: bool = False) -> list[list[str]]:
    """Reads the cells of the page's rows: of those with recorded results, or of the others."""
    text = PAGE.read_text(encoding="utf-8")
    inside = text[text.index(references.BEGIN) : text.index(references.END)]
    head, _, tail = inside.partition(f"## {RECORDED_HEADING}")
    lines = (tail if recorded else head).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_the_page_has_the_rows_that_the_command_prints():
    text = PAGE.read_text(encoding="utf-8")
    printed = text[: text.index(references.END)]
    titles = [line[3:] for line in printed.splitlines() if line.startswith("## ")]
    assert titles == [*HEADINGS, RECORDED_HEADING]
    found = [(name.strip("`"), *rest[:2], rest[4]) for name, *rest in committed()]
    assert found == [row.cells for row in ALL], "Paste what `python -m tests.references` prints."


def test_the_pages_differences_are_within_their_bounds():
    for row, cells in zip(ALL, committed(), strict=True):
        numbers = [float(number) for number in cells[3:5] if number != "-"]
        assert len(numbers) == (1 if row.constant else 2), cells
        assert max(numbers) > 1e-5 if row.bound is None else max(numbers) < row.bound, cells
    assert {row.bound for row in DIFFERENT} == {None} and all(row.remarks for row in DIFFERENT)


def test_the_page_has_the_recorded_results_within_their_bounds():
    found = [(*cells[:4], cells[5]) for cells in committed(recorded=True)]
    expected = [recorded_cells(*item) for item in RECORDED.items()]
    assert [(ours.strip("`"), *rest) for ours, *rest in found] == expected
    for case, cells in zip(RECORDED.values(), committed(recorded=True), strict=True):
        assert float(cells[4]) < case.bound, cells


def test_each_result_of_the_track_is_compared_or_what_it_needs_is_named():
    """Results are named by numbers; a cell "result 25" stands for the row of that result's file."""
    _, _, track = PAGE.read_text(encoding="utf-8").partition(references.END)
    lines = [line for line in track.splitlines() if re.match(r"\| \d", line)]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    numbers = [int(number) for cells in rows for number in cells[0].split(",")]
    assert sorted(numbers) == [*range(1, 47)]
    compared = {name for row in ALL for name in (row.reference, row.reference.partition(" of ")[0])}
    compared |= {*RECORDED, *(case.program for case in RECORDED.values())}
    named = {each for cells in rows if len(cells) > 3 for each in cells[3].split(", ")}
    assert [each for each in named - compared if not (ROOT / each).exists()] == []
    assert {f"result {number}" for number in originals.TRACK} <= named


def name(row: Row) -> str:
    return row.optimizer


@short.parametrize("row", AUTHORS, lambda row: row.optimizer.partition("(")[0], ids=name)
def test_an_optimizer_agrees_with_its_authors_program_for_50_steps(row):
    assert max(row.differences()) < row.bound


@pytest.mark.torch
@pytest.mark.parametrize("row", [*FILES, *OTHER_FILES], ids=lambda row: row.reference)
def test_an_optimizer_agrees_with_its_authors_own_file_or_differs_as_the_page_says(row):
    if not row.is_installed:
        pytest.skip("The authors' files are not here: `make originals` clones them.")
    if row.bound is None:
        assert max(row.differences()) > 1e-5, "They agree now: give the row a bound."
    else:
        assert max(row.differences()) < row.bound


def test_another_content_of_a_file_is_refused(tmp_path, monkeypatch):
    file = tmp_path / originals.SOAP.repository / originals.SOAP.path
    file.parent.mkdir(parents=True)
    file.write_text("class SOAP: pass")
    monkeypatch.setattr(originals, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="is not the file that was compared: check out a1e55353"):
        originals.SOAP.module()


# A row of each kind: some compile for a minute.
SOME = ("optax.adamw (masked decay)", "optax.contrib.momo", "optax.signum")
OTHER = ("optax.contrib.schedule_free_sgd", "optax.MultiSteps")


@pytest.mark.parametrize("row", [row for row in OPTAX if row.optimizer in SOME], ids=name)
def test_an_optimizer_in_a_group_agrees_with_optax_for_50_steps(row):
    assert max(row.differences()) < row.bound


@pytest.mark.long
@pytest.mark.parametrize(
    "row", [*OTHER_AUTHORS, *(row for row in DIFFERENT if row.optimizer in OTHER)], ids=name
)
def test_a_documented_difference_to_authors_and_to_optax_still_exists(row):
    assert max(row.differences()) > 1e-5, "They agree now: give the row a bound."


def test_the_command_exits_1_at_a_difference_and_omits_what_is_not_installed(monkeypatch, capsys):
    near = Row("optax.sgd(0.1)", "a program", lambda cosine: 1e-9 if cosine else 0.0)
    far = Row("optax.adam(0.1)", "a program", lambda cosine: float("nan") if cosine else 0.0)
    fixed = Row("optax.rprop(0.1)", "a program", lambda cosine: 1e-8, constant=True)
    absent = Row("optax.lion(0.1)", "torch.optim.Lion", lambda cosine: 0.0, is_installed=False)
    monkeypatch.setattr("sys.argv", ["references"])  # pytest's own arguments are not its
    monkeypatch.setattr(references, "HEADINGS", {"Some": [near, fixed, absent]})
    kept = Recorded([partial(optax.ema, 0.9), partial(optax.trace, mu)], "it", lambda: 1e-9, 1e-8)
    monkeypatch.setattr(references, "RECORDED", {"test_a: b": kept})
    assert references.main() == 0
    told = capsys.readouterr()
    assert "| `optax.sgd(0.1)` | a program | float64 | 0 | 1e-09 |  |" in told.out
    assert "| `optax.rprop(0.1)` | a program | float64 | 1e-08 | - |  |" in told.out
    row = "| `optax.ema(0.9) and optax.trace(mu)` | it | test_a: b | 1e-08 | 1e-09 |  |"
    assert row in told.out
    assert "lion" not in told.out and "make torch" in told.err
    lost = replace(kept, measure=lambda: float("nan"))
    monkeypatch.setattr(references, "RECORDED", {"test_a: b": lost})
    assert references.main() == 1
    assert "optax.trace(mu) against it: nan, not below 1e-08" in capsys.readouterr().err
    monkeypatch.setattr(references, "RECORDED", {})
    monkeypatch.setattr(references, "HEADINGS", {"Some": [near, far]})
    assert references.main() == 1
    told = capsys.readouterr().err
    assert "optax.adam(0.1) against a program: 0, nan, not below 1e-06" in told
