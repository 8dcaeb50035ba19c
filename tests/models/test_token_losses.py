"""Losses and metrics of tokens: in chunks or whole, against float64, torch and closed forms."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from jax.sharding import AbstractMesh, AxisType
from scipy.special import softmax

from tests import short
from tests import token_cases as cases
from tests.engine.test_loss_contract import one_step
from tests.token_cases import KERNEL, SOFT_CAP, TEST, TRAIN, VOCABULARY, Z_LOSS
from trainer import data, losses, metrics
from trainer.engine.contracts import ComponentError
from trainer.engine.flops import count_flops
from trainer.logits import ChunkedLogits, Head
from trainer.train.nonfinite import find_fault

FEATURES, COUNTS = TRAIN["x"], TRAIN["mask"] > 0
LABELS = np.maximum(TRAIN["label"], 0)
SETTINGS = {
    "plain": {},
    "capped": {"soft_cap": 2.0, "scale": 1.5},
    "z-loss": {"z_loss": 0.1, "scale": 0.5},
    "smoothed": {"smoothing": 0.2},
    "everything": {"soft_cap": 4.0, "z_loss": 0.05, "scale": 2.0, "smoothing": 0.1},
}
# Of 60 positions: one chunk, chunks that divide them, single positions; 7 becomes 6, which divides
# them; and 59 makes two chunks of 30.
CHUNKS = [None, 20, 7, 1, 59]


def values(
    features: Any, kernel: Any, labels: Any, *, smoothing: float = 0.0, mask: Any = None, **how: Any
) -> jax.Array:
    outputs = ChunkedLogits(features=features, kernel=kernel, **how)
    batch = {"label": labels} | ({} if mask is None else {"mask": mask})
    found = losses.softmax_cross_entropy(smoothing)(outputs, batch)
    return found[0] if isinstance(found, tuple) else found


BIAS = np.random.default_rng(4).normal(size=VOCABULARY).astype(np.float32)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("chunk", CHUNKS)
@short.parametrize("form", ["tanh", "algebraic"])
def test_a_bias_and_both_forms_of_the_soft_cap_agree_with_float64(form, chunk):
    how = {"soft_cap": 2.0, "soft_cap_form": form, "scale": 1.5, "z_loss": 0.1}

    @jax.jit
    def compute(weights: Any) -> Any:
        def total(features: Any, kernel: Any, bias: Any) -> Any:
            found = values(features, kernel, jnp.asarray(LABELS), bias=bias, chunk=chunk, **how)
            return jnp.sum(weights * found), found

        grads, found = jax.grad(total, (0, 1, 2), has_aux=True)(FEATURES, KERNEL, BIAS)
        return found, *grads

    for name, weights in WEIGHTS.items():
        wanted = cases.known(FEATURES, KERNEL, LABELS, weights, BIAS, **how)
        for ours, theirs in zip(compute(weights), wanted, strict=True):
            assert ours.dtype == jnp.float32 and ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5, err_msg=name)


def gradients(weights: Any, features: Any = FEATURES, kernel: Any = KERNEL, **how: Any) -> Any:
    """Returns the losses, and the gradients of their sum with these weights."""

    @jax.jit
    def total(features: Any, kernel: Any) -> Any:
        found = values(features, kernel, jnp.asarray(LABELS), **how)
        return jnp.sum(jnp.asarray(weights) * found), found

    found, grads = jax.grad(total, argnums=(0, 1), has_aux=True)(features, kernel)[::-1]
    return found, *grads


WEIGHTS = {
    "mean": np.full(LABELS.shape, 0.25, np.float32),
    "masked": (0.5 * COUNTS).astype(np.float32),
    "uneven": np.random.default_rng(3).normal(size=LABELS.shape).astype(np.float32),
    "of one": np.eye(*LABELS.shape, dtype=np.float32),
}


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("chunk", CHUNKS)
@short.parametrize("setting", SETTINGS)
def test_losses_and_gradients_agree_with_float64(setting, chunk):
    @jax.jit
    def compute(weights: Any, mask: Any) -> Any:
        return gradients(weights, mask=mask, chunk=chunk, **SETTINGS[setting])

    for name, weights in WEIGHTS.items():
        found = compute(weights, TRAIN["mask"] if name == "masked" else np.ones_like(TRAIN["mask"]))
        wanted = cases.known(FEATURES, KERNEL, LABELS, weights, **SETTINGS[setting])
        for ours, theirs in zip(found, wanted[:3], strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.long
def test_positions_that_do_not_divide_into_chunks():
    features, labels = FEATURES[0], LABELS[0]  # 5 positions in chunks of 3 and 2
    for weights in (np.full(5, 0.5, np.float32), np.arange(5, dtype=np.float32)):

        def total(features: Any, kernel: Any, weights: Any = weights) -> Any:
            found = values(features[None], kernel, jnp.asarray(labels[None]), chunk=3)
            return jnp.sum(found[0] * weights), found[0]

        grads, found = jax.grad(total, argnums=(0, 1), has_aux=True)(features, KERNEL)
        wanted = cases.known(features[None], KERNEL, labels[None], weights[None])
        for ours, theirs in zip((found[None], grads[0][None], grads[1]), wanted[:3], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_agree_with_torch(smoothing, torch):
    features = torch.tensor(FEATURES, requires_grad=True)
    kernel = torch.tensor(KERNEL, requires_grad=True)
    logits = (features @ kernel).reshape(-1, VOCABULARY)
    target = torch.tensor(TRAIN["label"].reshape(-1), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(
        logits, target, ignore_index=-100, label_smoothing=smoothing
    )
    loss.backward()
    weights = (COUNTS / COUNTS.sum()).astype(np.float32)
    found, *grads = gradients(weights, mask=TRAIN["mask"], chunk=7, smoothing=smoothing)
    assert float(found[COUNTS].mean()) == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(grads, (features.grad, kernel.grad), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 7])
def test_bfloat16_is_multiplied_as_it_is_and_added_in_float32(chunk):
    features, kernel = jnp.asarray(FEATURES, jnp.bfloat16), jnp.asarray(KERNEL, jnp.bfloat16)
    how: Any = {"soft_cap": 4.0, "z_loss": 0.05}
    found = gradients(WEIGHTS["mean"], features, kernel, chunk=chunk, **how)
    wanted = cases.known(features, kernel, LABELS, WEIGHTS["mean"], **how)
    assert [x.dtype for x in found] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_allclose(found[0], wanted.losses, rtol=1e-5)  # logits are not rounded
    for ours, theirs in zip(found[1:], wanted[1:3], strict=True):
        ours = np.asarray(ours, np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.01 * np.abs(theirs).max())


def test_chunks_are_those_of_whole_logits_for_other_functions():
    how: Any = {"soft_cap": 2.0, "scale": 1.5}
    one = ChunkedLogits(features=FEATURES, kernel=KERNEL, chunk=None, **how)
    many = ChunkedLogits(features=FEATURES, kernel=KERNEL, chunk=7, **how)
    logits = 2 * np.tanh(1.5 * (FEATURES @ KERNEL) / 2)
    np.testing.assert_allclose(one.whole(), logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(many.map(lambda x: x), logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(many.argmax(), logits.argmax(-1))
    with pytest.raises(ValueError, match="axis=-1"):
        many.argmax(axis=0)


def test_the_default_chunk_has_about_two_to_the_25_logits():
    outputs = partial(ChunkedLogits, kernel=jnp.zeros((4, 50_304), jnp.bfloat16))
    chunks = {
        rows: outputs(features=jnp.zeros((rows // 64, 64, 4)))._head.count
        for rows in (64, 640, 2048, 32_768)
    }
    assert chunks == {64: 1, 640: 1, 2048: 4, 32_768: 64}


@pytest.mark.parametrize(
    ("axes", "chunks"),
    [({"data": 8}, 8), ({"tensor": 2}, 32), ({"data": 2, "fsdp": 4, "tensor": 2}, 4)],
)
def test_a_chunk_has_as_many_logits_on_each_device(axes, chunks):
    kernel, features = jnp.zeros((4, 50_304)), jnp.zeros((512, 64, 4))
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    with jax.sharding.use_abstract_mesh(mesh):
        assert ChunkedLogits(features=features, kernel=kernel)._head.count == chunks


# Transformations.


def executions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which every chunk appends when it computes losses."""
    done: list[int] = []
    compute = Head.losses

    def counting(self: Head, *args: Any) -> Any:
        jax.debug.callback(lambda: done.append(1))
        return compute(self, *args)

    monkeypatch.setattr(Head, "losses", counting)
    return done


