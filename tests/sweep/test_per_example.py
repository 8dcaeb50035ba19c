"""What final runs keep of single test examples: the values, the file, and which runs have it."""

import io
import json
import math
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from flax import struct
from scipy.special import logsumexp
from sklearn.metrics import accuracy_score, log_loss

from tests import runs, token_cases
from tests.engine.test_loss_contract import TEST, by_hand, program
from tests.sweep.test_evidence import faults
from tests.sweep.test_sweep import folders, replaced, rows, sweep, swept, write_sweep
from tests.sweep.test_sweep_kills import kill_in
from tests.sweep_results import compare
from trainer import checkpoint, data, losses, metrics, models
from trainer.__main__ import main
from trainer.engine.examples import Examples
from trainer.engine.program import Program
from trainer.sweep.per_example_file import (
    PER_EXAMPLE_FILE,
    encode_examples,
    read_examples,
    unlike_means,
)
from trainer.sweep.plan_file import read_plan

pytestmark = pytest.mark.usefixtures("lab")


def of_test(made: Program, most: int = 100_000) -> Examples:
    batches = made.evaluation.batches("test")
    return made.evaluation.run_examples(made.init(), batches, most)


def rows_of(made: Program) -> dict[str, float]:
    return made.evaluation.run_splits(made.init())


# Values.

COUNTED = TEST["mask"].any(1)  # sequences of length 0 are padding


