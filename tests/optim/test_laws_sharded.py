"""Law 7, shardings: what laws_sharded.py found on four simulated devices, a test a finding."""

import pytest

from tests import runs
from tests.laws_table import ROWS

# The first of these tests runs the whole column.
pytestmark = [pytest.mark.laws, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def found():
    by_row = runs.findings("row", "tests.laws_sharded")
    assert set(by_row) == {row.name for row in ROWS}
    return by_row


@pytest.mark.parametrize("how", ["jit", "shard_map", "parts"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_law_7_a_sharded_update_equals_the_unsharded_one_or_is_refused(found, row, how):
    problem = found[row.name][how]
    assert problem == "", problem


def test_norms_of_shards_are_refused_and_elementwise_updates_are_not(found):
    assert found["optax.lamb"]["refused"]
    assert found["optax.contrib.muon"]["refused"]
    assert not found["optax.adam"]["refused"]
    assert not found["optax.lion"]["refused"]
