"""Law 7, shardings: what laws_sharded.py found on four simulated devices, a test a finding."""

import pytest

from tests import laws_table, runs

# The first of these tests runs all rows.
pytestmark = pytest.mark.timeout(1500)
# Two that use norms of whole parameters, and two that do not.
REFUSED, ALLOWED = ("optax.lamb", "optax.contrib.muon"), ("optax.adam", "optax.lion")


@pytest.fixture(scope="module")
def found(request):
    rows = {row.name for row, _ in runs.asked(request, "row", "how")} | {*REFUSED, *ALLOWED}
    by_row = runs.findings("row", "tests.laws_sharded", *rows)
    assert set(by_row) == rows
    return by_row


@pytest.mark.parametrize(("row", "how"), laws_table.ways("four devices"))
def test_law_7_a_sharded_update_equals_the_unsharded_one_or_is_refused(found, row, how):
    problem = found[row.name][how]
    assert problem == "", problem


def test_norms_of_shards_are_refused_and_elementwise_updates_are_not(found):
    assert all(found[name]["refused"] for name in REFUSED)
    assert not any(found[name]["refused"] for name in ALLOWED)