@pytest.mark.long
@pytest.mark.parametrize(
    ("weights", "times"), [("mean", 1), ("masked", 1), ("uneven", 2), ("of one", 2)]
)
def test_the_gradient_of_a_mean_is_computed_once(monkeypatch, weights, times):
    done = executions(monkeypatch)
    mask = TRAIN["mask"] if weights == "masked" else None
    jax.block_until_ready(gradients(WEIGHTS[weights], mask=mask, chunk=10))
    jax.effects_barrier()
    assert len(done) == times * 6


def test_operations_are_counted_once():
    def total(features: Any, kernel: Any, **how: Any) -> Any:
        return values(features, kernel, jnp.asarray(LABELS), **how).mean()

    counts = [
        count_flops(jax.make_jaxpr(jax.grad(partial(total, chunk=n), (0, 1)))(FEATURES, KERNEL))
        for n in (None, 10)
    ]
    assert counts == [3 * 2 * FEATURES.size * VOCABULARY] * 2


@pytest.mark.long
@pytest.mark.parametrize("masked", [True, False])
def test_trials_side_by_side_are_each_alone(monkeypatch, masked):
    done = executions(monkeypatch)
    kernels = jnp.stack([KERNEL, 2 * KERNEL, 0 * KERNEL])
    # Each trial has its own batch, and its own number of positions that count.
    masks = jnp.stack([TRAIN["mask"], 1 - TRAIN["mask"], TRAIN["mask"][::-1]]) if masked else None

    def loss(kernel: Any, mask: Any) -> Any:
        found = values(FEATURES, kernel, jnp.asarray(LABELS), mask=mask, chunk=10, soft_cap=3.0)
        weights = jnp.ones(LABELS.shape) if mask is None else mask
        return jnp.sum(found * weights) / jnp.sum(weights)

    axes = (0, 0 if masked else None)
    together = jax.block_until_ready(jax.jit(jax.vmap(jax.grad(loss), axes))(kernels, masks))
    jax.effects_barrier()
    assert len(done) == 6  # each for all trials, and not again for the gradient
    for i in range(3):
        mask = masks[i] if masked and masks is not None else np.ones(LABELS.shape, bool)
        wanted = cases.known(FEATURES, kernels[i], LABELS, mask / mask.sum(), soft_cap=3.0).kernel
        np.testing.assert_allclose(together[i], wanted, rtol=1e-4, atol=1e-5)
    mapped = jax.lax.map(lambda x: jax.grad(loss)(*x), (kernels, masks))
    np.testing.assert_allclose(mapped, together, rtol=1e-4, atol=1e-5)