def test_a_sequence_has_the_mean_over_its_positions_and_their_number_as_weight():
    """In float64 by hand; 23 sequences in batches of 5, the last of which is padded."""
    made = program(metrics={"accuracy": metrics.accuracy()})
    found = of_test(made)
    by_position, _, right = by_hand(TEST)
    mask, lengths = TEST["mask"], TEST["mask"].sum(1)
    assert 0 < COUNTED.sum() < len(COUNTED) and found.complete
    for name, values in (("loss", by_position), ("accuracy", right)):
        known = (values * mask).sum(1)[COUNTED] / lengths[COUNTED]
        np.testing.assert_allclose(found.values[name], known, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(found.weights[name], lengths[COUNTED])
        mean = np.average(found.values[name], weights=found.weights[name])
        assert mean == pytest.approx(rows_of(made)[f"eval/{name}"], rel=1e-6)


def test_chunked_logits_of_a_language_model_have_the_values_of_their_losses():
    split = token_cases.TEST | {"bytes": 1 + token_cases.TEST["bytes"]}
    arrays = data.ArrayDataset(token_cases.TRAIN, split, batch_size=None, eval_batch_size=4)
    made = token_cases.program(data=arrays)
    found, mask = of_test(made), split["mask"]
    labels = np.maximum(split["label"], 0)
    known = token_cases.known(
        split["x"], token_cases.KERNEL, labels, mask, soft_cap=token_cases.SOFT_CAP
    ).losses
    counted = mask.any(1)
    sums = (known * mask).sum(1)[counted]
    np.testing.assert_allclose(found.values["loss"], sums / mask.sum(1)[counted], rtol=1e-5)
    # A mean over bytes: of the bits of a sequence, with its bytes as its weight.
    sizes = (split["bytes"] * mask).sum(1)[counted]
    np.testing.assert_allclose(found.values["bits_per_byte"], sums / np.log(2) / sizes, rtol=1e-5)
    np.testing.assert_array_equal(found.weights["bits_per_byte"], sizes)
    # The exponential of a mean is not a mean.
    assert set(found.values) == {"loss", "accuracy", "bits_per_byte"}


def test_examples_are_hashed_whatever_the_batches_and_the_devices():
    sizes = [data.ArrayDataset(TEST, TEST, batch_size=None, eval_batch_size=n) for n in (3, 5, 23)]
    one, two, three = (of_test(program(data=each)) for each in sizes)
    assert one.sha256 == two.sha256 == three.sha256
    np.testing.assert_allclose(one.values["loss"], three.values["loss"], rtol=1e-6)
    other = {**TEST, "x": TEST["x"] * np.float32(1.0001)}
    changed = data.ArrayDataset(TEST, other, batch_size=None, eval_batch_size=5)
    assert of_test(program(data=changed)).sha256 != one.sha256
    order = np.arange(len(COUNTED))[::-1]
    turned = {name: x[order] for name, x in TEST.items()}
    turned = data.ArrayDataset(TEST, turned, batch_size=None, eval_batch_size=5)
    assert of_test(program(data=turned)).sha256 != one.sha256


@pytest.mark.long
def test_of_more_examples_than_are_kept_the_first_ones_are():
    whole = of_test(program())
    for most in (1, 7, 8, int(COUNTED.sum()) - 1):
        few = of_test(program(), most)
        assert not few.complete and len(few.values["loss"]) == most
        np.testing.assert_array_equal(few.values["loss"], whole.values["loss"][:most])
    assert of_test(program(), int(COUNTED.sum())).complete
    by_threes = data.ArrayDataset(TEST, TEST, batch_size=None, eval_batch_size=3)
    assert of_test(program(data=by_threes), 7).sha256 == of_test(program(), 7).sha256


@struct.dataclass
class Unmasked(clu_metrics.Average):
    """Counts what is padding, too."""

    @classmethod
    def from_model_output(cls, *, loss: Any, **_: Any) -> Any:
        average: Any = clu_metrics.Average
        return cls(**vars(average.from_model_output(loss)))


def of_the_batch(outputs: Any, batch: Any) -> Any:
    """Returns one number for all examples of a batch, as a loss that compares them does."""
    values = losses.softmax_cross_entropy()(outputs, batch)
    return jnp.broadcast_to(jnp.where(batch["mask"] > 0, values, 0).max(), values.shape)


def of_a_dead_model(outputs: Any, batch: Any) -> Any:
    values: Any = losses.softmax_cross_entropy()(outputs, batch)
    return 0.0 * values + math.log(10)


def test_what_is_not_a_mean_over_examples_is_left_out():
    chosen = {
        "perplexity": metrics.perplexity(),
        "unmasked": Unmasked,
        "scalar": clu_metrics.Average.from_fun(lambda *, loss, **_: loss.sum()),
        "last": clu_metrics.LastValue.from_output("loss"),
        "again": clu_metrics.Average.from_output("loss"),
    }
    assert set(of_test(program(metrics=chosen)).values) == {"loss", "again"}
    found = of_test(program(loss=of_the_batch, metrics={"accuracy": metrics.accuracy()}))
    assert set(found.values) == {"accuracy"} and found.left_out == ("loss",)
    # A model that has died has one loss for all examples of all batches: its mean is theirs.
    found = of_test(program(loss=of_a_dead_model))
    assert set(found.values) == {"loss"} and found.left_out == ()


# The file.


def test_the_file_has_half_precision_where_that_keeps_the_mean():
    draw = np.random.default_rng(0)
    values = {
        "loss": draw.lognormal(0.0, 1.0, 1000),
        "huge": draw.uniform(1e5, 2e5, 1000),  # more than float16 has
        "tiny": draw.uniform(1e-9, 2e-9, 1000),  # less
        "accuracy": (draw.random(1000) < 0.9).astype(float),
    }
    ones = np.ones(1000)
    weights = {name: ones for name in values} | {"huge": draw.integers(1, 9, 1000)}
    written = encode_examples(Examples(values, weights, "ab" * 32, True))
    with np.load(io.BytesIO(written)) as arrays:
        kinds = {name: str(x.dtype) for name, x in arrays.items()}
    assert kinds == {
        "value/loss": "float16",
        "value/huge": "float32",
        "weight/huge": "float32",
        "value/tiny": "float32",
        "value/accuracy": "bool",
        "sha256": "uint8",
        "complete": "bool",
    }
    assert written == encode_examples(Examples(values, weights, "ab" * 32, True))


def test_a_file_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path):
    values = {"loss": np.linspace(0.5, 2.5, 64), "accuracy": np.arange(64) % 2.0}
    weights = {"loss": np.arange(1.0, 65.0), "accuracy": np.ones(64)}
    content = encode_examples(Examples(values, weights, "0f" * 32, False))
    file = tmp_path / PER_EXAMPLE_FILE
    file.write_bytes(content)
    found = read_examples(tmp_path)
    assert found is not None and (found.sha256, found.complete) == ("0f" * 32, False)
    for name in values:
        np.testing.assert_allclose(found.values[name], values[name], rtol=1e-3)
        np.testing.assert_array_equal(found.weights[name], weights[name])
    for damaged in (b"", content[:-9], content[:40], b"PK" + content[9:], b"\0" * 99):
        file.write_bytes(damaged)
        assert read_examples(tmp_path) is None
    for arrays in (
        {"value/loss": np.ones((2, 2))},
        {"value/loss": np.array([np.nan])},
        {"value/loss": np.ones(3), "weight/loss": np.zeros(3)},
        {"value/loss": np.zeros(10_000_000, np.float16)},
        {"value/loss": np.array([None])},
        {},
    ):
        np.savez_compressed(
            file, **arrays, **({"sha256": np.zeros(32, np.uint8)} if arrays else {})
        )
        assert read_examples(tmp_path) is None, arrays
    file.unlink()
    assert read_examples(tmp_path) is None


