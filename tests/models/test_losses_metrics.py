"""Losses against torch, optax and closed forms; metrics against NumPy, partial batches included."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import losses, metrics

pytestmark = pytest.mark.usefixtures("strict_promotion")

RANDOM = np.random.default_rng(0)
LOGITS = (3 * RANDOM.normal(size=(6, 5))).astype(np.float32)
LABELS = np.array([0, 4, 2, 2, 1, 3], np.int32)
TARGETS = RANDOM.normal(size=(6, 5)).astype(np.float32)


def value(loss: Any, outputs: Any = LOGITS, **batch: Any) -> np.ndarray:
    result = jax.jit(loss)(jnp.asarray(outputs), {k: jnp.asarray(v) for k, v in batch.items()})
    assert result.dtype == jnp.float32 and result.shape == outputs.shape[: max(1, outputs.ndim - 1)]
    return np.asarray(result)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_softmax_cross_entropy_agrees_with_torch(smoothing: float, torch: Any):
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS),
        torch.tensor(LABELS, dtype=torch.long),
        reduction="none",
        label_smoothing=smoothing,
    )
    ours = value(losses.softmax_cross_entropy(smoothing), label=LABELS)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_softmax_cross_entropy_of_labels_and_probabilities():
    loss = losses.softmax_cross_entropy(0.1, labels="class")
    expected = optax.softmax_cross_entropy(
        LOGITS, optax.smooth_labels(jax.nn.one_hot(LABELS, 5), 0.1)
    )
    one_hot = np.eye(5, dtype=np.float32)[LABELS]
    np.testing.assert_allclose(value(loss, **{"class": LABELS}), expected, rtol=1e-5)
    np.testing.assert_allclose(value(loss, **{"class": one_hot}), expected, rtol=1e-5)


def test_softmax_cross_entropy_of_equal_and_of_huge_logits():
    loss = losses.softmax_cross_entropy()
    np.testing.assert_allclose(
        value(loss, np.zeros((2, 8), np.float32), label=LABELS[:2]), np.log(8)
    )
    huge = np.array([[1e4, 0, 0], [0, 1e4, 0]], np.float32)
    np.testing.assert_array_equal(value(loss, huge, label=np.array([0, 2], np.int32)), [0, 1e4])


def test_sequences_have_a_loss_for_each_position():
    logits = RANDOM.normal(size=(2, 7, 5)).astype(np.float32)
    labels = RANDOM.integers(5, size=(2, 7)).astype(np.int32)
    flat = value(losses.softmax_cross_entropy(), logits.reshape(14, 5), label=labels.reshape(14))
    ours = value(losses.softmax_cross_entropy(), logits, label=labels)
    np.testing.assert_allclose(ours, flat.reshape(2, 7), rtol=1e-5)
    for loss in (losses.squared_error(), losses.huber(0.3), losses.sigmoid_binary_cross_entropy()):
        targets = RANDOM.uniform(size=(2, 7, 5)).astype(np.float32)
        batch = {"target": targets, "label": targets}
        flat = {key: x.reshape(14, 5) for key, x in batch.items()}
        one_by_one = value(loss, logits.reshape(14, 5), **flat).reshape(2, 7)
        np.testing.assert_allclose(value(loss, logits, **batch), one_by_one, rtol=1e-5)


def test_images_average_over_their_pixels():
    logits = RANDOM.normal(size=(2, 3, 4, 5)).astype(np.float32)
    labels = RANDOM.integers(5, size=(2, 3, 4)).astype(np.int32)
    batch = {"label": jnp.asarray(labels), "target": jnp.zeros(logits.shape)}
    by_pixel = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean((1, 2))
    ours = losses.softmax_cross_entropy()(jnp.asarray(logits), batch)
    np.testing.assert_allclose(ours, by_pixel, rtol=1e-5)
    ours = losses.squared_error()(jnp.asarray(logits), batch)
    np.testing.assert_allclose(ours, (logits**2).mean((1, 2, 3)), rtol=1e-5)


def test_sigmoid_binary_cross_entropy_agrees_with_torch(torch: Any):
    targets = RANDOM.uniform(size=(6, 5)).astype(np.float32)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(20 * LOGITS), torch.tensor(targets), reduction="none"
    ).mean(1)
    loss = losses.sigmoid_binary_cross_entropy()
    np.testing.assert_allclose(value(loss, 20 * LOGITS, label=targets), expected, rtol=1e-5)


def test_sigmoid_binary_cross_entropy_of_classes_and_of_one_output():
    loss = losses.sigmoid_binary_cross_entropy()
    by_class = optax.sigmoid_binary_cross_entropy(LOGITS, jax.nn.one_hot(LABELS, 5)).mean(1)
    np.testing.assert_allclose(value(loss, label=LABELS), by_class, rtol=1e-5)
    certain = value(loss, np.array([30.0, -30.0], np.float32), label=np.array([1, 1], np.int32))
    np.testing.assert_allclose(certain, [np.exp(-30.0), 30.0], rtol=1e-5)  # no cancellation


def test_squared_error_and_huber_agree_with_torch(torch: Any):
    F, ours, theirs = torch.nn.functional, 2 * LOGITS, torch.tensor(2 * LOGITS)
    squared = F.mse_loss(theirs, torch.tensor(TARGETS), reduction="none").mean(1)
    np.testing.assert_allclose(
        value(losses.squared_error(), ours, target=TARGETS), squared, rtol=1e-5
    )
    huber = F.huber_loss(theirs, torch.tensor(TARGETS), reduction="none", delta=1.5).mean(1)
    np.testing.assert_allclose(value(losses.huber(1.5), ours, target=TARGETS), huber, rtol=1e-5)


@pytest.mark.parametrize("delta", [0.3, 1.0, 2.5])
def test_hubers_loss_is_that_of_his_paper(delta: float):
    # "Robust Estimation of a Location Parameter", 1964: t²/2 for |t| < k, and k|t| - k²/2 beyond.
    errors = np.array([0.1, 0.4, -0.9, 1.0, -2.4, 7.0], np.float32)
    wanted = [t * t / 2 if abs(t) < delta else delta * abs(t) - delta**2 / 2 for t in errors]
    targets = np.zeros((6, 1), np.float32)
    found = value(losses.huber(delta), errors[:, None], target=targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


FACTORIES = [
    (losses.softmax_cross_entropy(0.1), {"label": LABELS}),
    (losses.sigmoid_binary_cross_entropy(), {"label": LABELS}),
    (losses.squared_error(), {"target": TARGETS}),
    (losses.huber(), {"target": TARGETS}),
]


@pytest.mark.parametrize(
    ("loss", "batch"), FACTORIES, ids=["softmax", "sigmoid", "squared", "huber"]
)
def test_losses_of_bfloat16_outputs_are_computed_in_float32(loss: Any, batch: Any):
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    exact = value(loss, np.asarray(half.astype(jnp.float32)), **batch)
    np.testing.assert_allclose(value(loss, half, **batch), exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: losses.softmax_cross_entropy(1.0), ["label_smoothing", "1.0"]),
        (lambda: losses.huber(0.0), ["delta", "0.0"]),
        (lambda: value(losses.softmax_cross_entropy(), image=LABELS), ["'label'", "'image'"]),
        (lambda: value(losses.softmax_cross_entropy(), label=TARGETS[:, :3]), ["(6, 5)", "(6, 3)"]),
        (lambda: value(losses.squared_error(), target=LABELS), ["(6, 5)", "(6,)"]),
        (
            lambda: value(losses.softmax_cross_entropy(), label=LABELS.astype(np.float32)),
            ["Labels that are numbers of classes are integers, and these are float32."],
        ),
        (
            lambda: value(losses.softmax_cross_entropy(), LOGITS[:, None, None], label=LABELS),
            ["outputs of shape (6, 1, 1, 5)", "inputs that the model does not flatten."],
        ),
        (lambda: metrics.top_k_accuracy(0), ["k", "0"]),
        (lambda: counted(metrics.top_k_accuracy(6)), ["6", "5"]),
        (lambda: counted(metrics.recall(5)), ["metrics.recall has label=5", "classes 0 to 4"]),
    ],
)
def test_mistakes_are_named(make: Any, words: list[str]):
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


# Metrics, as the program uses them.


def counted(metric: Any, outputs: Any = LOGITS, labels: Any = LABELS, size: int = 6) -> float:
    """Computes a metric over batches of one size, the last one filled up by garbage."""

    @jax.jit
    def count(outputs: Any, batch: Any, mask: Any) -> Any:
        loss = jnp.zeros(len(mask), jnp.float32)
        return metric.from_model_output(outputs=outputs, batch=batch, loss=loss, mask=mask)

    total = metric.empty()
    for first in range(0, len(outputs), size):
        rows = slice(first, first + size)
        missing = size - len(outputs[rows])
        filled = np.concatenate([outputs[rows], np.tile(outputs[:1], (missing, 1))])
        answers = np.concatenate([labels[rows], np.repeat(labels[:1], missing, axis=0)])
        mask = (np.arange(size) < size - missing).astype(np.float32)
        batch = {"label": answers, "target": answers}
        total = total.merge(count(jnp.asarray(filled), batch, mask))
    with jax.numpy_dtype_promotion("standard"):  # clu divides a float sum by an integer count
        return float(total.compute())


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_every_example_counts_once_for_any_batch_size(size: int):
    logits = RANDOM.normal(size=(17, 5)).astype(np.float32)
    labels = RANDOM.integers(5, size=17).astype(np.int32)
    right = (logits.argmax(1) == labels).mean()
    assert counted(metrics.accuracy(), logits, labels, size) == pytest.approx(right)
    order = np.argsort(-logits, axis=1)
    among = [labels[i] in order[i, :2] for i in range(17)]
    assert counted(metrics.top_k_accuracy(2), logits, labels, size) == pytest.approx(np.mean(among))
    targets = RANDOM.normal(size=(17, 5)).astype(np.float32)
    squared = counted(metrics.mean_squared_error(), logits, targets, size)
    assert squared == pytest.approx(((logits - targets) ** 2).mean(), rel=1e-5)
    absolute = counted(metrics.mean_absolute_error(), logits, targets, size)
    assert absolute == pytest.approx(abs(logits - targets).mean(), rel=1e-5)


@pytest.mark.parametrize("name", ["mean_squared_error", "mean_absolute_error"])
def test_an_error_is_not_computed_between_all_outputs_and_all_targets(name: str):
    outputs, batch = jnp.ones((6, 1)), {"target": jnp.ones(6)}
    with pytest.raises(ValueError, match=r"of shape \(6, 1\) for outputs of shape \(6, 1\), but"):
        getattr(metrics, name)().from_model_output(outputs=outputs, batch=batch)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("size", [7, 50, 200])
def test_metrics_of_a_class_are_those_of_scikit_learn(classes: int, size: int):
    from scipy.special import logsumexp
    from sklearn.metrics import (
        average_precision_score,
        f1_score,
        precision_score,
        recall_score,
        roc_auc_score,
    )

    draw = np.random.default_rng(classes)
    labels = (classes * draw.random(101) ** 2).astype(np.int32)
    # Scores that bfloat16 has, so that nothing is rounded, with many that are equal.
    logits = draw.integers(-4, 5, (101, classes)).astype(np.float32)
    if classes > 2:
        logits[:, [0, 2, 3, 4]] = np.where(labels[:, None] == 1, -1.0, 2.0)
    others: Any = logsumexp(np.delete(logits, 1, axis=1), axis=1)
    real, answer, score = labels == 1, logits.argmax(1) == 1, (logits[:, 1] - others).round(2)
    for make, expected in (
        (metrics.recall, recall_score(real, answer)),
        (metrics.precision, precision_score(real, answer)),
        (metrics.f1, f1_score(real, answer)),
        (metrics.roc_auc, roc_auc_score(real, score)),
        (metrics.average_precision, average_precision_score(real, score)),
    ):
        assert counted(make(label=1), logits, labels, size) == pytest.approx(expected, rel=1e-5)


def test_metrics_of_a_class_without_examples():
    answers = np.eye(5, dtype=np.float32)[[0, 0, 1, 1, 3, 3]]
    for make in (metrics.recall, metrics.precision, metrics.f1):
        assert counted(make(label=4), answers, np.zeros(6, np.int32)) == 0
    for make in (metrics.roc_auc, metrics.average_precision):
        assert np.isnan(counted(make(label=4), answers, np.zeros(6, np.int32)))
        # The score of a class that is certain, and NaN, which ranks first, have a place.
        certain = np.where(answers == 0, -np.inf, answers)
        assert np.isfinite(counted(make(label=1), certain, LABELS))


def test_accuracy_takes_probabilities_and_bfloat16():
    one_hot = np.eye(5, dtype=np.float32)[LABELS]
    expected = (LOGITS.argmax(1) == LABELS).mean()
    assert counted(metrics.accuracy(), LOGITS, one_hot) == pytest.approx(expected)
    half = np.asarray(jnp.asarray(LOGITS, jnp.bfloat16))
    assert counted(metrics.accuracy(), half) == pytest.approx(expected)


def test_equal_outputs_rank_by_their_place():
    flat = np.zeros((5, 5), np.float32)
    labels = np.arange(5, dtype=np.int32)
    for k in range(1, 6):
        assert counted(metrics.top_k_accuracy(k), flat, labels) == pytest.approx(k / 5)
    assert counted(metrics.accuracy(), flat, labels) == pytest.approx(1 / 5)


def test_an_output_of_nan_counts_as_a_wrong_answer():
    broken = np.full((5, 5), np.nan, np.float32)
    labels = np.arange(1, 6, dtype=np.int32) % 5
    assert counted(metrics.top_k_accuracy(2), broken, labels) == 0
    assert counted(metrics.top_k_accuracy(1), broken[1:4], labels[1:4]) == 0


@pytest.mark.long
def test_metrics_do_not_need_tensorflow():
    code = "import sys, trainer.metrics; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