def test_gradients_of_single_examples():
    def loss(kernel: Any, features: Any, labels: Any) -> Any:
        return values(features[None], kernel, labels[None], chunk=2).mean()

    found = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(KERNEL, FEATURES, jnp.asarray(LABELS))
    for i in range(cases.BATCH):
        one = slice(i, i + 1)
        wanted = cases.known(FEATURES[one], KERNEL, LABELS[one], np.full((1, 5), 0.2)).kernel
        np.testing.assert_allclose(found[i], wanted, rtol=1e-4, atol=1e-5)


def test_a_product_of_the_hessian_with_a_vector():
    direction = jnp.asarray(np.random.default_rng(4).normal(size=KERNEL.shape), jnp.float32)

    def product(chunk: Any) -> Any:
        def loss(kernel: Any) -> Any:
            return values(FEATURES, kernel, jnp.asarray(LABELS), chunk=chunk).mean()

        return jax.jit(lambda kernel: jax.jvp(jax.grad(loss), (kernel,), (direction,))[1])(KERNEL)

    p = softmax(FEATURES.astype(np.float64) @ KERNEL, axis=-1)
    moved = FEATURES @ np.asarray(direction)
    inner = p * (moved - (p * moved).sum(-1, keepdims=True)) / LABELS.size
    wanted = np.einsum("bpw,bpv->wv", FEATURES, inner)
    for chunk in (None, 7):
        np.testing.assert_allclose(product(chunk), wanted, rtol=1e-3, atol=1e-6)


