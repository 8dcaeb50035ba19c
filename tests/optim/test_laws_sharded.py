"""Law 7, shardings: what laws_sharded.py found on four simulated devices, a test a finding."""

import pytest

from tests import laws_table, runs

# Two that use norms of whole parameters, and two that do not.
REFUSED, ALLOWED = ("optax.lamb", "optax.contrib.muon"), ("optax.adam", "optax.lion")


@pytest.fixture(scope="module")
def found(request):
    asked = runs.asked(request, "row", "how")
    parts = [f"{name}-parts" for name in (*REFUSED, *ALLOWED)]
    words = {*parts, *(laws_table.case_name(*case) for case in asked)}
    by_row = runs.findings("row", "tests.laws_sharded", *words)
    assert set(by_row) == {row.name for row, _ in asked} | {*REFUSED, *ALLOWED}
    return by_row


@pytest.mark.parametrize(("row", "how"), laws_table.ways("four devices"))
def test_law_7_a_sharded_update_equals_the_unsharded_one_or_is_refused(found, row, how):
    problem = found[row.name][how]
    assert problem == "", problem


def test_norms_of_shards_are_refused_and_elementwise_updates_are_not(found):
    assert all(found[name]["refused"] for name in REFUSED)
    assert not any(found[name]["refused"] for name in ALLOWED)
