"""The command `compare`: configs, programs and metrics of two configs or runs."""

import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from tests import runs
from trainer import config as configs
from trainer.__main__ import main
from trainer.diagnose.compare import (
    StepProgram,
    compare_configs,
    compare_fingerprints,
    compare_rows,
    count_differences,
    count_operations,
    lower_step,
    metrics_to_plot,
    normalized,
    read_side,
    unified_diff,
)

BASE = """\
model: !models.mlp {width: 8, depth: 2}
data: !data.digits {batch_size: 64}
loss: !losses.softmax_cross_entropy {}
steps: 20
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group {match: .*/kernel, optimizer: !optax.adamw {learning_rate: 1e-3}}
    rest: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.1}}
"""


def write(folder, name, text=BASE) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def compared(capsys, *options) -> str:
    return runs.printed(capsys, "compare", *options)


def refused(capsys, *options) -> str:
    said = runs.refused(capsys, "compare", *options)
    assert len(said.splitlines()) <= 8
    return said


def differences(a: str, b: str) -> dict[str, tuple[str, str]]:
    found = compare_configs(read_side(a), read_side(b))
    return {path: (x, y) for path, x, y in found.paths}


# Configs.


def test_a_default_is_shown_where_the_other_side_names_another_value(tmp_path) -> None:
    a = write(tmp_path, "a.yaml")
    b = write(tmp_path, "b.yaml", BASE.replace("1e-3}", "2e-3, b2: 0.95}") + "seed: 3\n")
    at = "optimizer.groups.matrices.optimizer"
    assert differences(a, b) == {
        f"{at}.learning_rate": ("0.001", "0.002"),
        f"{at}.b2": ("0.999 (default)", "0.95"),
        "seed": ("0 (default)", "3"),
    }


def test_a_default_that_one_side_repeats_is_no_difference(tmp_path) -> None:
    a = write(tmp_path, "a.yaml", BASE.replace("1e-3}", "1e-3, eps_root: 0, b1: 0.9}"))
    b = write(tmp_path, "b.yaml")
    found = compare_configs(read_side(a), read_side(b))
    at = "optimizer.groups.matrices.optimizer"
    assert found.paths == () and found.notes == ()
    assert found.repeated == {f"{at}.b1": "A", f"{at}.eps_root": "A"}


def test_of_other_functions_only_named_arguments_and_common_defaults_are_shown(tmp_path) -> None:
    a = write(tmp_path, "a.yaml")
    b = write(
        tmp_path, "b.yaml", BASE.replace("!optax.adamw {learning_rate: 1e-3}", "!optim.muon {}")
    )
    with pytest.raises(KeyError):  # muon's learning rate has no default, and the config none
        configs.load([b]).at("optimizer.groups.matrices.optimizer.learning_rate")
    found = compare_configs(read_side(a), read_side(b))
    assert "B are not known" in found.notes[0] and "learning_rate" in found.notes[0]
    text = BASE.replace("!optax.adamw {learning_rate: 1e-3}", "!optim.muon {learning_rate: 0.02}")
    at = "optimizer.groups.matrices.optimizer"
    found = differences(a, write(tmp_path, "c.yaml", text))
    assert found[at] == ("optax.adamw()", "optim.muon()")
    assert found[f"{at}.learning_rate"] == ("0.001", "0.02")
    assert found[f"{at}.eps"] == ("1e-08 (default)", "1e-07 (default)")
    assert f"{at}.b1" not in found and f"{at}.ns_steps" not in found


def test_groups_of_one_side_and_the_order_of_groups_are_shown(tmp_path) -> None:
    a = write(tmp_path, "a.yaml")
    lines = BASE.splitlines(keepends=True)
    b = write(tmp_path, "b.yaml", "".join([*lines[:-2], lines[-1], lines[-2]]))
    assert differences(a, b) == {
        "optimizer.groups (order)": ("['matrices', 'rest']", "['rest', 'matrices']")
    }
    alone = differences(a, write(tmp_path, "c.yaml", "".join(lines[:-1])))
    assert alone["optimizer.groups.rest"] == ("optim.group()", "-")
    assert alone["optimizer.groups.rest.optimizer.learning_rate"] == ("0.1", "-")


