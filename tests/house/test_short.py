"""Which tests the short suite runs: the covering arrays, and that they leave out nothing."""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from optim.factories import recipes_within
from tests import laws_table, runs, short
from tests.laws_table import CHECKS, ROWS, SHORT, Check
from trainer.cli import options


def test_a_covering_array_has_every_value_and_every_pair_and_few_cases() -> None:
    # Of 4 x 3 x 3 x 2 cases; 12 pairs of the two largest factors are the least number.
    cases = list(product("abcd", "xyz", "123", "+-"))
    pairs = [lambda x, i=i: x[i] for i in range(4)]
    found = short.covering(cases, pairs)
    for i, j in combinations(range(4), 2):
        assert {(x[i], x[j]) for x in found} == {(x[i], x[j]) for x in cases}
    assert 12 <= len(found) <= 15


def test_pairs_that_no_case_has_are_not_asked_for() -> None:
    cases = ["ax", "bx", "by"]
    assert short.covering(cases, [lambda x: x[0], lambda x: x[1]]) == cases
    assert short.covering(cases, [lambda x: x[0]]) == ["ax", "bx"]
    assert short.covering(cases, [lambda x: x[0]], each=[lambda x: x[1]]) == ["ax", "by"]


def test_cases_that_are_left_out_are_long() -> None:
    def marks(decorator: pytest.MarkDecorator) -> list[tuple[object, list[str]]]:
        values = decorator.mark.args[1]
        return [(x.values, [mark.name for mark in x.marks]) for x in values]

    found = marks(short.parametrize("x", ["aa", "ab", "bb"], lambda x: x[0]))
    assert found == [(("aa",), []), (("ab",), ["long"]), (("bb",), [])]
    found = marks(short.parametrize("x", [(1, 2), (3, 4)]))  # one argument that is a tuple
    assert found == [(((1, 2),), []), (((3, 4),), ["long"])]
    assert marks(short.parametrize(("x", "y"), [(1, 2)])) == [((1, 2), [])]


def of_one_check(check: Check) -> set[frozenset[tuple[str, object]]]:
    """Returns the values and the pairs that the tests of a check have."""
    found = set()
    for law in check.laws:
        values = {"law": law, "family": check.row.family}
        values |= {"layout": check.layout, "dtype": check.dtype}
        found |= {frozenset(each) for n in (1, 2) for each in combinations(values.items(), n)}
    return found


def test_every_pair_of_law_family_layout_and_dtype_is_tested_in_the_short_suite() -> None:
    wanted = set().union(*map(of_one_check, CHECKS))
    # 9 laws, 14 families, 3 layouts and 5 dtypes, of which each pair exists but for some of laws
    # and layouts, and of dtypes and several devices.
    assert len(wanted) > 9 + 14 + 3 + 5 + 14 * (9 + 3 + 5)
    assert wanted == set().union(*map(of_one_check, SHORT))
    shown = [x.row for x in SHORT if x.layout == "one device"]
    assert {x.func for row in shown for x in recipes_within(row.recipe)} == {
        x.func for row in ROWS for x in recipes_within(row.recipe)
    }
    assert {row for row in ROWS if "optim.chain" not in row.name} <= {*shown}


def test_a_pair_that_is_left_out_would_be_seen() -> None:
    private = [x for x in SHORT if x.row.family == "Privacy" and x.dtype == "mixed"]
    assert len(private) == 1
    left = set().union(*map(of_one_check, set(SHORT) - set(private)))
    assert frozenset({("law", 8), ("family", "Privacy")}) in left
    assert frozenset({("dtype", "mixed"), ("family", "Privacy")}) not in left


@pytest.mark.parametrize("layout", laws_table.HOWS)
def test_the_ways_to_call_a_step_are_tested_in_the_short_suite(layout: str) -> None:
    quick = [x.values for x in laws_table.ways(layout) if not x.marks]
    assert {row.family for row, _ in quick} == {row.family for row in ROWS}
    assert {how for _, how in quick} == set(laws_table.HOWS[layout])


def commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields each command with the spellings of each of its options that --help shows."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                yield from commands(each, f"{name} {word}".strip())
        elif action.help != argparse.SUPPRESS and action.option_strings:
            yield name, action.option_strings


def short_words() -> set[str]:
    """Returns the words in the texts of all files of tests, but for functions that are long."""
    words = set()
    for file in (runs.ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(file.read_text())
        assigned = [ast.unparse(x) for x in tree.body if isinstance(x, ast.Assign)]
        if "pytestmark = pytest.mark.long" in assigned:
            continue
        for node in tree.body:
            decorators = getattr(node, "decorator_list", [])
            if any(ast.unparse(x) == "pytest.mark.long" for x in decorators):
                continue
            texts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            for text in filter(lambda x: isinstance(x, str), texts):
                words |= {*re.findall(r"--\w+|[a-z_]+", text)}
    return words


def test_every_command_and_every_option_occurs_in_the_short_suite() -> None:
    words, found = short_words(), list(commands(options.parser()))
    assert len({name for name, _ in found}) > 25 and len(found) > 200
    assert [name for name, _ in found if not words >= {*name.split()}] == []
    missing = [(name, names) for name, names in found if not words.intersection(names)]
    assert missing == []
