"""Models under data, fsdp and tensor axes: what tensor_cases.py found on simulated devices."""

import pytest

from tests import runs

# A process of its own compiles the programs of all tests, in the first one.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found():
    return runs.findings("case", "tests.tensor_cases")


def test_losses_and_gradients_under_three_axes_are_those_of_one_device(found):
    """Also with dropout, whose masks are the same, and with sizes that do not divide."""
    models = {case: of for case, of in found.items() if "apart" in of}
    assert len(models) == 5
    for case, of in models.items():
        assert of["many"] == pytest.approx(of["one"], rel=1e-5), case
        assert max(of["apart"].values()) < 1e-5, (case, of["apart"])


def test_devices_exchange_activations_as_in_megatron_and_kernels_and_nothing_else(found):
    # A batch of 8 sequences of 16 tokens, over 4 devices, of width 32; 2 layers; 64 tokens are
    # known; float32.
    activations, layer, embedding = 8 // 4 * 16 * 32 * 4, 12 * 32 * 32 * 4, 64 * 32 * 4
    # A layer: the sums over tensor after attention and perceptron and, of their inputs' gradients,
    # before them; kernels are gathered in both passes and their gradients added, each a half.
    layers = 2 * (4 * activations + 3 * layer / 2)
    # Embedding and head: one sum over tensor, one gathering, one sum of the gradient.
    ends = 2 * (activations + 2 * embedding / 2)
    assert 1.0 <= found["traffic"]["bytes"] / (layers + ends) < 1.03  # norms, statistics of rows


def test_biases_and_a_head_of_classes_add_no_exchange_of_parts(found):
    """Where fsdp alone split them, each had a collective-permute or an all-to-all of its own."""
    by = found["step by default"]
    assert by["biases"] == by["no biases"]
    kinds = {line.partition(" over ")[0] for line in by["vit"]}
    assert kinds == {"all-gather", "all-reduce"}


def test_attention_by_xla_is_divided_by_heads_as_our_own_is(found):
    both = found["traffic by attention"]
    assert both["xla"] == both["plain"]
    # Over tensor, only sums: neither queries nor keys nor values are gathered.
    assert [name for name in both["xla"] if "tensor" in name] == ["all-reduce over tensor"]


def test_queries_keys_and_values_are_divided_alike_for_cudnn(found):
    """Otherwise jax refuses to partition it; also where one head serves several devices."""
    alike = ["(('data', 'fsdp'), None, 'tensor')"] * 3
    named = ("4 of 4 heads", "2 of 4 heads", "1 of 4 heads")
    assert found["operands of cudnn"] == dict.fromkeys(named, alike)


def test_each_device_draws_its_part_of_the_first_parameters_with_the_same_bits(found):
    """None needs the numbers of all, which may be more than its memory holds."""
    for case, of in found["first parameters"].items():
        assert of["equal"], case
        assert of["collectives"] == [], case
        # Three times its part; 2.3 to 3 times the size of all, if these are drawn whole.
        assert of["temporary"] < 3 * of["size"] / 4, case


def test_model_and_loss_see_the_mesh_wherever_they_are_traced(found):
    parts = ("first state", "step", "diagnosis", "evaluation")
    assert found["known mesh"]["one"] == {part: [{}] for part in parts}
    assert found["known mesh"]["many"] == {part: [{"data": 2, "tensor": 2}] for part in parts}


def test_constraints_are_for_automatic_axes_only(found):
    assert found["left alone"] == {"automatic": True, "in shard_map": False, "explicit": False}


def test_steps_and_an_evaluation_under_three_axes_are_those_of_one_device(found):
    assert found["steps"]["many"] == pytest.approx(found["steps"]["one"], rel=1e-5)
    assert len(found["steps"]["one"]) == 4
