"""Plans of configs whose data are not on this machine, and steps that are compiled but not run."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs
from tests.runs import ROOT
from trainer import config as configs
from trainer import data
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.data.absent import DataAbsent
from trainer.data.shards import write_shards
from trainer.engine.plan import Plan, make_plan
from trainer.engine.program import Program, load_located

CONFIGS = ROOT / "configs"

LAB = """
from typing import Any

import numpy as np

from trainer.data import ArrayDataset
from trainer.data.absent import DataAbsent


def points(batch_size: int = 20):
    def split(first, count):
        x = np.arange(first, first + 8 * count, dtype=np.float32).reshape(count, 8)
        return {"image": x, "label": np.arange(count) % 2}

    sizes = {"batch_size": batch_size, "eval_batch_size": 6, "validation": 0.25}
    return ArrayDataset(split(0, 100), split(800, 30), **sizes)


def absent(batch_size: int = 20):
    raise DataAbsent("absent_lab.absent", "Copy the points to this machine.", points(batch_size))


def wrapped(data: Any):
    return data


def wraps():
    return wrapped(absent())
"""

TEXT = """
model: !models.mlp {width: 16, depth: 1}
data: !absent_lab.points {batch_size: 10}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
steps: 4 epochs
best_metric: validation/accuracy
optimizer: !optax.adamw {learning_rate: 0.1}
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "absent_lab.py").write_text(LAB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(TEXT)
    return file


def plan_of(file: Path, *sets: str) -> Plan:
    read = configs.load([str(file)], sets=list(sets))
    return make_plan(load_located(read, ["absent_lab"], declared=True), read)


def test_the_plan_without_the_data_is_that_with_them_and_says_so(lab: Path):
    there = plan_of(lab)
    absent = plan_of(lab, "data=!absent_lab.absent {batch_size: 10}")
    assert there.warnings == [] and there.steps == 30
    (warning,) = absent.warnings
    assert warning.endswith("not on this machine. Copy the points to this machine.")
    assert absent.examples == {"train": 75, "validation": 25, "test": 30}
    fields = [each.name for each in dataclasses.fields(Plan)]
    assert absent.fingerprint == "" != there.fingerprint
    for name in set(fields) - {"warnings", "schedules", "fingerprint"}:
        assert getattr(absent, name) == getattr(there, name), name


def test_the_evaluation_is_traced_with_the_declared_shapes(lab: Path):
    metric = "metrics={top: !metrics.top_k_accuracy {k: 50}}"
    said = []
    for name in ("points", "absent"):
        with pytest.raises(ConfigError) as raised:
            plan_of(lab, f"data=!absent_lab.{name} {{batch_size: 10}}", metric, "best_metric=null")
        said.append(str(raised.value))
    assert said[0] == said[1] and "50" in said[0]


@pytest.mark.parametrize("command", [["train"], ["verify"], ["train", "--workdir=run"]])
def test_another_command_refuses_before_it_makes_a_folder(
    command: list[str], lab: Path, capsys: pytest.CaptureFixture
):
    before = sorted(lab.parent.iterdir())
    options = ["--vocabulary=absent_lab", "--set", "data=!absent_lab.absent {}"]
    said = runs.refused(capsys, *command, f"--config={lab}", *options)
    assert re.search(r"Copy the points to this machine \(\S*absent_lab\.py:20\)\n", said), said
    assert set(lab.parent.iterdir()) - set(before) <= {lab.parent / "__pycache__"}


def test_explain_warns_once_and_ends_with_0(lab: Path, capsys: pytest.CaptureFixture):
    options = ["--vocabulary=absent_lab", "--set", "data=!absent_lab.absent {}"]
    assert main(["explain", f"--config={lab}", *options]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("Copy the points to this machine.") == 1
    assert "warning: The plan has the declared shapes of absent_lab.absent, whose data" in said.out


@pytest.mark.parametrize("call", ["wrapped {data: !absent_lab.absent {}}", "wraps {}"])
def test_a_data_set_inside_of_another_is_not_replaced(call: str, lab: Path):
    with pytest.raises(ConfigError, match="refuses its arguments: Copy the points"):
        plan_of(lab, f"data=!absent_lab.{call}")


def test_declared_data_have_no_batches(lab: Path):
    read = configs.load([str(lab)], sets=["data=!absent_lab.absent {}"])
    declared = load_located(read, ["absent_lab"], declared=True).experiment.data
    for serve in (declared.train, declared.evaluate):
        with pytest.raises(ValueError, match="Copy the points"):
            serve()


@pytest.mark.parametrize(
    ("data", "examples", "shape"),
    [
        ("!data.tfds {name: mnist}", {"train": 60000, "test": 10000}, (256, 28, 28, 1)),
        (
            "!data.tfds {name: 'cifar10:3.0.2', crop: 4, validation: 0.1}",
            {"train": 45000, "validation": 5000, "test": 10000},
            (256, 32, 32, 3),
        ),
        (
            "!data.fashion_mnist {batch_size: 8}",
            {"train": 60000, "test": 10000},
            (8, 28, 28, 1),
        ),
    ],
)
def test_known_data_sets_are_planned_before_they_are_prepared(
    data: str, examples: dict, shape: tuple, lab: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(lab.parent / "data"))
    read = configs.load([str(lab)], sets=[f"data={data}", "steps=9", "best_metric=null"])
    program = load_located(read, declared=True)
    plan = make_plan(program, read)
    assert plan.examples == examples and "prepare" in plan.warnings[0].lower()
    assert program.experiment.data.element_spec["image"].shape == shape
    with pytest.raises(ConfigError, match="not prepared"):
        load_located(read)


@pytest.mark.parametrize("name", ["no_such_set", "mnist_corrupted"])
def test_a_data_set_of_unknown_shapes_is_refused(
    name: str, lab: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(lab.parent / "data"))
    with pytest.raises(ConfigError, match="not prepared.*python -m trainer.data.prepare"):
        plan_of(lab, f"data=!data.tfds {{name: {name}}}")


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_explain_compile_prints_the_memory_of_a_step_and_runs_nothing(
    steps_per_call: int,
    lab: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    def refuse(*_: object) -> None:
        raise AssertionError("Something was computed.")

    for name in ("init", "step", "advance"):
        monkeypatch.setattr(Program, name, refuse)
    sets = ["data=!absent_lab.absent {}", f"steps_per_call={steps_per_call}", "model.width=5_000"]
    options = [word for each in sets for word in ("--set", each)]
    options += ["--vocabulary=absent_lab", "--compile"]
    said = runs.printed(capsys, "explain", f"--config={lab}", *options).splitlines()[-2:]
    what = "A step" if steps_per_call == 1 else "A block of 4 steps"
    assert said[0].startswith(f"{what} was compiled for 1 cpu in ")
    # The parameters, their two moments and the counter of AdamW, and the batches.
    plan = plan_of(lab, *sets)
    needed = plan.state_bytes + steps_per_call * 20 * (8 * 4 + 4) + 4 * (steps_per_call > 1)
    assert needed > 10**6 and f"(state and batch {needed / 1e6:.3g} MB, temporary " in said[1]
    assert " has " in said[1] and "has only" not in said[1]


TOKENS = {
    "train": "absent_*.bin",
    "validation": "absent_too_*.bin",
    "length": 16,
    "batch_size": 4,
    "eval_batch_size": 6,
    "eval_tokens": 160,
    "vocab_size": 300,
    "end_of_text": 299,
    "train_tokens": 1601,
}


def test_shards_of_tokens_are_planned_by_their_number_of_tokens():
    with pytest.raises(DataAbsent, match="absent_.*matches no file") as raised:
        data.tokens(**TOKENS)
    declared: Any = raised.value.declared
    assert (declared.num_examples, declared.splits) == (100, {"validation": 10})
    assert (declared.tokens_per_example, declared.vocab_size) == (16, 300)
    assert set(declared.element_spec) == {"tokens", "label", "documents"}
    assert declared.eval_spec["mask"].shape == declared.eval_spec["label"].shape == (6, 16)
    with pytest.raises(ValueError, match="matches no file") as other:
        data.tokens(**{**TOKENS, "train_tokens": None})
    assert not isinstance(other.value, DataAbsent)


@pytest.mark.parametrize(("train", "words"), [([], "an empty list"), (".", "include the folder")])
def test_a_mistake_in_the_names_of_shards_is_not_planned(train: Any, words: str):
    with pytest.raises(ValueError, match=words) as raised:
        data.tokens(**{**TOKENS, "train": train})
    assert not isinstance(raised.value, DataAbsent)


def test_the_examples_of_a_split_of_unknown_size_are_not_invented(
    lab: Path, capsys: pytest.CaptureFixture
):
    with pytest.raises(DataAbsent) as raised:
        data.tokens(**{**TOKENS, "eval_tokens": None, "test": "absent_*.bin"})
    declared: Any = raised.value.declared
    assert declared.splits == {"validation": None, "test": None}
    assert declared.eval_spec["mask"].shape == (6, 16)
    options = {key: value for key, value in TOKENS.items() if key != "eval_tokens"}
    given = ", ".join(f"{key}: {value}" for key, value in options.items())
    sets = [f"data=!data.tokens {{{given}}}", "model=!models.gpt {vocab_size: 300, depth: 1}"]
    sets += ["metrics={}", "best_metric=null"]
    words = [word for each in sets for word in ("--set", each)]
    assert main(["explain", f"--config={lab}", *words]) == 0
    assert "examples: train 100, validation of unknown number" in capsys.readouterr().out


def test_the_plan_of_absent_shards_is_that_of_shards(tmp_path: Path):
    tokens = np.random.default_rng(0).integers(0, 299, 1601)
    write_shards(tmp_path, "train", [tokens], np.dtype("<u2"), 2000)
    write_shards(tmp_path, "validation", [tokens[:200]], np.dtype("<u2"), 2000)
    files = {split: str(tmp_path / f"{split}_*.bin") for split in ("train", "validation")}
    there = data.tokens(**{**TOKENS, **files})
    with pytest.raises(DataAbsent) as raised:
        data.tokens(**TOKENS)
    declared: Any = raised.value.declared
    for name in ("element_spec", "num_examples", "batch_size", "splits", "vocab_size"):
        assert getattr(declared, name) == getattr(there, name), name
    batch = next(iter(there.evaluate("validation")))
    assert {key: x.shape for key, x in batch.items()} == {
        key: x.shape for key, x in declared.eval_spec.items()
    }
