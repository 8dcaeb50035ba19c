"""What a loss may return: losses of examples or positions, masked, and named scalars."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from sklearn.metrics import accuracy_score

from tests import compiled_programs, runs
from trainer import data, losses, metrics
from trainer.engine.contracts import ComponentError
from trainer.engine.experiment import Experiment
from trainer.engine.plan import make_plan
from trainer.engine.program import Program

RANDOM = np.random.default_rng(0)
EXAMPLES, POSITIONS, FEATURES, CLASSES = 24, 5, 3, 4
IGNORED = -100  # torch's label of a position that does not count


def sequences(examples: int) -> dict[str, np.ndarray]:
    """Returns labelled sequences of various lengths, some of length 0."""
    lengths = RANDOM.integers(POSITIONS + 1, size=examples)
    lengths[: examples // 3] = 1
    mask = (np.arange(POSITIONS) < lengths[:, None]).astype(np.float32)
    label = RANDOM.integers(CLASSES, size=mask.shape).astype(np.int32)
    return {
        "x": RANDOM.normal(size=(examples, POSITIONS, FEATURES)).astype(np.float32),
        "label": np.where(mask > 0, label, IGNORED).astype(np.int32),
        "mask": mask,
    }


TRAIN, TEST = sequences(EXAMPLES), sequences(EXAMPLES - 1)
KERNEL = RANDOM.normal(size=(FEATURES, CLASSES)).astype(np.float32)


def linear() -> Any:
    def init(key: Any, batch: Any) -> Any:
        return {"kernel": jnp.asarray(KERNEL)}, {}

    def apply(params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
        return batch["x"] @ params["kernel"], state

    return SimpleNamespace(init=init, apply=apply)


def program(**changes: Any) -> Program:
    options = {
        "model": linear(),
        # The batch of all examples has them in the order stored.
        "data": data.ArrayDataset(TRAIN, TEST, batch_size=None, eval_batch_size=5),
        "loss": losses.softmax_cross_entropy(),
        "optimizer": optax.sgd(1.0),
        "steps": 4,
        "log_every": 1,
        "eval_every": 4,
        "save_every": 4,
    }
    return Program(Experiment(**(options | changes)))


def one_step(program: Program) -> tuple[np.ndarray, dict[str, float]]:
    """Returns the kernel after the first step, and the metrics of the step."""
    state = program.init()
    batch = program.feed.to_devices(next(program.feed.batches(0)))
    state, metrics = program.step(state, batch)
    return np.asarray(state.params["kernel"]), {name: float(x) for name, x in metrics.items()}


def by_hand(split: dict[str, np.ndarray], kernel: np.ndarray = KERNEL) -> tuple[Any, Any, Any]:
    """Returns losses [examples, positions], their gradients, and whether the label is hit."""
    logits = split["x"].astype(np.float64) @ kernel
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = np.eye(CLASSES)[np.maximum(split["label"], 0)]
    grads = split["x"][..., :, None] * (p - right)[..., None, :]
    return -np.log((p * right).sum(-1)), grads, logits.argmax(-1) == split["label"]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
def test_masked_positions_have_no_weight_in_the_loss_and_in_its_gradient(microbatches):
    kernel, values = one_step(program(microbatches=microbatches))
    by_position, grads, _ = by_hand(TRAIN)
    mask = TRAIN["mask"]
    assert values["train/loss"] == pytest.approx(np.average(by_position, weights=mask), rel=1e-5)
    gradient = (grads * mask[..., None, None]).sum((0, 1)) / mask.sum()
    np.testing.assert_allclose(KERNEL - kernel, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_an_ignored_label_counts_neither_in_loss_nor_gradient_nor_metrics(microbatches):
    unmasked = [{k: x for k, x in split.items() if k != "mask"} for split in (TRAIN, TEST)]
    ignoring = program(
        data=data.ArrayDataset(*unmasked, batch_size=None, eval_batch_size=5),
        loss=losses.softmax_cross_entropy(ignore_label=IGNORED),
        metrics={"accuracy": metrics.accuracy()},
        train_metrics={"accuracy": metrics.accuracy()},
        microbatches=microbatches,
    )
    make_plan(ignoring)  # the label is no mistake
    kernel, values = one_step(ignoring)
    by_position, grads, hits = by_hand(TRAIN)
    counts = TRAIN["label"] != IGNORED
    assert values["train/loss"] == pytest.approx(np.average(by_position, weights=counts), rel=1e-5)
    assert values["train/accuracy"] == pytest.approx(hits[counts].mean())
    gradient = (grads * counts[..., None, None]).sum((0, 1)) / counts.sum()
    np.testing.assert_allclose(KERNEL - kernel, gradient, rtol=1e-4, atol=1e-6)
    by_position, _, hits = by_hand(TEST)
    counts = TEST["label"] != IGNORED
    found = ignoring.evaluation.run_splits(ignoring.init())
    assert found["eval/loss"] == pytest.approx(np.average(by_position, weights=counts), rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(hits[counts].mean())


def test_masked_token_losses_agree_with_ignore_index_of_torch(torch):
    weight = torch.tensor(KERNEL, requires_grad=True)
    logits = torch.tensor(TRAIN["x"]) @ weight
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, CLASSES),
        torch.tensor(TRAIN["label"].reshape(-1), dtype=torch.long),
        ignore_index=IGNORED,
    )
    loss.backward()
    kernel, values = one_step(program())
    assert values["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(KERNEL - kernel, weight.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_mask_of_examples_counts_for_all_their_positions(microbatches):
    mask = (np.arange(EXAMPLES) % 3 > 0).astype(np.float32)
    split = TRAIN | {"mask": mask, "label": np.maximum(TRAIN["label"], 0)}
    dataset = data.ArrayDataset(split, split, batch_size=None, eval_batch_size=5)
    by_position, *_ = by_hand(split)
    expected = by_position[mask == 1].mean()
    masked = program(data=dataset, microbatches=microbatches)
    assert one_step(masked)[1]["train/loss"] == pytest.approx(expected, rel=1e-5)
    results = masked.evaluation.run_splits(masked.init())
    assert results["eval/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_anything_that_counts_does_not_move_the_parameters():
    split = TRAIN | {"mask": np.zeros_like(TRAIN["mask"])}
    kernel, values = one_step(program(data=data.ArrayDataset(split, TEST, batch_size=None)))
    assert values["train/loss"] == 0 and values["finite"] == 1 and (kernel == KERNEL).all()


def test_without_a_mask_every_position_counts():
    split = {"x": TRAIN["x"], "label": np.maximum(TRAIN["label"], 0)}
    _, values = one_step(program(data=data.ArrayDataset(split, split, batch_size=None)))
    by_position, *_ = by_hand(split)
    assert values["train/loss"] == pytest.approx(by_position.mean(), rel=1e-5)


def test_a_loss_of_pairs_of_examples_is_refused_and_one_of_as_many_positions_is_not():
    def pairs(outputs: Any, batch: Any) -> Any:
        return (outputs[:, 0, :1] - batch["label"][:, 0]) ** 2

    def positions(outputs: Any, batch: Any) -> Any:
        return jnp.repeat(outputs[..., 0] ** 2, EXAMPLES, axis=1)[:, :EXAMPLES]

    split = {"x": TRAIN["x"], "label": np.maximum(TRAIN["label"], 0)}
    unmasked = data.ArrayDataset(split, split, batch_size=None)
    with pytest.raises(ComponentError, match=r"a batch of 48 it returns \(48, 48\): it pairs"):
        one_step(program(data=unmasked, loss=pairs))
    assert np.isfinite(one_step(program(data=unmasked, loss=positions))[1]["train/loss"])


def test_the_dtypes_of_numpy_are_taken_without_a_warning():
    """Warnings are errors in tests: jax has one about each field of float64 or int64."""
    wide = {name: x.astype(np.float64) for name, x in TRAIN.items() if name != "mask"}
    wide["label"] = np.maximum(TRAIN["label"], 0).astype(np.int64)
    _, values = one_step(program(data=data.ArrayDataset(wide, wide, batch_size=None)))
    by_position, *_ = by_hand(wide)
    assert values["train/loss"] == pytest.approx(by_position.mean(), rel=1e-5)


def probing() -> optax.GradientTransformationExtraArgs:
    """Moves each parameter by how far value_fn is from value, at the parameters of the step."""

    def update(
        updates: Any, state: Any, params: Any, *, value: Any, value_fn: Any, **_: Any
    ) -> Any:
        return jax.tree.map(lambda x: x * 0 + (value_fn(params) - value), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_a_line_search_sees_the_masked_loss():
    kernel, _ = one_step(program(optimizer=partial(probing)))
    np.testing.assert_allclose(kernel, KERNEL, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*seed. is deprecated:DeprecationWarning")
def test_private_sgd_averages_each_example_over_its_own_positions():
    private = partial(optax.contrib.dpsgd, 1.0, l2_norm_clip=1e6, noise_multiplier=0.0)
    kernel, _ = one_step(program(optimizer=partial(private, seed=1)))
    _, grads, _ = by_hand(TRAIN)
    mask = TRAIN["mask"]
    lengths = np.maximum(mask.sum(1), 1)[:, None, None]
    gradient = ((grads * mask[..., None, None]).sum(1) / lengths).mean(0)
    np.testing.assert_allclose(KERNEL - kernel, gradient, rtol=1e-4, atol=1e-6)


# Metrics of training.


@pytest.mark.parametrize("microbatches", [1, 3])
def test_metrics_of_training_are_those_of_the_batch_of_its_loss(microbatches):
    chosen = {
        "accuracy": metrics.accuracy(),
        "theirs": clu_metrics.Accuracy,
        "again": clu_metrics.Average.from_output("loss"),
    }
    kernel, values = one_step(program(microbatches=microbatches, train_metrics=chosen))
    _, _, right = by_hand(TRAIN)
    weights = TRAIN["mask"].reshape(-1)
    logits = TRAIN["x"] @ KERNEL
    known = accuracy_score(
        np.maximum(TRAIN["label"], 0).reshape(-1),
        logits.argmax(-1).reshape(-1),
        sample_weight=weights,
    )
    assert known == np.average(right.reshape(-1), weights=weights)
    assert values["train/accuracy"] == values["train/theirs"] == pytest.approx(known)
    assert values["train/again"] == pytest.approx(values["train/loss"])
    plain, _ = one_step(program(microbatches=microbatches))
    assert (kernel == plain).all()


def test_metrics_of_training_read_the_outputs_of_the_only_forward_pass():
    passes = []

    def apply(params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
        if key is None:
            return batch["x"] @ params["kernel"], state
        passes.append(train)
        dropped = jax.random.bernoulli(key, 0.5, batch["x"].shape) * batch["x"]
        return dropped @ params["kernel"], state

    model = SimpleNamespace(init=linear().init, apply=apply)
    again = {"again": clu_metrics.Average.from_output("loss"), "accuracy": metrics.accuracy()}
    _, values = one_step(program(model=model, train_metrics=again))
    assert passes == [True] and values["train/again"] == pytest.approx(values["train/loss"])


class Confusion(clu_metrics.Average):
    """Counts each class, and computes a value for each."""

    def compute(self) -> Any:
        return jnp.zeros(CLASSES) + super().compute()


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (Confusion.from_output("loss"), "'bad' computes float32[4] for a training batch, and must"),
        (clu_metrics.CollectingMetric.from_outputs(("logits",)), "'bad' cannot be computed"),
    ],
)
def test_a_metric_of_training_that_is_not_a_scalar_under_jit_is_refused(metric, words):
    wrong = program(train_metrics={"bad": metric})
    with pytest.raises(ComponentError) as caught:
        wrong.trace(wrong.abstract_state())
    assert words in str(caught.value) and caught.value.component == "train_metrics"


# Named scalars.


def with_aux(outputs: Any, batch: Any) -> Any:
    """Returns the cross-entropy, and its masked mean in bits: NaN for a batch of padding only."""
    values = losses.softmax_cross_entropy()(outputs, batch)
    mask = batch["mask"]
    bits = jnp.where(mask > 0, values, 0).sum() / mask.sum() / jnp.log(2)
    return values, {"bits": bits, "two": 2}


@pytest.mark.parametrize("microbatches", [1, 12])
def test_named_scalars_are_averaged_with_the_weights_of_the_losses(microbatches):
    masked = program(loss=with_aux, microbatches=microbatches)
    _, values = one_step(masked)
    assert values["train/bits"] == pytest.approx(values["train/loss"] / np.log(2), rel=1e-5)
    assert values["train/two"] == pytest.approx(2)
    results = masked.evaluation.run_splits(masked.init())
    by_position, _, right = by_hand(TEST)
    expected = np.average(by_position, weights=TEST["mask"])
    assert results["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert results["eval/bits"] == pytest.approx(expected / np.log(2), rel=1e-5)
    assert results["eval/two"] == pytest.approx(2)


def test_a_microbatch_and_an_evaluation_batch_of_padding_may_have_a_scalar_of_nan():
    split = {name: x.copy() for name, x in TRAIN.items()}
    split["mask"][:6] = 0  # the first batch of evaluation; with 4 microbatches, not one of them
    split["mask"][::4] = 0  # the first of 4 microbatches
    dataset = data.ArrayDataset(split, split, batch_size=None, eval_batch_size=6)
    masked = program(loss=with_aux, data=dataset, microbatches=4)
    _, values = one_step(masked)
    assert values["train/bits"] == pytest.approx(values["train/loss"] / np.log(2), rel=1e-5)
    results = masked.evaluation.run_splits(masked.init())
    assert results["eval/bits"] == pytest.approx(results["eval/loss"] / np.log(2), rel=1e-5)


@pytest.mark.parametrize("checked", [True, False])
def test_an_evaluation_with_named_scalars_is_compiled_once(compilations, checked):
    masked = program(loss=with_aux)
    state = masked.init()
    if checked:
        masked.evaluation.check(masked.abstract_state())
    with compilations() as names:
        masked.evaluation.run_splits(state)
        masked.evaluation.run_splits(state)
    assert names.count("jit(_accumulate_all)") == 1


def test_the_metrics_of_a_split_count_positions():
    masked = program(metrics={"accuracy": metrics.accuracy(), "top": metrics.top_k_accuracy(1)})
    results = masked.evaluation.run_splits(masked.init())
    logits = TEST["x"] @ KERNEL
    known = accuracy_score(
        np.maximum(TEST["label"], 0).reshape(-1),
        logits.argmax(-1).reshape(-1),
        sample_weight=TEST["mask"].reshape(-1),
    )
    assert results["eval/accuracy"] == results["eval/top"] == pytest.approx(known)


# From a config.


UNEVEN = """
import jax, numpy as np, unruly
class Uneven(unruly.Points):
    def batch(self, step, batch):
        return self.shard(batch)
    def shard(self, batch):
        size = len(batch["label"]) // jax.process_count()
        start = size * jax.process_index()
        return {name: values[start : start + size] for name, values in batch.items()}
    def evaluate(self):
        for start, end in ((12, 20), (20, 28), (28, 30)):
            mask = np.ones(end - start, np.float32)
            batch = {"image": self.x[start:end], "label": self.y[start:end], "mask": mask}
            yield self.shard(batch)