def test_a_call_in_the_place_of_a_number_is_shown_with_its_arguments(tmp_path) -> None:
    a = write(tmp_path, "a.yaml")
    cosine = "!schedules.warmup_cosine {peak_value: 0.1, warmup_steps: 10%}"
    b = write(tmp_path, "b.yaml", BASE.replace("learning_rate: 0.1", f"learning_rate: {cosine}"))
    found = differences(a, b)
    at = "optimizer.groups.rest.optimizer.learning_rate"
    assert found == {
        at: ("0.1", "schedules.warmup_cosine()"),
        f"{at}.peak_value": ("-", "0.1"),
        f"{at}.warmup_steps": ("-", "'10%'"),
    }


def test_two_spellings_of_one_config_are_equal(capsys) -> None:
    text = compared(capsys, "configs/muon_vit.gin", "configs/muon_vit.yaml", "--no_program")
    assert "Config\n  They are equal.\n" in text and "Program" not in text


# Programs.


@pytest.fixture(scope="module")
def lowered() -> StepProgram:
    return lower_step(configs.load(["configs/muon_vit.yaml"]))


def test_another_learning_rate_and_seed_are_the_same_program(tmp_path, capsys) -> None:
    a = write(tmp_path, "a.yaml")
    b = write(tmp_path, "b.yaml", BASE.replace("1e-3}", "2e-3, b2: 0.95}") + "seed: 3\n")
    text = compared(capsys, a, b)
    assert "The programs are equal. The configs differ in values of its" in text
    assert "---" not in text


def test_another_width_is_another_program_with_its_counts_and_a_diff(tmp_path, capsys) -> None:
    a, b = (
        write(tmp_path, "a.yaml"),
        write(tmp_path, "b.yaml", BASE.replace("width: 8", "width: 9")),
    )
    file = tmp_path / "steps.diff"
    text = compared(capsys, a, b, "--lines=5", f"--diff={file}")
    assert "The programs differ." in text
    # Forward, and backward for weights and for inputs but those of the data: 64 examples.
    flops = [2 * 64 * (2 * 64 * n + 3 * n * n + 3 * n * 10) for n in (8, 9)]
    assert re.search(rf"FLOPs +{flops[0]:,} +{flops[1]:,} +\+{flops[1] - flops[0]:,}\n", text)
    lines = file.read_text().splitlines()
    assert lines[:2] == ["--- A", "+++ B"] and "-%: tensor<8x10xf32>," in lines
    assert f"... and {len(lines) - 5:,} lines; all are in {file}." in text
    shown = text.partition("  --- A\n")[2].partition("  ...")[0].splitlines()
    assert [line[2:] for line in shown] == lines[1:5]


def test_operations_are_counted_by_kind_and_those_that_differ_are_listed() -> None:
    def program(function) -> StepProgram:
        text = jax.jit(function).lower(jnp.ones(3)).as_text()
        return StepProgram(text, count_operations(text), 0, 0, {}, {})

    one, two = program(lambda x: jnp.sin(x) + x), program(lambda x: jnp.sin(jnp.sin(x)) + x)
    assert one.operations == {"sine": 1, "add": 1}
    assert count_differences(one, two)[3:] == [("operations", 2, 3), ("sine", 1, 2)]
    assert [line for line in unified_diff(one, two) if line[0] in "+-"][2:] == [
        "+% = stablehlo.sine % : tensor<3xf32>"
    ]


def test_attributes_are_not_counted_as_operations_and_calls_are() -> None:
    text = '%1 = "stablehlo.gather"(%0) <{numbers = #stablehlo.gather<>}>\n%2 = func.call @f(%1)'
    assert count_operations(text) == {"gather": 1, "call": 1}


@pytest.mark.long
def test_names_of_values_do_not_make_lines_differ(lowered) -> None:
    text = lowered.text
    shifted = re.sub(r"%(\d+)", lambda found: f"%{int(found[1]) + 7}", text)
    assert shifted != text and normalized(shifted) == normalized(text)
    other = StepProgram(shifted, lowered.operations, 0, 0, {}, {})
    assert unified_diff(lowered, other) == []


