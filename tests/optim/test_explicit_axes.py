"""Groups on meshes with explicit axes, which `jax.make_mesh` makes by default.

The devices are simulated in processes of their own: explicit_cases.py is short, and
laws_explicit.py has every row of the table of the laws.
"""

import pytest

from tests import laws_table, runs


@pytest.fixture(scope="module")
def cases():
    return runs.findings("case", "tests.explicit_cases")


@pytest.mark.long
@pytest.mark.parametrize("row", ["optax.adamw", "optax.lbfgs (zoom)", "optim.muon"])
def test_every_float_is_scheduled_or_traced_on_explicit_axes(cases, row):
    assert row in cases


@pytest.mark.long
def test_clipping_layer_decay_skipping_and_rounding_work_on_explicit_axes(cases):
    assert cases["options"]["float32"] < 1e-6
    assert cases["options"]["bfloat16"] <= 2**-8  # the last bit


@pytest.mark.long
def test_one_axis_may_be_explicit_and_the_other_automatic(cases):
    assert cases["half explicit"]["far"] < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["lbfgs", "sophia", "sam"])
def test_the_functions_of_the_loss_may_hold_and_name_shardings(cases, optimizer):
    assert cases["loss with shardings"][optimizer] < 1e-5


@pytest.mark.long
def test_inside_shard_map_over_one_axis_the_other_stays_explicit(cases):
    found = cases["partly manual"]
    assert found["far"] < 1e-6
    assert found["spec"] == "P(None, 'model')"


@pytest.mark.long
@pytest.mark.parametrize("how", ["jit", "eager"])
def test_an_array_that_cannot_be_passed_to_an_optimizer_is_refused_with_advice(cases, how):
    message = cases["held array"][how]
    assert message.startswith("an optax transformation cannot update the group 'all'.")
    for words in (
        "uses an array that is not one of its arguments",
        "functools.partial",
        "AxisType.Auto",
    ):
        assert words in message


@pytest.mark.long
def test_an_init_that_multiplies_parameters_works_on_explicit_axes(cases):
    found = cases["product at init"]
    assert found["far"] < 1e-6
    # What is shaped like the parameter is sharded like it.
    assert found["spec"] == "P('data', 'model')"


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_factors_that_are_split_stay_so_outside_of_groups(cases, optimizer):
    found = cases["split factors"][optimizer]
    assert found["kept"] and found["far"] < 1e-5 and found["moved"] > 0.1


@pytest.fixture(scope="module")
def laws(request):
    asked = runs.asked(request, "row", "how")
    words = [laws_table.case_name(*case) for case in asked]
    found = runs.findings("row", "tests.laws_explicit", *words)
    assert set(found) == {row.name for row, _ in asked}
    return found


# The first of these tests computes all of them.
@pytest.mark.parametrize(("row", "how"), laws_table.ways("explicit axes"))
def test_laws_4_and_7_hold_together(laws, row, how):
    problem = laws[row.name][how]
    assert problem == "", problem
