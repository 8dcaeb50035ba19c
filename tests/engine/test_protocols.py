"""The models, data sets, losses and metrics of Lockstep and of a user's keep the protocols."""

import inspect
import re
from typing import Any

import numpy as np
import pytest
from clu import metrics as clu_metrics

from tests import runs
from trainer import data, losses, models, protocols


def taken(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


ARRAYS = {"image": np.zeros((4, 2, 2, 1), np.float32), "label": np.zeros(4, np.int32)}
MODEL = models.mlp(width=2)


@pytest.mark.parametrize(
    ("protocol", "ours", "methods"),
    [
        (protocols.Model, MODEL, ["init", "apply"]),
        (protocols.Dataset, data.ArrayDataset(ARRAYS, ARRAYS, batch_size=2), ["train", "evaluate"]),
        (protocols.Loss, losses.squared_error(), ["__call__"]),
        (protocols.Metric, clu_metrics.Average, ["empty", "merge", "compute"]),
    ],
)
def test_ours_take_the_arguments_of_the_protocol(protocol, ours, methods):
    for name in methods:
        method = getattr(ours, name) if name != "__call__" else ours
        optional = {protocols.Dataset: ["rank", "size"]}.get(protocol, [])
        optional = ["observe"] if (protocol, name) == (protocols.Model, "apply") else optional
        assert taken(method) == [*taken(getattr(protocol, name)), *optional], name


def test_errors_name_what_a_protocol_requires():
    assert protocols.members(protocols.Dataset) == (
        "element_spec, batch_size, num_examples, train(batch_index, seed) and evaluate(split)"
    )
    assert protocols.members(protocols.Model) == (
        "init(key, batch) and apply(params, model_state, batch, *, key, train)"
    )


BROKEN = """
class Half:
    batch_size, num_examples, element_spec = 8, 8, {}

    def evaluate(self):
        return []


class Odd:
    def init(self, key, batch):
        return {}, {}


def half() -> Half:
    return Half()


def odd() -> Odd:
    return Odd()


def kind() -> type:
    return Odd
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("data = @broken.half()", "The data set broken.half has no 'train'. A data set must have"),
        ("data = @broken.half()", protocols.members(protocols.Dataset)),
        (
            "data = 'broken.half'",
            "experiment takes a data set for 'data', and was given the string 'broken.half'. To "
            "pass what broken.half returns, call it: @broken.half() or !broken.half.",
        ),
        ("data = 'broken.hafl'", "A data set is a call. There is no function 'broken.hafl'. Did"),
        ("model = @broken.odd()", "model is an Odd; it must be a flax linen module or have init"),
        ("model = @broken.odd()", protocols.members(protocols.Model)),
        ("metrics = {'a': @broken.kind()}", "'a' is a type; it must be a class of clu.metrics"),
        ("metrics = {'a': @broken.kind()}", protocols.members(protocols.Metric)),
    ],
)
def test_a_component_that_lacks_a_method_gets_the_protocol_quoted(
    tmp_path, monkeypatch, lab, capfd, more, words
):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    config = runs.write_config(tmp_path, f"experiment.{more}\n")
    said = runs.said(capfd, config, tmp_path / "run", "--vocabulary=broken", code=2)
    assert re.search(r"run.gin:1\b", said) and words in " ".join(said.split()), said