def uneven() -> unruly.Points:
    return Uneven()
"""


@pytest.mark.long
def test_a_shorter_last_batch_is_evaluated_by_devices_and_processes(tmp_path, monkeypatch, lab):
    (tmp_path / "lab_of_tests.py").write_text(UNEVEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runs, "LAB", f"{runs.LAB}:{tmp_path}")
    config = runs.write_config(tmp_path, "experiment.data = @lab_of_tests.uneven()\n")
    vocabulary = "--vocabulary=lab_of_tests"
    assert runs.train(config, tmp_path / "one", vocabulary) == 0
    monkeypatch.setenv("XLA_FLAGS", compiled_programs.xla_flags(2))
    two = runs.start_two(runs.options(config, tmp_path / "two", vocabulary), tmp_path)
    assert runs.ends(two) == [0, 0], (tmp_path / "log0").read_text()
    one, many = (
        [[row["eval/loss"], row["eval/accuracy"]] for row in rows if "eval/loss" in row]
        for rows in map(runs.lines, (tmp_path / "one", tmp_path / "two"))
    )
    assert len(one) == 4
    np.testing.assert_allclose(many, one, rtol=1e-4)


@pytest.mark.long
def test_named_scalars_and_metrics_of_training_are_in_the_rows_of_metrics(tmp_path, lab):
    more = """
