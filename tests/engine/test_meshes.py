"""Several devices compute what one does: what mesh_cases.py found on simulated devices."""

import re

import numpy as np
import pytest

from tests import runs, token_cases
from tests.engine.test_loss_contract import EXAMPLES, KERNEL, TEST

# A process of its own compiles the programs of all tests, in the first one.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found():
    by_case = runs.findings("case", "tests.mesh_cases")
    return {case: (of["one"], of["many"]) for case, of in by_case.items()}


@pytest.mark.parametrize("case", ["masked", "masked, tensor"])
def test_masked_steps_on_several_devices_are_those_of_one(found, case):
    one, many = found[case]
    assert one["devices"] == 1 and many["devices"] == 4
    for name in ("loss", "bits", "accuracy", "kernel", "eval"):
        np.testing.assert_allclose(one[name], many[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["tokens", "tokens, tensor"])
def test_tokens_on_several_devices_have_equal_weights_and_are_divided(found, case):
    one, many = found[case]
    assert one["devices"] == 1 and many["devices"] == 4
    for name in ("loss", "perplexity", "z_loss", "kernel", "eval"):
        np.testing.assert_allclose(one[name], many[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert many["operations"] < 0.3 * one["operations"]
    # What is kept of single sequences, of which the last batch does not divide over the devices.
    examples = one["examples"], many["examples"]
    assert examples[0]["sha256"] == examples[1]["sha256"]
    assert len(examples[0]["loss"]) == int(token_cases.TEST["mask"].any(1).sum())
    for name in ("loss", "accuracy", "weights"):
        np.testing.assert_allclose(examples[0][name], examples[1][name], rtol=1e-5)


def test_divided_parameters_are_gathered_once_and_not_for_each_token(found):
    one, divided = found["samples"]
    assert divided["text"] == one["text"]
    assert divided["exchanges"] > 0 and divided["in loops"] == 0


def test_a_lookahead_and_a_readout_are_divided_as_the_parameters_are(found):
    one, many = found["wrapped"]
    assert (one["shards"], many["shards"]) == (1, 8)
    assert many["divided alike"] == [True] * 3
    for name in ("kernel", "evaluated"):
        np.testing.assert_allclose(one[name], many[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert one["kernel"] != one["evaluated"]


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_divided_factors_keep_their_shardings_and_train_as_on_one_device(found, name):
    one, many = found[name]
    assert one["losses"][-1] != one["losses"][0]
    # SOAP divides small elements by their size: on 8 devices of the axis data alone, which split no
    # factor, the last loss differs by 4e-4 as well.
    rtol = {"soap": 1e-3, "shampoo": 1e-4}[name]
    np.testing.assert_allclose(one["losses"], many["losses"], rtol=rtol)
    for path, values in one["kernels"].items() if name == "shampoo" else ():
        np.testing.assert_allclose(values, many["kernels"][path], atol=1e-3, err_msg=path)
    # By hand: rows over fsdp, columns over tensor, and the right factors' rows over tensor.
    sides = {"left": ["None", "None", "fsdp", "None"], "right": ["None", "None", "tensor", "fsdp"]}
    checked = 0
    for path, spec in many["specs"].items():
        for side, wanted in sides.items():
            if re.search(f"(^|/){side}(_basis|_root)?/", path):
                assert spec == wanted, path
                checked += 1
    assert checked == 4
    assert many["held"] < 0.4 * one["held"]


def test_batches_of_any_size_are_evaluated_on_several_devices_as_on_one(found):
    """Also by losses that compare examples, metrics without a mask, and chunked logits."""
    uneven = {case: pair for case, pair in found.items() if case.startswith("batches of ")}
    assert len(uneven) == 6
    for one, many in uneven.values():
        assert one.keys() == many.keys()
        for name, value in one.items():
            assert many[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name
    del uneven["batches of tokens"]
    total = (TEST["x"] @ KERNEL).sum()
    for one, _ in uneven.values():
        assert one["eval/unmasked"] == pytest.approx(EXAMPLES - 1 + 0.001 * total, rel=1e-5)
