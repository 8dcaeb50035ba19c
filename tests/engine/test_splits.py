"""The splits that a data set evaluates: a validation split of ours, and those of a user's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests import runs, short
from trainer import config as configs
from trainer import data, metrics, models
from trainer.__main__ import main
from trainer.engine.contracts import ComponentError
from trainer.engine.datasets import (
    WHOLE,
    best_row,
    data_fingerprint,
    eval_batches,
    split_sizes,
    wrong_mode,
)
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program, load_located

DIGITS = """
model: !models.mlp {width: 4, depth: 1}
data: !data.digits {batch_size: 64, validation: 0.1}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optax.adamw {learning_rate: 3e-2}
steps: 6
log_every: 3
eval_every: 3
save_every: 3
writers: []
"""

pytestmark = pytest.mark.usefixtures("lab")


def toy(**options: Any) -> data.ArrayDataset:
    train = {"number": np.arange(50, dtype=np.int32)}
    test = {"number": np.arange(100, 107, dtype=np.int32)}
    return data.ArrayDataset(train, test, **({"batch_size": 5} | options))


def evaluated(dataset: data.ArrayDataset, split: str) -> list[int]:
    batches = list(dataset.evaluate(split))
    return [int(n) for b in batches for n in b["number"][b["mask"] == 1]]


def epoch(dataset: data.ArrayDataset, seed: int) -> list[int]:
    batches = dataset.train(0, seed)
    count = dataset.num_examples // dataset.batch_size
    return sorted(int(n) for _ in range(count) for n in next(batches)["number"])


def test_validation_examples_are_never_trained_on_and_none_is_lost():
    dataset = toy(validation=0.2)
    held_out = evaluated(dataset, "validation")
    assert dataset.splits == {"validation": 10, "test": 7} and dataset.num_examples == 40
    assert held_out == sorted(set(held_out)) and held_out != list(range(10))
    assert epoch(dataset, 0) == epoch(dataset, 1) == sorted(set(range(50)) - set(held_out))
    assert evaluated(dataset, "test") == evaluated(toy(), "test") == list(range(100, 107))


def test_the_cut_depends_on_its_own_seed_only():
    first = evaluated(toy(validation=0.2), "validation")
    assert first == evaluated(toy(validation=0.2, batch_size=20), "validation")
    second = toy(validation=0.2, validation_seed=1)
    assert first != evaluated(second, "validation")
    assert second.fingerprint != toy(validation=0.2).fingerprint != toy().fingerprint


def test_every_example_is_equally_often_in_the_validation_split():
    counts = np.zeros(50)
    for seed in range(400):
        counts[evaluated(toy(validation=0.2, validation_seed=seed), "validation")] += 1
    # 80 is expected of each; a binomial of 400 and 0.2 has a deviation of 8.
    assert abs(counts - 80).max() < 5 * 8


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, 1e-5, 0.99999])
def test_a_validation_split_that_cannot_be_cut_is_refused(tmp_path, capfd, share):
    path = tmp_path / "mine.yaml"
    path.write_text(DIGITS)
    options = [f"--config={path}", f"--workdir={tmp_path / 'run'}", "--set=data.batch_size=8"]
    said = runs.refused(capfd, *options, f"--set=data.validation={share}")
    cut = 0 < share < 1
    words = "Both need at least 1" if cut else "a share of the training examples between 0 and 1"
    assert words in said and "data.digits" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains the digits with a validation split, and returns the run's folder."""

    def train(name: str, *more: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "mine.yaml").write_text(DIGITS)
        options = [f"--config={folder / 'mine.yaml'}", f"--workdir={folder / 'run'}"]
        assert main([*options, *more]) == 0
        return folder / "run"

    return train


def test_both_splits_are_evaluated_and_the_plan_lists_them(trained, capfd):
    run = trained("both", "--set=data_seed=3")
    rows = [row for row in runs.lines(run) if "eval/loss" in row]
    names = {name for name in rows[0] if not name.startswith("train/")}
    wanted = {
        f"{split}/{name}" for split in ("validation", "eval") for name in ("loss", "accuracy")
    }
    assert wanted <= names and [row["step"] for row in rows] == [3, 6]
    plan = (run / "plan.txt").read_text()
    assert "examples: train 1,293, validation 144, test 360; data_seed 3" in plan
    said = capfd.readouterr().err
    assert re.search(
        r"Done: .*validation/loss \d\.\d+, validation/accuracy .*, eval/loss .*, eval/accuracy",
        said,
    )


