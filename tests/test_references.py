"""docs/references.md has the rows that `python -m tests.references` prints, within their bounds."""

from pathlib import Path

import pytest

from tests import references, torch_cases
from tests.references import ALL, AUTHORS, DIFFERENT, HEADINGS, OPTAX, Row

pytestmark = pytest.mark.laws

PAGE = Path(__file__).parent.parent / "docs" / "references.md"


def committed() -> list[list[str]]:
    """Reads the cells of the page's rows."""
    text = PAGE.read_text(encoding="utf-8")
    inside = text[text.index(references.BEGIN) : text.index(references.END)]
    lines = [line for line in inside.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_the_rows_that_the_command_prints():
    text = PAGE.read_text(encoding="utf-8")
    printed = text[: text.index(references.END)]
    assert [line[3:] for line in printed.splitlines() if line.startswith("## ")] == list(HEADINGS)
    found = [(name.strip("`"), *rest[:2], rest[3]) for name, *rest in committed()]
    assert found == [row.cells for row in ALL], "Paste what `python -m tests.references` prints."


def test_the_pages_differences_are_within_their_bounds():
    for row, cells in zip(ALL, committed(), strict=True):
        number = float(cells[3])
        assert number > 1e-5 if row.bound is None else number < row.bound, cells
    assert {row.bound for row in DIFFERENT} == {None} and all(row.remarks for row in DIFFERENT)


def name(row: Row) -> str:
    return row.optimizer


@pytest.mark.parametrize("row", AUTHORS, ids=name)
def test_an_optimizer_agrees_with_its_authors_program_for_50_steps(row):
    assert row.measure() < row.bound


SOME = ("optax.adamw (masked decay)", "optax.contrib.momo", "optax.contrib.schedule_free_sgd")


@pytest.mark.parametrize("row", [row for row in OPTAX if row.optimizer in SOME], ids=name)
def test_an_optimizer_in_a_group_agrees_with_optax_for_50_steps(row):
    assert row.measure() < row.bound


def test_the_command_exits_1_at_a_difference_and_omits_torch_if_it_is_missing(monkeypatch, capsys):
    near = Row("optax.sgd(0.1)", "a program", lambda: 1e-9)
    far = Row("optax.adam(0.1)", "a program", lambda: float("nan"))
    absent = Row("optax.lion(0.1)", "torch.optim.Lion", lambda: 0.0, torch=True)
    monkeypatch.setattr(references, "HEADINGS", {"Some": [near, absent]})
    monkeypatch.setattr(torch_cases, "torch", None)
    assert references.main() == 0
    told = capsys.readouterr()
    assert "| `optax.sgd(0.1)` | a program | float64 | 1e-09 |  |" in told.out
    assert "lion" not in told.out and "make torch" in told.err
    monkeypatch.setattr(references, "HEADINGS", {"Some": [near, far]})
    assert references.main() == 1
    assert "optax.adam(0.1) against a program: nan >= 1e-06" in capsys.readouterr().err
