"""20 steps on meshes of several devices are those on one: what tests/sharded_runs.py found."""

import pytest

from tests import runs, sharded_runs, short

CASES = [(model, name, runs.mesh_name(axes)) for model, name, axes in sharded_runs.cases()]
# Of each model one is short: of Muon, on the mesh of all axes.
CASES.sort(key=lambda case: case[1] != "muon")
EACH = short.parametrize(("model", "optimizer", "mesh"), CASES)

# Differences of parameters and of an optimizer's state to the largest value of their array. Sums in
# another order differ by rounding: of float32 for AdamW and Muon, of float64 for the others. The
# norms of a ViT subtract the mean, so that one direction of its gradients is almost zero; SOAP
# divides it by its own small size, and magnifies rounding.
CLOSE = {
    "adamw": (1e-3, 1e-3),
    "muon": (1e-3, 1e-3),
    "muonclip": (1e-3, 1e-3),
    "gpt shampoo": (1e-10, 1e-10),
    "gpt soap": (1e-9, 1e-9),
    "vit shampoo": (1e-6, 1e-6),
    "vit soap": (1e-4, 5e-3),
}


@pytest.fixture(scope="module")
def found(request):
    cases = [" ".join(case) for case in runs.asked(request, "model", "optimizer", "mesh")]
    return runs.findings("case", "tests.sharded_runs", *cases)


@EACH
def test_twenty_steps_an_evaluation_and_a_sample_are_those_of_one_device(
    found, model, optimizer, mesh
):
    """Also with a loss in chunks, dropout, microbatches, averages, clipping and skipping."""
    case = found[f"{model} {optimizer} {mesh}"]
    most_param, most_state = CLOSE.get(f"{model} {optimizer}") or CLOSE[optimizer]
    assert case["learned"] > 0.1
    assert case["losses"] < 1e-5 and case["evaluation"] < 1e-5  # reported in float32
    assert case["params"] < most_param and case["state"] < most_state
    assert case["text"]


@EACH
def test_parameters_are_divided_and_stay_so(found, model, optimizer, mesh):
    case = found[f"{model} {optimizer} {mesh}"]
    axes = next(a for _, _, a in sharded_runs.cases() if runs.mesh_name(a) == mesh)
    assert case["shards"] == axes.get("fsdp", 1) * axes.get("tensor", 1)
    assert case["kept"]