def test_any_bytes_of_a_file_are_read_or_refused(tmp_path):
    """Other compressions, encryption and versions of zip were tracebacks, 53 of these 3,000."""
    values, weights = {"loss": np.linspace(0.5, 2.5, 64)}, {"loss": np.arange(1.0, 65.0)}
    content, draw = encode_examples(Examples(values, weights, "0f" * 32, True)), random.Random(0)
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 4])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / PER_EXAMPLE_FILE).write_bytes(damaged)
        read_examples(tmp_path)


def test_the_arrays_of_a_file_are_bounded_together(tmp_path, monkeypatch):
    file = tmp_path / PER_EXAMPLE_FILE
    one = np.zeros(100_000, np.float32)
    arrays = {f"value/{number}": one for number in range(200)}
    np.savez_compressed(file, **arrays, sha256=np.zeros(32, np.uint8), complete=np.array(True))
    assert file.stat().st_size < 1e6
    unpacked: list[str] = []
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda _, name: unpacked.append(name))
    assert read_examples(tmp_path) is None and not unpacked


# Final runs.


def check_against_rows(trial: Path) -> Examples:
    """Checks that the means of the file are the last row of a run, up to float16."""
    found = read_examples(trial)
    assert found is not None and found.complete
    last = rows(trial)[-1]
    for name, values in found.values.items():
        mean = np.average(values.astype(float), weights=found.weights[name])
        assert mean == pytest.approx(last[f"eval/{name}"], rel=2e-4, abs=1e-7), name
    return found


@pytest.mark.long
def test_final_runs_have_the_values_of_their_parameters_in_float64(tmp_path):
    """From the checkpoint of the run by `model.apply`, with scikit-learn's losses."""
    swept(tmp_path, replaced("steps", "40"), more="checkpoints: final")
    import unruly  # type: ignore[import-not-found]

    points = unruly.points()
    image, label = points.x[22:], points.y[22:]
    model = models.mlp(width=8, depth=1, num_classes=3)
    finals = sorted((tmp_path / "sweep").glob("final/*/*"))
    assert len(finals) == 2
    for trial in finals:
        params = checkpoint.load_params(trial, 40, "params")
        outputs, _ = model.apply(params, {}, {"image": image}, key=None, train=False)
        logits = np.asarray(outputs, np.float64)
        normalizer = np.asarray(logsumexp(logits, axis=1))
        known = normalizer - logits[np.arange(11), label]
        found = check_against_rows(trial)
        np.testing.assert_allclose(found.values["loss"], known, rtol=1e-3)
        assert found.values["accuracy"].tolist() == (logits.argmax(1) == label).tolist()
        assert found.values["loss"].dtype == np.float16
        probabilities = np.exp(logits - normalizer[:, None])
        last = rows(trial)[-1]
        assert log_loss(label, probabilities, labels=[0, 1, 2]) == pytest.approx(last["eval/loss"])
        assert accuracy_score(label, logits.argmax(1)) == pytest.approx(last["eval/accuracy"])
    assert not list((tmp_path / "sweep").glob(f"trials/*/*/*/{PER_EXAMPLE_FILE}"))


GPT = """
model: !models.gpt {vocab_size: 9, width: 8, depth: 1, num_heads: 1, max_length: 16}
data: !letters.text
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy , perplexity: !metrics.perplexity }
optimizer: !optax.adamw {learning_rate: 1e-2}
steps: 12
writers: []
"""


