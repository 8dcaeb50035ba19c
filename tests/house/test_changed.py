"""Which rooms `make test CHANGED=COMMIT` tests: those that import what differs."""

import subprocess
import sys

import pytest

from tests.changed import ROOMS, rooms
from tests.runs import ROOT


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "some", "none"),
    [
        # Everything imports the optimizers.
        ("optim/muon.py", ["checkpoint", "engine", "optim", "sweep"], []),
        # A report reads results, and a claim and the library read reports.
        ("trainer/report/pairs.py", ["cli", "lockstep", "report", "studies"], ["optim"]),
        # Found by its name in a config, by whatever builds one.
        ("trainer/models/vit.py", ["engine", "models", "train"], []),
        ("trainer/sweep/slurm.py", ["cli", "sweep"], ["checkpoint", "models", "optim"]),
        ("trainer/report/html/page.js", ["report"], ["optim", "train"]),
        ("lockstep/runs.py", ["lockstep"], ["cli", "report", "sweep"]),
        ("tests/laws_table.py", ["cli", "optim"], ["report", "workdir"]),
        ("tests/writers/test_streams.py", ["writers"], ["optim"]),
        ("trainer/report/gone.py", ["report"], ["optim"]),
        ("docs/laws.md", [], ["checkpoint", "writers"]),
        ("configs/muon_vit.gin", ["config", "engine"], ["report"]),
        ("CHANGELOG.md", [], [room for room in ROOMS if room != "house"]),
        ("pyproject.toml", ROOMS, []),
    ],
)
def test_a_change_is_tested_in_the_rooms_that_import_it(
    file: str, some: list[str], none: list[str]
) -> None:
    found = rooms([file])
    assert "house" in found and set(some) <= set(found)
    assert not set(none) & set(found)


def test_an_unknown_commit_is_a_mistake() -> None:
    command = [sys.executable, "-m", "tests.changed", "no-such-commit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no-such-commit" in done.stderr and not done.stdout
