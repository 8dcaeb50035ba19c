"""What a plan finds in the values of a data set."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import data, losses
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.engine import plan_learning
from trainer.engine.experiment import Experiment
from trainer.engine.plan import Plan, make_plan
from trainer.engine.program import Program
from trainer.models import mlp

CLASSES = 4


def arrays() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns 200 examples to train on and 80 to test on, with equally many of each class."""
    draw = np.random.default_rng(0)

    def split(count: int) -> dict[str, np.ndarray]:
        label = (np.arange(count) % CLASSES).astype(np.int32)
        return {"image": draw.normal(size=(count, 3)).astype(np.float32), "label": label}

    return split(200), split(80)


def found(*given: Any, **options: Any) -> list[str]:
    return list(planned(*given, **options).warnings)


def planned(
    train: Any, test: Any, loss: Any = None, make: Callable[..., Any] = data.ArrayDataset
) -> Plan:
    experiment = Experiment(
        model=mlp(width=4, num_classes=CLASSES),
        data=make(train, test, batch_size=20),
        loss=loss or losses.softmax_cross_entropy(),
        optimizer=optax.sgd(0.1),
        steps=4,
        log_every=4,
        eval_every=4,
        save_every=4,
    )
    return make_plan(Program(experiment))


class Streamed:
    """Arrays behind methods only, as of a data set that reads files."""

    def __init__(self, train: Any, test: Any, batch_size: int):
        self._inner = data.ArrayDataset(train, test, batch_size=batch_size)
        self.batch_size, self.num_examples = batch_size, self._inner.num_examples
        self.element_spec = self._inner.element_spec

    def train(self, batch_index: int, seed: int) -> Iterator[Any]:
        return self._inner.train(batch_index, seed)

    def evaluate(self) -> Iterator[Any]:
        return self._inner.evaluate()


def test_data_without_a_fault_have_no_warning():
    assert found(*arrays()) == []
    assert found(*arrays(), make=Streamed) == []


@pytest.mark.parametrize("make", [data.ArrayDataset, Streamed])
@pytest.mark.parametrize(
    ("label", "words"),
    [
        (-1, "'label' is -1 in 1 label of {what}, first in example 7 (from 0). The loss reads"),
        (-1, "classes 0 to 3. Remove these examples. If -1 stands for no label, set"),
        (4, "'label' is 4 in 1 label of {what}"),
        (4, "Give the model at least 5 outputs (`num_classes` of Lockstep's models), or cor"),
    ],
)
def test_a_label_that_is_not_a_class_is_an_error(label, words, make):
    train, test = arrays()
    test["label"][7] = label
    what = "the test split" if make is data.ArrayDataset else "the first test batch"
    with pytest.raises(ConfigError) as caught:
        found(train, test, make=make)
    assert words.format(what=what) in str(caught.value)
    test["mask"] = np.ones(80, np.float32)
    test["mask"][7] = 0
    train["mask"] = np.ones(200, np.float32)
    if make is data.ArrayDataset:
        assert found(train, test) == []


@pytest.mark.parametrize("values", [(-1, 1), (1, 2, 3, 4), (0, 2)])
def test_labels_that_are_not_numbered_from_0_are_to_be_numbered(values):
    """As ignore_label, -1 would leave one class, of which every model finds all."""
    train, test = arrays()
    for split in (train, test):
        split["label"] = np.resize(np.array(values, np.int32), len(split["label"]))
    if max(values) < CLASSES and min(values) >= 0:
        found(train, test)
        return
    with pytest.raises(ConfigError) as caught:
        found(train, test)
    many = len(values)
    told = f"The split has {many} different labels: number them from 0 to {many - 1}"
    assert told in str(caught.value) and "ignore_label" not in str(caught.value)


def test_a_loss_that_ignores_most_examples_is_a_warning():
    train, test = arrays()
    loss = losses.softmax_cross_entropy(ignore_label=-1)
    assert found(train, test, loss) == []
    train["label"][:100] = -1
    (said,) = found(train, test, loss)
    assert said.startswith("The loss ignores 50% of the examples of the training split")
    train["label"][100:] = 2
    said = found(train, test, loss)
    assert any("does not ignore are of class 2: a model that always" in each for each in said)


def test_the_columns_of_a_table_that_are_not_finite_are_named():
    train, test = arrays()
    columns = train["image"].shape[1]
    train["image"][:, 1] = np.nan
    (said,) = (each for each in found(train, test) if "not finite" in each)
    assert "in 200 of 200 examples" in said
    assert f"They are in column 1 of {columns} (from 0) only." in said
    train["image"][5] = np.nan
    (said,) = (each for each in found(train, test) if "not finite" in each)
    assert "column" not in said


def test_the_error_names_the_line_of_the_data(tmp_path, capsys, monkeypatch):
    (tmp_path / "unlabelled.py").write_text(UNLABELLED)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", f"--config={config}", "--vocabulary=unlabelled"]) == 2
    assert "run.yaml:2: 'label' is -1 in 3 labels of the training split" in capsys.readouterr().err


def test_a_negative_label_of_a_stream_is_never_the_last_class():
    logits, batch = jnp.zeros((2, CLASSES)), {"label": jnp.array([-1, 3])}
    values = losses.softmax_cross_entropy()(logits, batch)
    assert np.isnan(values[0]) and values[1] == pytest.approx(np.log(CLASSES))


def own(outputs: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])