@pytest.mark.long
def test_a_gpt_keeps_the_loss_of_each_sequence(tmp_path, monkeypatch):
    import letters  # type: ignore[import-not-found]

    monkeypatch.setattr(letters.Text, "splits", {"validation": 8, "test": 8})
    text = "base: base.yaml\nfinal: {seeds: 2}\n"
    folder = runs.swept(tmp_path, GPT, text, "--vocabulary=letters")
    trials = sorted(folder.glob("final/*/*"))
    one, two = (check_against_rows(trial) for trial in trials)
    assert set(one.values) == {"loss", "accuracy"} and one.sha256 == two.sha256
    assert one.weights["loss"].tolist() == [letters.LENGTH] * 8


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "vmap: 2"])
def test_rows_and_states_do_not_depend_on_what_is_kept(tmp_path, more):
    """Two final runs side by side, whose rows are those of runs that keep nothing."""
    with_file = write_sweep(tmp_path / "kept", more=f"checkpoints: final\n{more}")
    without = write_sweep(tmp_path / "omitted", more=f"checkpoints: final\n{more}")
    text = without.read_text().replace("{seeds: 2}", "{seeds: 2, per_example: false}")
    without.write_text(text)
    for file in (with_file, without):
        assert sweep(file, file.parent / "sweep") == 0
    kept, omitted = (folders(file.parent / "sweep") for file in (with_file, without))
    assert len(kept) == len(omitted) == 5
    for one, two in zip(kept, omitted, strict=True):
        assert rows(one) == rows(two)
        assert checkpoint.diff_checkpoints(one, 12, 12, other=two) == []
        final = one.parts[-3] == "final"
        names = [sorted(x.name for x in each.iterdir()) for each in (one, two)]
        assert names[0] == sorted([*names[1], *([PER_EXAMPLE_FILE] if final else [])])
        if final:
            check_against_rows(one)


@pytest.mark.long
def test_a_final_run_that_went_back_and_is_computed_alone_keeps_them(tmp_path):
    base = replaced("save_every", "2", replaced("on_nonfinite", "rollback"))
    base = replaced("data", "!unruly.poisoned {at: [4]}", base)
    swept(tmp_path, base, trials=1)
    finals = sorted((tmp_path / "sweep").glob("final/*/*"))
    assert len(finals) == 2
    for trial in finals:
        assert (trial / "rollbacks.json").exists()
        check_against_rows(trial)
    assert not faults(tmp_path / "sweep")


@pytest.mark.long
def test_a_final_run_that_diverged_has_none(tmp_path):
    data_of_base = "!unruly.poisoned {at: [7]}"
    swept(tmp_path, replaced("data", data_of_base), trials=1, final="{seeds: [5, 6]}")
    assert not list((tmp_path / "sweep").rglob(PER_EXAMPLE_FILE))


HOST = """
import flax.struct, jax, jax.numpy as jnp
from clu import metrics
@flax.struct.dataclass
class Host(metrics.Average):
    @classmethod
    def from_model_output(cls, *, loss, mask, **_):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        total = jax.pure_callback(lambda x, m: (x * m).sum(), shape, loss, mask)
        return cls(total=total, count=mask.sum().astype(int))
def host():
    return Host
"""


@pytest.mark.long
def test_a_metric_that_cannot_be_computed_for_one_example_costs_no_run(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "of_the_host.py").write_text(HOST)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = replaced("metrics", "{host: !of_the_host.host }")
    file = write_sweep(tmp_path, base, trials=1)
    words = [f"--config={file}", f"--workdir={tmp_path / 'sweep'}"]
    assert runs.sweep(*words, "--vocabulary=unruly", "--vocabulary=of_the_host") == 0
    said = capsys.readouterr().err
    assert said.count("The results on single test examples are not kept. The metric 'host'") == 2
    ends = [json.loads((x / "summary.json").read_text()) for x in folders(tmp_path / "sweep")]
    assert [end["end"] for end in ends] == ["done"] * 3


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_worker_that_is_killed_while_it_keeps_them_costs_nothing(tmp_path, number):
    """Before and after the file of the first of two runs has its name, and before the second."""
    file = write_sweep(tmp_path, trials=1)
    workdir = tmp_path / "sweep"
    assert sweep(file, workdir, "--plan_only") == 0
    kill_in("examples", number, workdir)
    assert not list(workdir.glob("final/*/*"))
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert sweep(file, tmp_path / "other") == 0
    wrong = compare(workdir, tmp_path / "other", 12)
    assert not any(wrong.values()), wrong
    assert len(list(workdir.glob(f"final/*/*/{PER_EXAMPLE_FILE}"))) == 2 and not faults(workdir)


def test_what_was_left_out_is_in_the_file_and_infinite_weights_are_damage(tmp_path):
    ones = {"loss": np.ones(4)}
    found = Examples({"loss": np.arange(4.0)}, ones, "00" * 32, True, ("f1",))
    (tmp_path / PER_EXAMPLE_FILE).write_bytes(encode_examples(found))
    kept = read_examples(tmp_path)
    assert kept is not None and kept.left_out == ("f1",)
    endless = replace(found, weights={"loss": np.array([1.0, np.inf, 1.0, 1.0])})
    (tmp_path / PER_EXAMPLE_FILE).write_bytes(encode_examples(endless))
    assert read_examples(tmp_path) is None