# Memory.


def test_a_step_of_chunks_takes_less_than_half_of_the_memory_of_whole_logits():
    width, vocabulary, positions = 64, 50_304, 4096
    features = jax.ShapeDtypeStruct((4, positions // 4, width), jnp.float32)
    kernel = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
    labels = jax.ShapeDtypeStruct((4, positions // 4), jnp.int32)

    def peak(**how: Any) -> int:
        def loss(features: Any, kernel: Any, labels: Any) -> Any:
            return values(features, kernel, labels, **how).mean()

        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(features, kernel, labels)
        return step.compile().memory_analysis().temp_size_in_bytes

    whole = peak(chunk=positions)
    assert whole > 4 * positions * vocabulary
    assert peak() < 0.5 * whole
    assert peak(chunk=100) < 0.1 * whole


# Tokens have equal weights.


def evaluated(split: Any, kernel: Any = KERNEL) -> Any:
    labels = np.maximum(split["label"], 0)
    return cases.known(split["x"], kernel, labels, split["mask"], soft_cap=SOFT_CAP)


@pytest.mark.parametrize("chunk", [None, 7])
@short.parametrize("microbatches", [1, 2, 4])
def test_tokens_of_microbatches_have_equal_weights(microbatches, chunk):
    chosen = {"perplexity": metrics.perplexity(), "bits_per_byte": metrics.bits_per_byte()}
    program = cases.program(
        model=cases.model(chunk), microbatches=microbatches, train_metrics=chosen
    )
    kernel, found = one_step(program)
    mask = TRAIN["mask"]
    wanted = cases.known(
        FEATURES, KERNEL, LABELS, mask / mask.sum(), soft_cap=SOFT_CAP, z_loss=Z_LOSS
    )
    plain = evaluated(TRAIN).losses
    mean = np.average(wanted.losses, weights=mask)
    assert found["train/loss"] == pytest.approx(mean, rel=1e-5)
    assert found["train/z_loss"] == pytest.approx(
        np.average(wanted.losses - plain, weights=mask), rel=1e-4
    )
    assert found["train/perplexity"] == pytest.approx(np.exp(mean), rel=1e-4)
    bits = (wanted.losses * mask).sum() / np.log(2) / (TRAIN["bytes"] * mask).sum()
    assert found["train/bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    np.testing.assert_allclose(KERNEL - kernel, wanted.kernel, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_tokens_of_evaluation_batches_have_equal_weights(size):
    dataset = data.ArrayDataset(TRAIN, TEST, batch_size=None, eval_batch_size=size)
    # clu.metrics.Accuracy reads the logits.
    chosen = {
        "accuracy": metrics.accuracy(),
        "again": clu_metrics.Accuracy,
        "top": metrics.top_k_accuracy(3),
        "perplexity": metrics.perplexity(),
        "bits_per_byte": metrics.bits_per_byte(),
    }
    program = cases.program(data=dataset, metrics=chosen)
    found = program.evaluation.run_splits(program.init())
    mask, logits = TEST["mask"], TEST["x"] @ KERNEL
    mean = np.average(evaluated(TEST).losses, weights=mask)
    assert found["eval/loss"] == pytest.approx(mean, rel=1e-5)  # without the z-loss
    assert "eval/z_loss" not in found
    assert found["eval/perplexity"] == pytest.approx(np.exp(mean), rel=1e-4)
    bits = mean * mask.sum() / np.log(2) / (TEST["bytes"] * mask).sum()
    assert found["eval/bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    order = np.argsort(-logits, axis=-1)
    right = order == TEST["label"][..., None]
    for name, wanted in (("accuracy", right[..., 0]), ("top", right[..., :3].any(-1))):
        assert found[f"eval/{name}"] == pytest.approx(np.average(wanted, weights=mask))
    assert found["eval/again"] == found["eval/accuracy"]


def test_a_mask_of_examples_counts_for_all_their_tokens():
    mask = (np.arange(cases.BATCH) % 3 > 0).astype(np.float32)
    split: Any = TRAIN | {"mask": mask, "label": LABELS}
    program = cases.program(data=data.ArrayDataset(split, split, batch_size=None))
    kernel, found = one_step(program)
    weights = np.repeat(mask[:, None], cases.POSITIONS, 1) / mask.sum() / cases.POSITIONS
    wanted = cases.known(FEATURES, KERNEL, LABELS, weights, soft_cap=SOFT_CAP, z_loss=Z_LOSS)
    assert found["train/loss"] == pytest.approx((weights * wanted.losses).sum(), rel=1e-5)
    np.testing.assert_allclose(KERNEL - kernel, wanted.kernel, rtol=1e-4, atol=1e-6)
    results = program.evaluation.run_splits(program.init())
    bits = (weights * evaluated(TRAIN).losses).sum() * mask.sum() * cases.POSITIONS / np.log(2)
    bits /= (TRAIN["bytes"] * mask[:, None]).sum()
    assert results["eval/bits_per_byte"] == pytest.approx(bits, rel=1e-4)


# Mistakes.


def test_a_label_outside_of_the_vocabulary_is_nan_where_it_counts():
    labels = jnp.asarray(LABELS).at[0, 0].set(VOCABULARY)
    for chunk in (None, 7):
        found = np.asarray(values(FEATURES, KERNEL, labels, chunk=chunk))
        assert np.isnan(found[0, 0]) and np.isfinite(found).sum() == found.size - 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": losses.squared_error("x")}, ["losses.squared_error", "outputs.whole()"]),
        ({"loss": losses.huber(targets="x")}, ["losses.huber", "outputs.whole()"]),
        ({"loss": losses.sigmoid_binary_cross_entropy()}, ["sigmoid", "outputs.whole()"]),
        ({"loss": losses.softmax_cross_entropy(labels="x")}, ["integer labels", "'x' is float32"]),
        ({"metrics": {"m": metrics.mean_squared_error("x")}}, ["mean_squared", "outputs.whole()"]),
        ({"metrics": {"m": metrics.bits_per_byte("size")}}, ["'size'", "'bytes'", "bits_per_byte"]),
        ({"metrics": {"m": metrics.bits_per_byte("x")}}, ["(4, 5)", "(4, 5, 6)"]),
    ],
)
def test_mistakes_are_named(changes, words):
    program = cases.program(**changes)
    with pytest.raises(ComponentError) as caught:
        program.trace(program.abstract_state())
        program.evaluation.check(program.abstract_state())
    for word in words:
        assert word in str(caught.value)


def test_labels_outside_of_the_vocabulary_are_named_after_a_bad_step():
    split = TRAIN | {"label": np.where(COUNTS, LABELS + 4, 0).astype(np.int32)}
    program = cases.program(data=data.ArrayDataset(split, TEST, batch_size=None))
    assert np.isnan(one_step(program)[1]["train/loss"])
    fault = find_fault(program, next(program.experiment.batches(0)))
    assert fault is not None and "'label'" in fault and "11 classes, 0 to 10" in fault