@pytest.mark.long
def test_an_argument_of_the_program_has_a_line_of_its_own(lowered) -> None:
    lines = normalized(lowered.text)
    assert "%: tensor<4x3x64x64xf32>," in lines
    assert any(
        "params['blocks']['attn']['qkv']" in line and line.count("tensor") == 1 for line in lines
    )


def test_a_program_that_cannot_be_built_is_named_and_the_rest_is_shown(tmp_path, capsys) -> None:
    a = write(tmp_path, "a.yaml")
    b = write(tmp_path, "b.yaml", BASE.replace(".*/kernel", "kernel/none"))
    text = compared(capsys, a, b)
    assert "optimizer.groups.matrices.match  '.*/kernel'  'kernel/none'" in text
    assert "The program of B cannot be built" in text and "The program of A cannot" not in text


# Rows.


def row(step, **values) -> dict:
    return {"step": step, **{name.replace("_", "/"): value for name, value in values.items()}}


def test_rows_are_compared_bit_for_bit_up_to_the_first_difference() -> None:
    a = [row(10, loss=1.0), row(20, loss=0.5, eval_loss=2.0), row(30, loss=0.1)]
    b = [row(10, loss=1.0), row(20, loss=0.5, eval_loss=math.nextafter(2.0, 3)), row(30, loss=0.1)]
    found = compare_rows(a, b)
    assert (found.equal_up_to, found.first, found.names) == (10, 20, ("eval/loss",))
    assert [(each.name, each.first) for each in found.metrics] == [
        ("eval/loss", 20),
        ("loss", None),
    ]
    assert compare_rows(a, a).first is None and compare_rows(a, a).equal_up_to == 30


def test_rows_with_nan_are_equal_and_a_metric_that_one_lacks_is_a_difference() -> None:
    a = [row(1, loss=math.nan), row(2, loss=1.0)]
    assert compare_rows(a, [row(1, loss=math.nan), row(2, loss=1.0)]).first is None
    assert compare_rows([row(1, loss=0.0)], [row(1, loss=-0.0)]).first == 1
    assert compare_rows(a, [row(1, loss=math.nan, other=1.0), row(2, loss=1.0)]).names == ("other",)


def test_what_is_clocked_is_not_compared_and_stands_last() -> None:
    a = [row(1, perf_seconds=1.0, loss=1.0, validation_loss=3.0, eval_loss=3.0)]
    b = [row(1, perf_seconds=2.0, loss=1.0, validation_loss=3.0, eval_loss=3.0)]
    found = compare_rows(a, b)
    assert found.first is None
    names = [each.name for each in found.metrics]
    assert names == ["validation/loss", "eval/loss", "loss", "perf/seconds"]
    assert found.metrics[-1].first is None and metrics_to_plot(found.metrics) == ["validation/loss"]


def test_steps_that_one_side_lacks_are_counted() -> None:
    found = compare_rows([row(n, loss=1.0) for n in (1, 2, 3)], [row(2, loss=1.0)])
    assert (found.shared, found.only_a, found.only_b, found.equal_up_to) == ((2,), 2, 0, 2)
    assert compare_rows([row(1, loss=1.0)], []).metrics[0].b is None


# Runs.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = write(folder, "run.yaml", BASE + "log_every: 5\n")
    assert main([f"--config={config}", f"--workdir={folder / 'run'}"]) == 0
    return folder / "run"