@pytest.mark.long
def test_a_loss_of_ones_own_is_warned_of_labels_without_an_output():
    train, test = arrays()
    assert found(train, test, own) == []
    train["label"][3] = 4
    (said,) = found(train, test, own)
    assert said.startswith(
        "'label' has values from 0 to 4 in the training split, and the model has"
    )
    # Many values are numbers of something else than a class.
    train["label"][:], test["label"][:] = np.arange(200), np.arange(80)
    assert found(train, test, own) == []
    train, test = arrays()
    # A field that the loss does not read may be anything.
    train["kind"], test["kind"] = np.arange(200) % 7, np.arange(80) % 7
    assert found(train, test, own) == []


def test_a_value_that_is_not_finite_is_named():
    train, test = arrays()
    test["image"][11, 2] = np.nan
    (said,) = found(train, test)
    assert said.startswith(
        "'image' has values that are not finite in 1 of 80 examples of the test split, first in "
        "example 11 (from 0): its loss is then probably NaN, and no run has a result."
    )
    (said,) = found(train, test, make=Streamed)
    assert "in 1 of 20 examples of the first test batch" in said


def test_examples_of_both_splits_are_counted():
    train, test = arrays()
    test["image"][5:9], test["label"][5:9] = train["image"][105:109], train["label"][105:109]
    (said,) = found(train, test)
    assert said.startswith("4 of 80 examples of the test split are equal, in every field, to one")
    (said,) = found(train, train)
    assert said.startswith("200 of 200 examples of the test split are equal")
    # One of 200 may be there twice without a word.
    again = {key: np.concatenate([x[:1], x]) for key, x in arrays()[1].items()}
    many = {key: np.concatenate([np.roll(again[key], 1, 0), x]) for key, x in train.items()}
    assert any(each.startswith("81 of 81") for each in found(many, again))


def test_fields_that_are_equal_in_all_examples_are_named():
    train, test = arrays()
    train["image"][:], test["image"][:] = 1.5, 1.5
    said = found(train, test)
    assert "All 200 examples of the training split have the same 'image'." in said
    assert "All 80 examples of the test split have the same 'image'." in said


def test_classes_that_a_split_lacks_are_named():
    train, test = arrays()
    train["label"][train["label"] == 2] = 1
    test["label"][test["label"] == 3] = 1
    said = found(train, test)
    assert "Of class 2, the test split has 20 examples and the training split has none." in said
    assert "Of class 3, the test split has no example." in said


def test_unequal_classes_are_a_line():
    train, test = arrays()
    train["label"][:] = np.where(np.arange(200) < 190, 0, 1 + np.arange(200) % 3)
    (said,) = [each for each in found(train, test) if "unequal" in each]
    assert said == (
        "The classes of the training split are unequal: 95.0% of its examples are of class 0, and "
        "1.5% of class 1. A model that always answers 0 has an accuracy of 0.95 there."
    )


def test_the_examples_of_each_class_are_counted_if_one_has_twice_as_many(monkeypatch):
    train, test = arrays()
    assert planned(train, test).classes == ""
    train["label"][:] = np.where(np.arange(200) < 80, 0, 1 + np.arange(200) % 3)
    assert planned(train, test).classes == (
        "training examples: 80 of class 0, 40 of class 1, 40 of class 2, 40 of class 3; an answer "
        "that is always 0 has an accuracy of 0.4"
    )
    train["label"][:] = 0
    assert planned(train, test).classes.startswith("training examples: 200 of class 0; an answer")
    monkeypatch.setattr(plan_learning, "_MOST_EXAMPLES", 50)  # every fourth is looked at
    said = planned(train, test).classes
    assert said.startswith("examples of a sample of the training split: 50 of class 0; an answer")


def test_large_arrays_are_read_at_equal_distances_which_is_said(monkeypatch):
    monkeypatch.setattr(plan_learning, "_MOST_EXAMPLES", 50)
    train, test = arrays()
    train["image"][8:] = np.nan
    train["mask"], test["mask"] = np.ones(200, np.float32), np.ones(80, np.float32)
    train["mask"][:21] = 0
    (said,) = [each for each in found(train, test) if "finite" in each]
    # Of 200, every fourth: 44 from example 24 on.
    assert "in 44 of 44 examples of a sample of the training split, first in example 24 " in said


def test_a_split_of_which_nothing_counts_and_a_field_without_values_are_no_error():
    train, test = arrays()
    for split in (train, test):
        split["none"] = np.zeros((len(split["label"]), 0), np.float32)
        split["mask"] = np.ones(len(split["label"]), np.float32)
    assert found(train, test) == []
    train["mask"][:] = 0
    assert found(train, test) == []


UNLABELLED = """
import numpy as np

from trainer.data import ArrayDataset


def semi(batch_size: int = 4) -> ArrayDataset:
    x = np.arange(48, dtype=np.float32).reshape(16, 3)
    label = np.array([0, 1, 2, -1] * 4)
    label[3] = 0
    split = {"image": x, "label": label}
    return ArrayDataset(split, {"image": -x - 1, "label": abs(label)}, batch_size=batch_size)
"""
CONFIG = """model: !models.mlp {width: 4, depth: 1, num_classes: 3}
data: !unlabelled.semi {batch_size: 4}
loss: !losses.softmax_cross_entropy
optimizer: !optax.sgd {learning_rate: 0.1}
steps: 4
"""
