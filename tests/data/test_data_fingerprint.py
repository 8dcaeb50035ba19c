"""A run that is resumed notices that its data changed, also those of a data set of the user's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import runs
from tests.sweep.test_sweep import folders, replaced, write_sweep
from trainer.data.absent import DeclaredData
from trainer.engine.contracts import ComponentError
from trainer.engine.datasets import data_fingerprint, describe_fingerprint
from trainer.workdir import fingerprint_differences

PACKAGE = '''
"""A data set that reads its arrays from files, in order."""
from pathlib import Path
import jax
import numpy as np

FOLDER = Path(__file__).parent


class Stored:
    batch_size, num_examples = 8, 24
    element_spec = {
        "image": jax.ShapeDtypeStruct((8, 4, 4, 1), np.float32),
        "label": jax.ShapeDtypeStruct((8,), np.int32),
    }

    def train(self, batch_index, seed):
        images, labels = (np.load(FOLDER / f"{name}.npy") for name in ("image", "label"))
        while True:
            rows = np.arange(batch_index * 8, batch_index * 8 + 8) % 24
            yield {"image": images[rows], "label": labels[rows]}
            batch_index += 1

    def evaluate(self):
        yield {**next(self.train(0, 0)), "mask": np.ones(8, np.float32)}


class Named(Stored):
    fingerprint = "version 1 of the files"


class Method(Stored):
    def fingerprint(self):
        return "a"


class Unseeded(Stored):
    def train(self, batch_index, seed):
        for batch in super().train(batch_index, seed):
            yield batch | {"image": batch["image"] + np.random.rand(8, 4, 4, 1).astype("f4")}


class UnseededButNamed(Unseeded):
    fingerprint = "a"
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the package `stored`, the arrays of its data set and a config that names it."""
    draw = np.random.default_rng(0)
    (tmp_path / "stored.py").write_text(PACKAGE)
    np.save(tmp_path / "image.npy", draw.normal(size=(24, 4, 4, 1)).astype(np.float32))
    np.save(tmp_path / "label.npy", draw.integers(0, 3, 24).astype(np.int32))
    monkeypatch.syspath_prepend(runs.LAB)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("stored", None)


def train(folder: Path, *more: str, data: str = "Stored") -> int:
    config = runs.write_config(folder, f"experiment.data = @stored.{data}()\n")
    return runs.train(config, folder / "run", "--vocabulary=stored", *more)


def shift_labels(folder: Path) -> None:
    np.save(folder / "label.npy", (np.load(folder / "label.npy") + 1) % 3)


def record(workdir: Path) -> Any:
    return json.loads((workdir / "run.json").read_text())


def test_shifted_labels_of_ones_own_data_are_refused_until_they_are_allowed(folder, capsys):
    assert train(folder, "--until=2") == 75
    assert train(folder, "--until=3") == 75  # the same data
    shift_labels(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    capsys.readouterr()
    assert train(folder, "--until=4") == 2
    said = capsys.readouterr().err
    assert "This process would change the data of the run" in said and "data: batches " in said
    assert "--allow_changed=data." in said and len(said.splitlines()) <= 4
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")} == before
    assert train(folder, "--until=4", "--allow_changed=data") == 75


@pytest.mark.long
def test_the_plan_says_which_fingerprint_is_used(folder):
    assert train(folder, "--until=1") == 75
    assert (
        "fingerprint of the data: a hash of training batches 0 and 2 and of the first batch of "
        "test; the data set has none\n"
    ) in (folder / "run" / "plan.txt").read_text()
    named = ["--until=1", "--allow_changed=data"]
    assert train(folder, *named, data="Named") == 75
    assert record(folder / "run")["fingerprint"]["data"] == "version 1 of the files"
    text = (folder / "run" / "plan.txt").read_text()
    assert "fingerprint of the data: that of the data set\n" in text


@pytest.mark.long
def test_a_data_set_with_a_fingerprint_is_not_hashed(folder):
    assert train(folder, "--until=2", data="Named") == 75
    shift_labels(folder)
    assert train(folder, "--until=3", data="Named") == 75


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("Method", "The attribute fingerprint of the data set is a method. It must be a text"),
        ("Unseeded", "train(0, 0) of the data set yielded two different batches. A batch must be"),
    ],
)
def test_a_data_set_that_cannot_be_recognized_is_refused_before_the_folder_exists(
    folder, capsys, data, words
):
    assert train(folder, "--until=2", data=data) == 2
    said = capsys.readouterr().err
    assert "run.gin:1: " in said and words in said
    assert not (folder / "run").exists()


@pytest.mark.long
def test_batches_that_nothing_decides_are_trained_on_if_the_data_have_a_fingerprint(folder):
    assert train(folder, "--until=2", data="UnseededButNamed") == 75