experiment.loss = @unruly.loss_returning()
unruly.loss_returning.what = 'aux'
experiment.train_metrics = {'accuracy': @metrics.accuracy()}
"""
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 0
    rows = [row for row in runs.lines(tmp_path / "run") if "train/loss" in row]
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 20]
    for row in rows:
        assert row["train/double"] == pytest.approx(2 * row["train/loss"], rel=1e-5)
        assert round(8 * row["train/accuracy"], 4) in range(9)
    rows = [row for row in runs.lines(tmp_path / "run") if "eval/loss" in row]
    # 11 examples in batches of 8 and 3: the mean of each batch weighs as many.
    assert [row["eval/double"] for row in rows] == [pytest.approx(2 * r["eval/loss"]) for r in rows]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("what = 'third shape'", "[batch] or [batch, positions], (8,) or (8, positions) here"),
        ("what = 'third shape'", "but this one returned float32[8, 1, 1]"),
        ("what = 'vector'", "the aux value 'each' as float32[8]. It must be a scalar"),
        ("what = 'taken'", "an aux value called 'accuracy', and metrics has an entry of this name"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_a_mistake_of_the_user(
    tmp_path, lab, capfd, more, words
):
    lines = f"experiment.loss = @unruly.loss_returning()\nunruly.loss_returning.{more}\n"
    said = runs.said(capfd, runs.write_config(tmp_path, lines), tmp_path / "run", code=2)
    assert said.startswith("error: ") and "run.gin:1: " in said and words in said, said
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_a_metric_of_training_that_cannot_be_computed_is_a_mistake_of_the_user(
    tmp_path, lab, capfd
):
    more = "experiment.train_metrics = {'error': @metrics.mean_squared_error()}\n"
    said = runs.said(capfd, runs.write_config(tmp_path, more), tmp_path / "run", code=2)
    assert "run.gin:1: The metric 'error' cannot be computed: " in said, said
    more = "experiment.train_metrics = {'double': @metrics.accuracy()}\n"
    more += "experiment.loss = @unruly.loss_returning()\nunruly.loss_returning.what = 'aux'\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 2
    assert "'double', and train_metrics has an entry of this name" in capfd.readouterr().err