def test_examples_whose_mean_is_not_that_of_the_rows_are_found(tmp_path):
    """Whoever writes the ledger anew could have other ones, of which a verdict speaks."""
    losses, right = np.array([0.5, 1.5, 2.5, 0.3]), np.array([1.0, 0.0, 0.0, 1.0])
    weights = np.array([1.0, 2.0, 1.0, 4.0])
    values = {"loss": losses, "accuracy": right, "unknown": losses}
    ones = np.ones(4)
    found = Examples(values, {"loss": weights, "accuracy": ones, "unknown": ones}, "00" * 32, True)
    (tmp_path / PER_EXAMPLE_FILE).write_bytes(encode_examples(found))
    kept = read_examples(tmp_path)
    assert kept is not None
    loss = float(np.average(losses, weights=weights))
    known = {"eval/loss": loss, "eval/accuracy": 0.5}
    assert list(unlike_means(kept, known)) == []
    assert list(unlike_means(kept, known | {"eval/loss": losses.mean()})) == ["eval/loss"]
    assert list(unlike_means(kept, known | {"eval/accuracy": 0.501})) == ["eval/accuracy"]
    assert list(unlike_means(kept, known | {"eval/loss": float("nan")})) == ["eval/loss"]
    first = replace(kept, complete=False)
    assert list(unlike_means(first, {"eval/loss": 9.0})) == []


@pytest.mark.long
def test_a_byte_of_the_file_that_is_edited_is_found(tmp_path, capsys):
    swept(tmp_path, trials=1)
    (kept, *_) = sorted((tmp_path / "sweep").glob(f"final/*/*/{PER_EXAMPLE_FILE}"))
    content = bytearray(kept.read_bytes())
    content[60] ^= 1
    kept.write_bytes(bytes(content))
    capsys.readouterr()
    assert main(["sweep", "check", str(tmp_path / "sweep")]) == 2
    assert f"{PER_EXAMPLE_FILE}: it was changed after its line" in capsys.readouterr().out


# The plan.


def test_the_plan_names_what_is_omitted_only(tmp_path):
    """So that a sweep of an earlier version has the plan that its file has today."""
    file = write_sweep(tmp_path)
    assert sweep(file, tmp_path / "kept", "--plan_only") == 0
    (revision,) = json.loads((tmp_path / "kept" / "plan.json").read_text())["revisions"]
    assert "per_example" not in revision and read_plan(tmp_path / "kept").per_example
    file.write_text(file.read_text().replace("{seeds: 2}", "{seeds: 2, per_example: false}"))
    assert sweep(file, tmp_path / "omitted", "--plan_only") == 0
    (revision,) = json.loads((tmp_path / "omitted" / "plan.json").read_text())["revisions"]
    assert revision["per_example"] is False and not read_plan(tmp_path / "omitted").per_example


def test_another_choice_is_named_and_a_misspelt_one_corrected(tmp_path, capsys):
    file = write_sweep(tmp_path)
    text = file.read_text()
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 0
    file.write_text(text.replace("{seeds: 2}", "{seeds: 2, per_example: false}"))
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 2
    assert "per_example: True -> False" in capsys.readouterr().err
    file.write_text(text.replace("{seeds: 2}", "{seeds: 2, per_exampel: false}"))
    assert sweep(file, tmp_path / "other", "--check") == 2
    assert "per_example" in capsys.readouterr().err
    file.write_text(text.replace("{seeds: 2}", "{seeds: 2, per_example: some}"))
    assert sweep(file, tmp_path / "other", "--check") == 2
    assert "per_example" in capsys.readouterr().err


@pytest.mark.long
def test_an_extension_may_omit_them_and_says_so(tmp_path, capsys):
    file = write_sweep(tmp_path, trials=1)
    assert sweep(file, tmp_path / "sweep") == 0
    file.write_text(file.read_text().replace("{seeds: 2}", "{seeds: 3, per_example: false}"))
    words = [str(tmp_path / "sweep"), f"--config={file}", "--vocabulary=unruly"]
    assert main(["sweep", "extend", *words]) == 0
    assert main(["sweep", "work", str(tmp_path / "sweep"), "--vocabulary=unruly"]) == 0
    kept = {x.parent.name for x in (tmp_path / "sweep").glob(f"final/*/*/{PER_EXAMPLE_FILE}")}
    assert kept == {"10000", "10001"}
    assert not faults(tmp_path / "sweep")
