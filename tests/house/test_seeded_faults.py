"""Whether the faults of `make seeded_faults` can be planted, and what it says of a small tree."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import seeded_faults
from tests.changed import ROOMS
from tests.runs import ROOT
from tests.seeded_faults import FAULTS, Fault, find, first_failure

# What has tests of its own; benchmarks, experiments and pages have no faults.
PRODUCT = {
    *("lockstep", "optim", "optim/parts", "trainer/losses.py", "trainer/metrics.py"),
    *(f"trainer/{path.name}" for path in (ROOT / "trainer").iterdir() if path.name in ROOMS),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    trees = [ast.dump(ast.parse(each)) for each in (text, fault.planted(text))]
    assert trees[0] != trees[1]
    assert fault.room in ROOMS and (ROOT / fault.product).exists()


def test_there_are_forty_different_faults_of_all_rooms() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 40
    parts = "optim/parts/"
    counts = Counter(
        "optim/parts" if fault.file.startswith(parts) else fault.product for fault in FAULTS
    )
    assert set(counts) == PRODUCT
    assert max(counts.values()) <= 4


def test_the_page_for_contributors_has_each_fault_and_a_test_that_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (.+) \| (\S+\.py), `(\w+)` \|$", page, re.MULTILINE)
    assert [name for name, _, _ in found] == [fault.name for fault in FAULTS]
    for _, file, test in found:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_commits_that_mended_faults_are_in_the_history() -> None:
    origins = [fault.origin for fault in FAULTS if fault.origin]
    assert len(origins) > len(FAULTS) / 2
    assert all(re.fullmatch("[0-9a-f]{7,40}", origin) for origin in origins)
    git = ["git", "-C", str(ROOT), "-c", "safe.directory=*", "cat-file"]
    names = "".join(f"{origin}^{{commit}}\n" for origin in origins)
    asked = [*git, "--batch-check=%(objecttype)"]
    try:
        done = subprocess.run(asked, input=names, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed.")
    found = done.stdout.splitlines()
    if "commit" not in found:
        pytest.skip("This is no clone with the history.")
    assert found == ["commit"] * len(origins)


CODE = """\
def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


def half(x):
    return x / 2
"""
TESTS = """\
import pytest

from optim import sums


def test_twice():
    assert sums.twice(2) == 4


@pytest.mark.long
@pytest.mark.parametrize("x", ["a - b"])
def test_thrice(x):
    assert sums.thrice(x) == 3 * x
"""
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider"]
TWICE = Fault("twice adds 2", "optim/sums.py", "2 * x", "2 + x")  # 2 + 2 is 4, too
MORE = Fault("twice is thrice", "optim/sums.py", "2 * x", "3 * x")
LONG = Fault("thrice is twice", "optim/sums.py", "3 * x", "2 * x")
GONE = Fault("an import fails", "optim/sums.py", "def thrice", "import nothing\n\ndef thrice")
STUCK = Fault("twice never ends", "optim/sums.py", "return 2 * x", "while True: pass")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file and its tests; pytest runs there without plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "pytest.ini": "[pytest]\nmarkers = long\n",
        "optim/__init__.py": "",
        "optim/sums.py": CODE,
        "tests/optim/test_sums.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_fault_is_found_by_a_test_of_its_room_and_taken_out(tree: Path) -> None:
    found = find(tree, MORE, OPTIONS)
    assert (found.where, found.test) == (
        "short suite in its room",
        "tests/optim/test_sums.py::test_twice",
    )
    assert found.short and found.whole
    assert (tree / "optim" / "sums.py").read_text() == CODE


@pytest.mark.long
def test_a_fault_that_no_test_looks_for_is_not_found(tree: Path) -> None:
    found = find(tree, TWICE, OPTIONS)
    assert (found.where, found.test, found.whole) == ("not found", "", False)


@pytest.mark.long
def test_a_fault_may_be_found_elsewhere_or_by_a_long_test(tree: Path) -> None:
    found = find(tree, LONG, OPTIONS)
    assert found.where == "whole suite only" and found.whole and not found.short
    assert found.test == "tests/optim/test_sums.py::test_thrice[a - b]"
    (tree / "tests" / "optim").rename(tree / "tests" / "engine")
    found = find(tree, MORE, OPTIONS)
    assert found.where == "short suite elsewhere" and found.short


@pytest.mark.long
def test_a_fault_is_found_by_tests_that_cannot_be_imported_or_hang(tree: Path) -> None:
    found = find(tree, GONE, OPTIONS)
    assert (found.where, found.test) == ("short suite in its room", "tests/optim/test_sums.py")
    found = find(tree, STUCK, OPTIONS, limit=2)
    assert (found.where, found.test) == ("short suite in its room", "the tests hang")


@pytest.mark.long
def test_a_test_that_fails_without_the_fault_and_an_error_of_pytest_find_nothing(
    tree: Path,
) -> None:
    file = tree / "tests" / "optim" / "test_sums.py"
    file.write_text(TESTS.replace("== 4", "== 5"))
    found = find(tree, MORE, OPTIONS)
    assert (found.where, found.whole) == ("no answer", False)
    assert found.test == "tests/optim/test_sums.py::test_twice fails without the fault, too."
    found = find(tree, MORE, ["--no-such-option"])
    assert found.where == "no answer" and "exit code 4" in found.test


@pytest.mark.parametrize(
    ("line", "test"),
    [
        ("FAILED tests/a/test_b.py::test_c - AssertionError: d - e", "tests/a/test_b.py::test_c"),
        ("FAILED tests/a/test_b.py::C::test_d", "tests/a/test_b.py::C::test_d"),
        (
            "FAILED tests/a/test_b.py::test_c[d - e 1]-f.py] - assert []",
            "tests/a/test_b.py::test_c[d - e 1]-f.py]",
        ),
        ("FAILED optim/muon.py::optim.muon.muon", "optim/muon.py::optim.muon.muon"),
        ("ERROR tests/a/test_b.py - ImportError: c.py::d", "tests/a/test_b.py"),
        ("SKIPPED [1] tests/a/test_b.py:3: FAILED tests/a/test_c.py::test_d", ""),
    ],
)
def test_the_first_test_that_failed_is_read_from_the_summary(line: str, test: str) -> None:
    before = "FAILED tests/a/test_x.py::test_x\n=== short test summary info ===\nSKIPPED [1] y\n"
    assert first_failure(f"{before}{line}\nFAILED z.py::z\n") == (test or "z.py::z")


def test_the_table_names_what_found_each_fault() -> None:
    found = [
        seeded_faults.Found(MORE, "short suite in its room", "tests/a/test_b.py::test_c[d|e]", 4.6),
        seeded_faults.Found(TWICE, "not found", "", 9),
    ]
    assert seeded_faults.table(found).splitlines()[2:] == [
        "| twice is thrice | `optim/sums.py` | short suite in its room "
        "| `tests/a/test_b.py::test_c[d\\|e]` | 5 |",
        "| twice adds 2 | `optim/sums.py` | not found |  | 9 |",
    ]


def test_a_text_that_is_in_no_name_is_a_mistake() -> None:
    command = [sys.executable, "-m", "tests.seeded_faults", "--only", "no such fault"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "schedules are read one step ahead" in done.stderr