@pytest.mark.long
def test_a_run_of_an_earlier_version_which_did_not_know_its_data_is_resumed(folder, capsys):
    assert train(folder, "--until=2") == 75
    content = record(folder / "run")
    known, content["fingerprint"]["data"] = content["fingerprint"]["data"], ""
    (folder / "run" / "run.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert train(folder, "--until=3") == 75
    assert "Changed" not in capsys.readouterr().err
    assert record(folder / "run")["fingerprint"]["data"] == known


def test_data_that_are_not_known_are_no_difference_of_two_runs():
    assert (
        fingerprint_differences({"data": ""}, {"data": "a"})
        == fingerprint_differences({"data": "a"}, {"data": ""})
        == []
    )
    assert [str(each) for each in fingerprint_differences({"data": "a"}, {"data": "b"})] == [
        "data: a -> b"
    ]


@pytest.mark.long
def test_the_trials_of_a_sweep_have_the_fingerprint_of_their_data(folder):
    assert train(folder, "--until=2") == 75
    file = write_sweep(folder, replaced("data", "!stored.Stored"), trials=1)
    options = f"--config={file}", f"--workdir={folder / 'sweep'}", "--vocabulary=stored"
    assert runs.sweep(*options) == 0
    found = {record(trial)["fingerprint"]["data"] for trial in folders(folder / "sweep")}
    assert found == {record(folder / "run")["fingerprint"]["data"]}


class Numbers:
    """Examples that are their numbers, in order; `change` adds to some of them."""

    splits = ("validation", "test")

    def __init__(self, batch_size: int = 4, num_examples: int = 4_000, **change: int):
        self.batch_size, self.num_examples, self.change = batch_size, num_examples, change
        self.element_spec = {"x": jax.ShapeDtypeStruct((batch_size,), np.int64)}
        self.indices: list[int] = []

    def train(self, batch_index: int, seed: int) -> Iterator[dict[str, Any]]:
        assert seed == 0
        self.indices.append(batch_index)
        if (batch_index + 1) * self.batch_size > self.num_examples:
            raise IndexError("The data have one epoch.")
        yield self.batch(f"train{batch_index}", batch_index)

    def evaluate(self, split: str) -> Iterator[dict[str, Any]]:
        yield {**self.batch(split, 0), "mask": np.ones(self.batch_size, np.float32)}

    def batch(self, name: str, number: int) -> dict[str, Any]:
        first = number * self.batch_size + self.change.get(name, 0)
        return {"x": np.arange(first, first + self.batch_size)}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Numbers(), True),
        (Numbers(train0=1), False),
        (Numbers(train100=1), False),
        (Numbers(train50=1), True),  # no other batch is read
        (Numbers(validation=1), False),
        (Numbers(test=1), False),
        (Numbers(num_examples=4_004), False),
    ],
)
def test_the_hash_covers_batches_of_every_split_and_the_size(other, same):
    assert (data_fingerprint(other) == data_fingerprint(Numbers())) == same


def test_the_hash_covers_the_splits_and_dtypes(monkeypatch):
    expected = data_fingerprint(Numbers())
    monkeypatch.setattr(Numbers, "splits", {"test": 4})
    assert data_fingerprint(Numbers()) != expected


@pytest.mark.parametrize(("examples", "far"), [(4, 0), (8, 1), (11, 1), (404, 100), (10**9, 100)])
def test_the_far_batch_is_of_the_first_epoch_and_not_too_far(examples, far):
    numbers = Numbers(num_examples=examples)
    data_fingerprint(numbers)
    assert numbers.indices == [0, 0, far]
    batches = f"batches 0 and {far} " if far else "batch 0 "
    assert f"a hash of training {batches}" in describe_fingerprint(numbers)


@pytest.mark.parametrize("examples", [0, None, float("inf")])
def test_a_data_set_may_have_an_unknown_number_of_examples(examples):
    numbers = Numbers(num_examples=10**9)
    numbers.num_examples = examples
    assert "batches 0 and 100 " in describe_fingerprint(numbers)


@pytest.mark.parametrize("own", [3, "", b"a"])
def test_a_fingerprint_is_a_text(monkeypatch, own):
    monkeypatch.setattr(Numbers, "fingerprint", own, raising=False)
    with pytest.raises(ComponentError, match="must be a text that changes when the data change"):
        data_fingerprint(Numbers())


def test_a_plan_computes_no_fingerprint(monkeypatch):
    def read(self: Any) -> str:
        raise AssertionError("The data were read.")

    assert describe_fingerprint(numbers := Numbers()) and not numbers.indices
    monkeypatch.setattr(Numbers, "fingerprint", property(read), raising=False)
    assert describe_fingerprint(Numbers()) == "fingerprint of the data: that of the data set"


class Wrapped:
    def __init__(self, data: Any):
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def test_a_wrapper_has_the_fingerprint_of_the_data_set_in_it(monkeypatch):
    wrapped = Wrapped(Numbers())
    assert data_fingerprint(wrapped) == data_fingerprint(Numbers())
    monkeypatch.setattr(Numbers, "fingerprint", "numbers", raising=False)
    assert data_fingerprint(wrapped) == "numbers"
    assert describe_fingerprint(wrapped) == "fingerprint of the data: that of the data set"


def test_the_plan_of_data_that_are_not_on_this_machine_names_no_fingerprint():
    like = Numbers()
    like.splits = {"test": 4}  # type: ignore[assignment]
    assert describe_fingerprint(DeclaredData("lab.numbers", "Copy them.", like)) == ""
