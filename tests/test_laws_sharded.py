"""Law 7, shardings: what laws_sharded.py found on four simulated devices, a test a finding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws_table import ROWS

pytestmark = pytest.mark.timeout(1500)  # the first of these tests runs the whole column


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws_sharded"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    by_row = {line.pop("row"): line for line in lines}
    assert set(by_row) == {row.name for row in ROWS}, done.stderr[-2000:]
    return by_row


@pytest.mark.parametrize("how", ["jit", "shard_map", "parts"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_law_7_shardings_give_the_unsharded_answer_or_a_refusal(found, row, how):
    problem = found[row.name][how]
    assert problem == "", problem


def test_norms_of_parts_are_refused_and_single_numbers_are_not(found):
    assert found["optax.lamb"]["refused"]
    assert found["optax.contrib.muon"]["refused"]
    assert not found["optax.adam"]["refused"]
    assert not found["optax.lion"]["refused"]