def copied(run, folder, change):
    """Returns a copy of a run whose rows and fingerprint `change` edits."""
    shutil.copytree(run, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((folder / "run.json").read_text())
    change(rows, record["fingerprint"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.long
def test_a_run_and_its_copy_are_equal_in_everything(run, tmp_path, capsys) -> None:
    other = copied(run, tmp_path / "copy", lambda rows, fingerprint: None)
    text = compared(capsys, run, other)
    assert "Config\n  They are equal.\n" in text
    assert "Versions, machine and data (A -> B)\n  They are equal.\n" in text
    assert "The programs are equal.\n" in text
    assert re.search(r"All \d+ common rows are equal bit for bit, up to step", text)


def test_two_runs_show_versions_the_first_row_that_differs_and_curves(
    run, tmp_path, capsys
) -> None:
    changed = []

    def change(rows, fingerprint) -> None:
        fingerprint["jax"], fingerprint["data"] = "9.9.9", "other"
        changed.extend([rows[2]["step"], rows[1]["step"]])
        rows[2]["train/loss"] += 1.0
        del rows[3]

    other = copied(run, tmp_path / "copy", change)
    text = compared(capsys, run, other, "--no_program", "--metric=train/loss", "--metric=a")
    assert "-> 9.9.9\n" in text and "-> other (changes the data)\n" in text
    assert f"bit for bit up to step {changed[1]:,}, and differ at step {changed[0]:,}" in text
    assert "Only A has rows of 1 more steps." in text
    assert "train/loss by step\n" in text and "  * A   o B\n" in text
    assert "Neither A nor B has the metric 'a'. Both have: " in text


def test_a_metric_that_one_side_lacks_is_drawn_for_the_other(run, tmp_path, capsys) -> None:
    def change(rows, _) -> None:
        for each in rows:
            each.pop("train/loss", None)

    other = copied(run, tmp_path / "copy", change)
    text = compared(capsys, run, other, "--no_program", "--metric=train/loss")
    assert "B lacks the metric 'train/loss'. Both have: " in text
    assert "train/loss by step\n" in text and text.endswith("  * A\n")


def test_a_run_and_a_config_are_compared_without_rows_of_one(run, tmp_path, capsys) -> None:
    text = compared(capsys, run, write(tmp_path, "a.yaml"), "--no_program")
    assert "B has no rows of metrics." in text and "Versions" not in text
    assert re.search(r"A +\S+ +run, rows up to step", text) and re.search(r"B +\S+ +config\n", text)


def test_a_fingerprint_shows_no_difference_of_the_config_twice(run, tmp_path) -> None:
    def change(_, fingerprint) -> None:
        fingerprint["config"], fingerprint["seed"], fingerprint["cores"] = "x", 7, 99

    other = copied(run, tmp_path / "copy", change)
    lines = compare_fingerprints(read_side(str(run)), read_side(str(other)))
    assert len(lines) == 1 and lines[0].startswith("cores: ")


# Bad input.

SWEEP = "base: a.yaml\narms:\n  one: {space: {steps: !space.values {values: [1, 2]}}}\n"


def test_sweeps_are_compared_as_files_and_not_with_runs(tmp_path, capsys) -> None:
    run = write(tmp_path, "a.yaml")
    one = write(tmp_path, "one.yaml", SWEEP)
    two = write(tmp_path, "two.yaml", SWEEP.replace("[1, 2]", "[1, 3]"))
    text = compared(capsys, one, two)
    assert "arms.one.space.steps.values  [1, 2]  [1, 3]" in text
    assert "A sweep has many programs" in text and "without defaults" in text
    assert "is the config of a sweep, and" in refused(capsys, one, run)


def test_what_cannot_be_compared_is_refused_with_what_to_name(tmp_path, capsys) -> None:
    config = write(tmp_path, "a.yaml")
    (tmp_path / "empty").mkdir()
    assert "it is not the folder of a run" in refused(capsys, tmp_path / "empty", config)
    assert "does not exist: name a config file" in refused(capsys, tmp_path / "no", config)
    assert "are the same: name two" in refused(capsys, config, tmp_path / "empty/../a.yaml")
    said = refused(capsys, config, write(tmp_path, "b.yaml", "model: [\n"))
    assert "b.yaml:" in said
    sweep = tmp_path / "sweep"
    (sweep / "trials/muon/0007/0").mkdir(parents=True)
    (sweep / "plan.json").write_text("{}")
    assert "without finished trials" in refused(capsys, config, sweep)
    shutil.copy(config, sweep / "trials/muon/0007/0/config.yaml")
    assert f"such as {sweep}/trials/muon/0007/0." in refused(capsys, config, sweep)


@pytest.mark.long
def test_a_diff_that_cannot_be_written_is_an_error(tmp_path, capsys) -> None:
    a, b = (
        write(tmp_path, "a.yaml"),
        write(tmp_path, "b.yaml", BASE.replace("width: 8", "width: 9")),
    )
    said = refused(capsys, a, b, f"--diff={tmp_path}/no/x")
    assert "cannot be written: No such file" in said
    assert "--no_program leaves it out" in refused(capsys, a, b, "--no_program", "--diff=x")