@short.parametrize(
    ("name", "row"),
    [
        ("loss", "validation/loss"),
        ("validation/loss", "validation/loss"),
        ("eval/loss", "eval/loss"),
    ],
)
def test_the_best_checkpoint_is_chosen_on_the_split_that_best_metric_names(trained, name, row):
    often = ["eval_every=1", "save_every=1", "keep_latest=1", "steps=20", "best_mode=min"]
    noisy = ["data.validation=0.01", "optimizer.learning_rate=0.3", f"best_metric={name}"]
    run = trained("best", *(f"--set={each}" for each in often + noisy))
    rows = {line["step"]: line for line in runs.lines(run) if "eval/loss" in line}

    def best(name: str) -> int:
        return min(rows, key=lambda step: rows[step][name])

    assert len({best("validation/loss"), best("eval/loss"), 20}) == 3
    kept = {int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {best(row), 20}


@short.parametrize(
    ("validation", "best", "warned"),
    [
        ("null", "accuracy", True),
        ("null", "eval/accuracy", False),  # the file says it
        ("null", "null", False),
        ("0.1", "accuracy", False),
    ],
)
def test_a_best_checkpoint_that_the_test_split_chooses_is_a_warning(
    trained, tmp_path, capfd, validation, best, warned
):
    sets = [f"--set=data.validation={validation}", f"--set=best_metric={best}"]
    said = (
        "best_metric is 'accuracy', and the data set has no validation split: the best checkpoint"
        " is chosen by eval/accuracy, on the test split, where its value is then optimistic."
    )
    run = trained("chosen", *sets)
    at_start = " ".join(capfd.readouterr().err.split())
    explained = " ".join(runs.printed(capfd, "explain", f"--config={run / 'config.yaml'}").split())
    kept = " ".join((run / "plan.txt").read_text().split())
    assert [said in text for text in (at_start, explained, kept)] == [warned] * 3


def test_shipped_configs_choose_the_best_checkpoint_on_a_validation_split():
    for file in sorted((runs.ROOT / "configs").glob("*.[gy]*")):
        read = configs.load([str(file)], sets=runs.ELSEWHERE.get(file.name, []))
        if read.root.kwargs.get("best_metric") is not None:
            best = load_located(read, declared=True).experiment.best_row
            assert best.startswith("validation/"), file


def test_epochs_count_the_examples_that_are_trained_on(tmp_path, capfd):
    path = tmp_path / "mine.yaml"
    path.write_text(DIGITS)
    options = [f"--config={path}", "--set=steps=2 epochs", "--set=data.batch_size=1293"]
    assert main(["config", *options]) == 0 and main(["explain", *options]) == 0
    assert "2 steps of 1,293 examples" in capfd.readouterr().out


class Digits(data.ArrayDataset):
    """A data set of a user's, with the splits that the test gives it."""

    def __init__(self, splits: Any) -> None:
        arrays = {"number": np.arange(8, dtype=np.int32)}
        super().__init__(arrays, arrays, batch_size=4)
        self.splits = splits


def test_only_the_splits_that_are_named_are_evaluated(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(DIGITS + "eval_splits: [validation]\nbest_metric: accuracy\n")
    assert main([f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 0
    rows = runs.lines(tmp_path / "run")
    assert [row["step"] for row in rows if "validation/loss" in row] == [3, 6]
    assert not any(name.startswith("eval/") for row in rows for name in row)
    for setting, told in {
        "eval_splits=[tst]": "eval_splits is ['tst'], but the data set has validation and test",
        "eval_splits=[]": "eval_splits is [], but",
        "best_metric=eval/accuracy": "their splits, validation/loss, validation/accuracy.",
    }.items():
        assert told in runs.refused(capsys, f"--config={config}", "--set", setting)


@pytest.mark.parametrize(
    "splits",
    [(), "test", ("test", "train"), 3, None, {"tests": 7}, ("test/", "test"), ("test/a/b",)],
)
def test_splits_of_other_names_are_refused(splits):
    with pytest.raises(ValueError, match="must list what evaluate.split. takes"):
        split_sizes(Digits(splits))


class Named:
    """A data set of a user's: two named parts of the validation split, and a whole test split."""

    splits = {"test": 4, "validation/odd": 3, "validation/even": 6}
    first = {"test": (0, 1), "validation/odd": (1, 2), "validation/even": (2, 2)}
    batch_size, num_examples = 2, 8
    element_spec = {"number": jax.ShapeDtypeStruct((2,), np.int32)}

    def train(self, batch_index: int, seed: int) -> Any:
        while True:
            yield {"number": np.arange(2, dtype=np.int32)}

    def evaluate(self, split: str) -> Any:
        first, step = self.first[split]
        for start in range(0, self.splits[split], 2):
            places = np.arange(start, start + 2, dtype=np.int32)
            mask = (places < self.splits[split]).astype(np.float32)
            yield {"number": places * step + first, "mask": mask}


def test_a_split_may_consist_of_named_parts():
    dataset = Named()
    assert list(split_sizes(dataset).items()) == [
        *(("validation/odd", 3), ("validation/even", 6), ("test", 4)),
    ]

    def counted(split: str) -> list[int]:
        batches = eval_batches(dataset, split, WHOLE)
        return [int(n) for b in batches for n in b["number"][b["mask"] == 1]]

    assert counted("validation") == counted("validation/odd") + counted("validation/even")
    assert counted("validation/odd") == [1, 3, 5] and counted("test") == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="'test' consists of its named parts: list either these"):
        split_sizes(Digits(("test", "test/odd")))


def test_each_part_of_a_split_has_its_metrics_and_the_split_those_of_all():
    # The loss of an example is its number, so that the means are known.
    experiment = Experiment(
        model=models.Model(lambda key, batch: ({"x": np.zeros(())}, {}), apply_nothing),
        data=Named(),
        loss=lambda outputs, batch: 1.0 * batch["number"] + outputs,
        optimizer=optax.sgd(0.1),
        **dict.fromkeys(("steps", "log_every", "eval_every", "save_every"), 3),
    )
    evaluation = Program(experiment).evaluation
    state = Program(experiment).init()
    assert evaluation.run_splits(state) == {
        "validation/loss": pytest.approx((1 + 3 + 5 + 2 + 4 + 6 + 8 + 10 + 12) / 9),
        "validation/odd/loss": 3.0,
        "validation/even/loss": 7.0,
        "eval/loss": 1.5,
    }
    assert evaluation.run_split(state, "validation/even") == {"loss": 7.0}


def apply_nothing(params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
    return params["x"] + 0.0 * batch["number"], state


@pytest.mark.parametrize(
    ("best", "row"),
    [
        ("loss", "validation/loss"),
        ("odd/loss", "validation/odd/loss"),
        ("validation/odd/accuracy", "validation/odd/accuracy"),
        ("eval/loss", "eval/loss"),
        ("eval/odd/loss", None),
        ("od/loss", None),
    ],
)
def test_the_best_checkpoint_may_be_chosen_on_a_part(best: str, row: str | None):
    splits = split_sizes(Named())
    if row is not None:
        assert best_row(best, ["loss", "accuracy"], splits) == row
        return
    with pytest.raises(ValueError, match="validation/odd/loss, validation/odd/accuracy, .*eval/lo"):
        best_row(best, ["loss", "accuracy"], splits)


@pytest.mark.parametrize(
    ("name", "mode", "wanted"),
    [
        ("validation/odd/accuracy", "min", "max"),
        ("odd/loss", "max", "min"),
        ("eval/loss", "max", "min"),
        ("odd/loss", "min", None),
        ("odd/unknown", "max", None),
        ("inaccuracy", "min", None),
    ],
)
def test_the_mode_of_a_metric_is_known_for_each_part(name: str, mode: str, wanted: str | None):
    assert wrong_mode(name, mode, {"accuracy": metrics.accuracy()}) == wanted


def test_the_hash_of_data_covers_each_part_of_a_split():
    before, changed = data_fingerprint(Named()), Named()
    assert before == data_fingerprint(Named())
    changed.first = {**Named.first, "validation/even": (4, 2)}
    assert data_fingerprint(changed) != before


class Overriding(data.ArrayDataset):
    """Overrides evaluate() without its argument, as a class of a user's may."""

    def evaluate(self) -> Any:
        yield from super().evaluate()


def test_an_evaluate_without_an_argument_yields_the_test_split():
    arrays = {"number": np.arange(10, dtype=np.int32)}
    one = Overriding(arrays, arrays, batch_size=5)
    batches = list(eval_batches(one, "test", WHOLE))
    assert batches[1]["number"].tolist() == [5, 6, 7, 8, 9]
    two = Overriding(arrays, arrays, batch_size=5, validation=0.5)
    with pytest.raises(ComponentError, match="has a validation split, but its evaluate.. takes no"):
        eval_batches(two, "validation", WHOLE)


def test_splits_without_numbers_of_examples_are_listed():
    assert split_sizes(Digits(("test", "validation"))) == {"validation": None, "test": None}
    assert split_sizes(Digits(["validation"])) == {"validation": None}
    assert split_sizes(object()) == {"test": None}


@pytest.mark.long
def test_a_users_data_set_may_have_a_validation_split_only(tmp_path, capfd):
    more = "experiment.data = @unruly.validated()\nexperiment.best_metric = 'accuracy'\n"
    config = runs.write_config(tmp_path, more)
    assert runs.train(config, tmp_path / "run") == 0
    rows = [row for row in runs.lines(tmp_path / "run") if "validation/loss" in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20] and "eval/loss" not in rows[0]
    assert "Nothing to do: the run has its 20 steps." in runs.said(capfd, config, tmp_path / "run")
    best = "--set=best_metric=eval/accuracy"
    assert runs.train(config, tmp_path / "other", best) == 2
    words = (
        "best_metric is 'eval/accuracy', but the metrics are loss, accuracy; with their splits, "
    )
    assert words + "validation/loss, validation/accuracy." in capfd.readouterr().err
