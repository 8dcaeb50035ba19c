"""The diagnostics of a step, compared with numpy's in float64 and with closed forms."""

import json
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

import optim
from optim.layouts import layouts
from optim.paths import flatten
from tests import runs
from trainer import data, losses, models
from trainer.config import ConfigError
from trainer.engine.contracts import ComponentError
from trainer.engine.diagnostics import ALL, GroupUpdate, NoiseScale, find_layouts, spectral_norms
from trainer.engine.experiment import Experiment
from trainer.engine.plan import make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import Program


def experiment(optimizer: Any, **changes: Any) -> Experiment:
    given: dict[str, Any] = dict(
        model=models.mlp(width=8, depth=2),
        data=data.digits(batch_size=64),
        loss=losses.softmax_cross_entropy(),
        optimizer=optimizer,
        steps=20,
        log_every=5,
        eval_every=10,
        save_every=10,
        diagnostics="all",
    )
    return Experiment(**(given | changes))


class Diagnosed:
    """A step that was diagnosed, with the parameters before and after it, and its batch."""

    def __init__(self, of: Experiment, steps: int = 3):
        self.program = Program(of)
        state = self.program.init()
        batches = of.data.train(0, 0)
        for _ in range(steps - 1):
            state, _ = self.program.step(state, self.program.feed.to_devices(next(batches)))
        self.batch = next(batches)
        self.values = {k: float(x) for k, x in self.program.diagnose(state, self.batch).items()}
        self.before = jax.device_get(flatten(state.params))
        self.master = jax.device_get(dict(state.opt_state.master))
        state, metrics = self.program.step(state, self.program.feed.to_devices(self.batch))
        self.after, self.state = jax.device_get(flatten(state.params)), state
        self.metrics = {name: float(x) for name, x in metrics.items()}

    def vector(self, tree: Any, pattern: str = "") -> np.ndarray:
        return np.concatenate([np.float64(x).ravel() for p, x in tree.items() if pattern in p])

    def gradient(self) -> dict[str, np.ndarray]:
        """The gradient of the loss, without the trainer's step."""
        model: Any = self.program.experiment.model

        def loss(by_path: dict[str, Any]) -> Any:
            params = optim.paths.unflatten(self.state.params, by_path)
            logits, _ = model.apply(params, {}, self.batch, key=None, train=True)
            labels = self.batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return jax.device_get(jax.grad(loss)({p: jnp.asarray(x) for p, x in self.before.items()}))


def stacked(tree: Any, paths: list[str]) -> list[Any]:
    """The matrices of kernels, some of which are [layers, rows, columns]."""
    return [np.float64(x) for p in paths for x in tree[p].reshape(-1, *tree[p].shape[-2:])]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def angle(a: np.ndarray, b: np.ndarray) -> float:
    """The angle between two vectors, exact also where it is small (Kahan)."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))


MUON = partial(optim.muon, learning_rate=0.05, weight_decay=0.1)
ADAM = partial(optax.adamw, learning_rate=0.01)
TWO = {"matrices": optim.group(".*kernel", MUON), "rest": optim.group(".*", ADAM)}


def test_the_diagnostics_are_those_that_numpy_computes_from_the_parameters():
    found = Diagnosed(experiment(optim.optimizer(TWO, clip_norm=0.1)))
    grads, values = found.gradient(), found.values
    moved = {p: np.float64(x) - np.float64(found.before[p]) for p, x in found.after.items()}
    for group, pattern in (("matrices", "kernel"), ("rest", "bias")):
        u, w, g = (found.vector(tree, pattern) for tree in (moved, found.before, grads))
        wanted = {
            "update_rms": np.sqrt(np.mean(u**2)),
            "weight_rms": np.sqrt(np.mean(w**2)),
            "update_ratio": np.linalg.norm(u) / np.linalg.norm(w),
            "gradient_cosine": cosine(-u, g),
            "weight_cosine": cosine(u, w),
        }
        for name, value in wanted.items():
            assert values[f"{name}/{group}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    kernels = [path for path in moved if "kernel" in path]
    singular = [np.linalg.svd(x, compute_uv=False) for x in stacked(moved, kernels)]
    largest = max(s[0] for s in singular)
    assert largest * 0.99 < values["spectral_norm/matrices"] < largest * (1 + 1e-5)
    stable = np.mean([np.sum(s**2) / s[0] ** 2 for s in singular])
    assert stable * (1 - 1e-5) < values["stable_rank/matrices"] < stable * 1.02
    pairs = zip(stacked(found.before, kernels), stacked(found.after, kernels), strict=True)
    turned = [angle(a.ravel(), b.ravel()) for a, b in pairs]
    assert values["rotation/matrices"] == pytest.approx(np.mean(turned), rel=1e-4)
    norm = np.linalg.norm(found.vector(grads))
    assert norm == pytest.approx(found.metrics["grad_norm"], rel=1e-5)
    # Vectors are no matrices.
    assert not {f"{name}/rest" for name in ("spectral_norm", "stable_rank", "rotation")} & set(
        values
    )
    assert len(values) == 8 + 5


@pytest.mark.long
@pytest.mark.parametrize(("clip_norm", "microbatches"), [(1e-3, 4), (1e3, 1)])
def test_steps_of_sgd_go_down_the_gradient(clip_norm, microbatches):
    sgd = {"all": optim.group(".*", partial(optax.sgd, learning_rate=0.3))}
    of = experiment(optim.optimizer(sgd, clip_norm), microbatches=microbatches)
    found = Diagnosed(of)
    norm = found.metrics["grad_norm"]
    weight = np.linalg.norm(found.vector(found.before))
    ratio = 0.3 * min(norm, clip_norm) / weight
    assert found.values["gradient_cosine/all"] == pytest.approx(1, abs=1e-5)
    assert found.values["update_ratio/all"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.long
def test_a_group_that_maximizes_goes_up_the_gradient():
    rise = optim.group(".*", partial(optax.sgd, learning_rate=0.3), maximize=True)
    found = Diagnosed(experiment(optim.optimizer({"all": rise})))
    assert found.values["gradient_cosine/all"] == pytest.approx(-1, abs=1e-5)


@pytest.mark.long
def test_updates_of_pinned_norms_are_chords_of_a_circle():
    pinned = optim.chain(
        learning_rate=0.1, before=[optim.parts.match_norm()], after=[optim.parts.pin_radius()]
    )
    groups = {
        "pinned": optim.group("first/kernel", pinned),
        "rest": optim.group(".*", ADAM),
    }
    found = Diagnosed(experiment(optim.optimizer(groups), model=Named()))
    values = {name.partition("/")[0]: x for name, x in found.values.items() if "pinned" in name}
    half = values["update_ratio"] / 2
    assert 0.01 < half < 0.2
    assert values["weight_cosine"] == pytest.approx(-half, rel=1e-3)
    assert values["rotation"] == pytest.approx(2 * np.arcsin(half), rel=1e-4)


@pytest.mark.long
def test_updates_of_muon_use_all_directions():
    tx = optim.muon(learning_rate=1.0)
    draw = np.random.default_rng(0)
    # Gradients of stable rank about 1, with singular values over three decades.
    sides = [np.linalg.qr(draw.normal(size=(64, 64)))[0] for _ in range(2)]
    grad = jnp.asarray(sides[0] * np.geomspace(1, 1e-3, 64) @ sides[1], jnp.float32)
    params = {"w": jnp.asarray(draw.normal(size=(64, 64)), jnp.float32)}
    updates, _ = tx.update({"w": grad}, tx.init(params), params)
    found = layouts(params, [], "")
    of_grad = GroupUpdate({"w": -grad}, params, {"w": grad}, found)
    of_muon = GroupUpdate(dict(updates), params, {"w": grad}, found)
    assert float(of_grad.stable_rank()) < 6 and 30 < float(of_muon.stable_rank()) <= 64


@pytest.mark.long
@pytest.mark.parametrize(("low", "rate"), [("nearest", 1e-7), ("master", 0.03)])
def test_the_rounding_to_low_precision_is_not_part_of_an_update(low, rate):
    sgd = {"all": optim.group(".*", partial(optax.sgd, learning_rate=rate))}
    of = experiment(optim.optimizer(sgd, low_precision=low), precision="bfloat16")
    found = Diagnosed(of, steps=5)
    count = sum(x.size for x in found.before.values())
    wanted = rate * found.metrics["grad_norm"] / np.sqrt(count)
    assert found.values["update_rms/all"] == pytest.approx(wanted, rel=1e-5)
    weights = found.before if low == "nearest" else found.master
    norms = [np.linalg.norm(found.vector(tree)) for tree in (weights, found.before)]
    assert found.values["weight_rms/all"] == pytest.approx(norms[0] / np.sqrt(count), rel=1e-6)
    if low == "master":  # the copies are told from the rounded parameters
        assert norms[0] != pytest.approx(norms[1], rel=5e-6)
    else:
        assert 0 < found.values["rotation/all"] < 1e-5


@pytest.mark.long
def test_a_lookahead_is_not_part_of_an_update():
    sgd = {"all": optim.group(".*", partial(optax.sgd, learning_rate=0.3))}
    ahead = optim.ema_nesterov(step_size=0.9, decay=0.5)
    found = Diagnosed(experiment(optim.optimizer(sgd, lookahead=ahead)), steps=5)
    norm, before = found.metrics["grad_norm"], found.vector(found.before)
    ratio = 0.3 * norm / np.linalg.norm(before)
    assert found.values["update_ratio/all"] == pytest.approx(ratio, rel=1e-5)
    assert np.linalg.norm(found.vector(found.after) - before) > 1.2 * 0.3 * norm


@pytest.mark.long
def test_layer_decay_is_part_of_an_update():
    sgd = {"all": optim.group(".*", partial(optax.sgd, learning_rate=0.3))}
    layers = {"Dense_0/.*|first/.*": 0, ".*": 1}
    decayed = optim.optimizer(sgd, layer_decay=0.5, layers=layers)
    found = Diagnosed(experiment(decayed, model=Named()))
    moved = found.vector(found.after) - found.vector(found.before)
    rms = np.sqrt(np.mean(moved**2))
    assert found.values["update_rms/all"] == pytest.approx(rms, rel=1e-4)
    assert found.values["gradient_cosine/all"] < 0.999


class Named(nn.Module):
    """Dense layers with names, and a kernel of three axes that Muon may read as heads."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(x.reshape(x.shape[0], -1))
        x = nn.DenseGeneral((4, 2), name="query")(x).reshape(x.shape[0], -1)
        return nn.Dense(10, name="last")(nn.tanh(x))


@pytest.mark.long
def test_frozen_groups_have_no_diagnostics():
    groups = {"first": optim.group("first/.*", optim.frozen()), "rest": optim.group(".*", ADAM)}
    found = Diagnosed(experiment(optim.optimizer(groups), model=Named()))
    assert {name.partition("/")[2] for name in found.values} == {"rest"}


def test_the_matrices_are_those_of_the_optimizer_and_otherwise_those_of_the_layers():
    shapes = {
        "query": {"kernel": (8, 4, 2), "bias": (4, 2)},
        "conv": {"kernel": (3, 3, 8, 16), "bias": (16,)},
        "stack": {"kernel": (2, 8, 8), "scale": (2, 8)},
        "embed": {"embedding": (30, 8)},
    }
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )
    per_head = partial(optim.muon, 0.02, matrices="attention_query_per_head")
    groups = {"heads": optim.group("query/kernel", per_head), "rest": optim.group(".*", ADAM)}
    found = find_layouts(optim.optimizer(groups), params)
    assert {path: layout.matrices for path, layout in found.items()} == {
        "query/kernel": (4, 8, 2),
        "conv/kernel": (1, 72, 16),
        "stack/kernel": (2, 8, 8),
        "embed/embedding": (1, 30, 8),
    }
    plain = find_layouts(optim.optimizer({"all": optim.group(".*", ADAM)}), params)
    assert plain["query/kernel"].matrices == (1, 8, 8)


# The functions alone.


def matrices(kind: str) -> np.ndarray:
    draw = np.random.default_rng(3)
    if kind == "wide":
        return draw.normal(size=(4, 64, 256))
    if kind == "tall":
        return draw.normal(size=(4, 256, 64))
    if kind == "signs":
        return np.sign(draw.normal(size=(4, 128, 128)))
    if kind == "rank one":
        return draw.normal(size=(3, 16, 1)) * draw.normal(size=(3, 1, 12))
    if kind == "tiny":
        return 1e-25 * draw.normal(size=(3, 16, 12))
    left, right = (np.linalg.qr(draw.normal(size=(2, 64, 64)))[0] for _ in range(2))
    values = np.ones(64) if kind == "orthogonal" else 0.9 ** np.arange(64)
    return left * values @ right


@pytest.mark.parametrize(
    ("kind", "short"),
    [
        ("wide", 0.01),
        ("tall", 0.01),
        ("signs", 0.01),
        ("tiny", 1e-3),
        ("rank one", 1e-6),
        ("orthogonal", 1e-6),
        ("falling", 1e-3),
    ],
)
def test_power_iteration_comes_near_the_largest_singular_value_from_below(kind, short):
    x = matrices(kind)
    wanted = np.linalg.svd(x, compute_uv=False)[:, 0]
    found = np.float64(jax.jit(spectral_norms)(jnp.asarray(x, jnp.float32)))
    assert np.all(found <= wanted * (1 + 1e-6)) and np.all(found >= wanted * (1 - short))


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.1, 3.0])
@pytest.mark.parametrize("toward", [-0.5, 0.0, 4.0])
def test_small_angles_are_exact_in_float32(size, toward):
    draw = np.random.default_rng(5)
    w = draw.normal(size=(20, 30)).astype(np.float32)
    u = (size * (draw.normal(size=w.shape) + toward * w)).astype(np.float32)
    group = GroupUpdate({"w": jnp.asarray(u)}, {"w": w}, {"w": u}, layouts({"w": w}, [], ""))
    wanted = angle(np.float64(w).ravel(), (np.float64(w) + u).ravel())
    assert float(group.rotation()) == pytest.approx(wanted, rel=1e-5)


def test_quotients_without_a_denominator_are_zero():
    w = {"w": jnp.zeros((3, 4))}
    u = {"w": jnp.ones((3, 4))}
    found = layouts(w, [], "")
    from_zero, to_zero = GroupUpdate(u, w, w, found), GroupUpdate(w, u, u, found)
    for name in ("update_ratio", "gradient_cosine", "weight_cosine", "rotation"):
        assert float(getattr(from_zero, name)()) == float(getattr(to_zero, name)()) == 0
    assert float(to_zero.spectral_norm()) == float(to_zero.stable_rank()) == 0
    assert float(from_zero.stable_rank()) == pytest.approx(1)


def test_complex_parameters_count_with_their_absolute_values():
    u, g = {"w": jnp.asarray([3 + 4j, 0])}, {"w": jnp.asarray([-3 - 4j, 12j])}
    group = GroupUpdate(u, {"w": jnp.asarray([1j, 0])}, g, {})
    assert float(group.update_rms()) == pytest.approx(5 / np.sqrt(2))
    assert float(group.gradient_cosine()) == pytest.approx(25 / (5 * 13))
    assert float(group.weight_cosine()) == pytest.approx(4 / 5)


# The program.


@pytest.mark.long
def test_the_step_is_the_one_without_diagnostics_and_off_compiles_nothing_more(compilations):
    texts, names = [], []
    for asked in ((), "all"):
        program = Program(experiment(optim.optimizer(TWO), diagnostics=asked))
        state = program.init()
        texts.append(program.trace(state).lower().as_text())
        with compilations() as compiled:
            program.compile(state)
        names.append(list(compiled))
    assert texts[0] == texts[1]
    assert "jit(diagnose)" not in names[0]
    assert names[1] == [*names[0], "jit(diagnose)"]


@pytest.mark.long
def test_the_memory_of_the_diagnosis_counts_where_it_is_larger_than_that_of_the_step():
    """A step of SGD writes the gradient into the weights; a diagnosis keeps it and the update."""
    found = []
    for asked in ((), "all"):
        optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.sgd, 0.1))})
        given = dict(model=models.mlp(width=512, depth=3), data=data.digits(batch_size=8))
        program = Program(experiment(optimizer, diagnostics=asked, **given))
        assert program.temporary_bytes is None
        program.compile(program.abstract_state())
        found.append(program.temporary_bytes)
    step, both = found
    assert both > step + 4 * 512 * 512


@pytest.mark.long
def test_trials_share_the_compiled_diagnostics(compilations):
    of = experiment(optim.optimizer(TWO))
    program = Program(of)
    program.compile(program.abstract_state())
    batch = next(of.data.train(0, 0))
    with compilations() as compiled:
        for seed in (1, 2):
            other = program.with_values({}, seed)
            other.diagnose(other.init(), batch)
    assert "jit(diagnose)" not in compiled


@pytest.mark.long
def test_several_devices_compute_the_same_diagnostics():
    """To rounding: sums over a sharded batch, and over sharded parameters, have another order."""
    found = runs.on_four_devices(DEVICES)
    assert len(found["one"]) == 8 + 5
    for name, value in found["one"].items():
        assert found["four"][name] == pytest.approx(value, rel=2e-3, abs=1e-6), name


DEVICES = """
import json
from tests.engine.test_diagnostics import TWO, Diagnosed, experiment
import optim
found = {}
for name, mesh in (("one", {"data": 1}), ("four", {"data": 2, "fsdp": 2})):
    of = experiment(optim.optimizer(TWO, clip_norm=0.1), mesh=mesh)
    found[name] = Diagnosed(of).values
print(json.dumps(found))
"""


def test_the_plan_names_the_diagnostics_and_their_matrices():
    program = Program(experiment(optim.optimizer(TWO), diagnostics=["rotation"]))
    assert (
        "diagnostics, every 5 steps, in about the time of a step: rotation; their matrices: "
    ) in render_plan(make_plan(program))
    counted = Program(experiment(optim.optimizer(TWO, 0.1), diagnostics=["clipped"]))
    assert "diagnostics, every 5 steps, in no time of their own: clipped\n" in render_plan(
        make_plan(counted)
    )
    none = Program(experiment(optim.optimizer(TWO), diagnostics=()))
    assert "diagnostics" not in render_plan(make_plan(none))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["rotatoin"], "'rotatoin', which is not one. Did you mean 'rotation'?"),
        (["update_rms", 3], "3, which is not one"),
        ("rotation", r"write \[rotation\]"),
        (["clipped"], "the optimizer clips no gradients. Set clip_norm"),
    ],
)
def test_names_that_nothing_can_be_computed_for_are_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        experiment(ADAM, diagnostics=asked)


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)[:, :10]
        return x * self.param("scale", nn.initializers.ones, (10,))


def test_diagnostics_of_matrices_need_a_matrix():
    program = Program(experiment(ADAM, model=Scaled(), diagnostics=["update_rms", "rotation"]))
    for refused in (make_plan, lambda program: program.compile(program.abstract_state())):
        with pytest.raises(ConfigError, match="no trainable parameter is a matrix.*'rotation'"):
            refused(program)
    with pytest.raises(ComponentError):
        program.diagnosed_layouts  # noqa: B018
    found = Diagnosed(experiment(ADAM, model=Scaled()))
    assert len(found.values) == 5


@pytest.mark.long
def test_all_names_every_diagnostic():
    found = Diagnosed(experiment(optim.optimizer(TWO, clip_norm=1.0)))
    assert {name.partition("/")[0] for name in found.values} == set(ALL) - {"clipped"}
    assert json.dumps(found.values)


NOISE = ["gradient_square", "gradient_noise"]


def half_gradients(found: Diagnosed, rows: Any) -> np.ndarray:
    """The gradient of the mean loss of some rows of the batch, as one vector of the kernels."""
    found.batch = {name: np.asarray(x)[rows] for name, x in found.batch.items()}
    return found.vector(found.gradient(), "kernel")


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_noise_of_a_step_is_that_of_the_two_halves_of_its_batch(microbatches: int):
    of = experiment(optim.optimizer(TWO), diagnostics=NOISE, microbatches=microbatches)
    found = Diagnosed(of)
    assert set(found.values) == {f"{name}/{group}" for name in NOISE for group in TWO}
    batch = found.batch
    first = half_gradients(found, slice(0, None, 2))
    found.batch = batch
    second = half_gradients(found, slice(1, None, 2))
    assert found.values["gradient_square/matrices"] == pytest.approx(first @ second, rel=1e-4)
    apart = 64 / 4 * np.sum((first - second) ** 2)
    assert found.values["gradient_noise/matrices"] == pytest.approx(apart, rel=1e-4)


@pytest.mark.long
def test_the_noise_of_gradients_is_the_variance_over_single_examples():
    of = experiment(optim.optimizer(TWO), diagnostics=NOISE)
    program, batches = Program(of), of.data.train(0, 0)
    state = program.init()
    rows = [program.diagnose(state, next(batches)) for _ in range(2000)]
    means = {name: np.mean([float(row[name]) for row in rows]) for name in rows[0]}
    model: Any = of.model

    def loss(by_path: dict[str, Any], image: Any, label: Any) -> Any:
        params = optim.paths.unflatten(state.params, by_path)
        logits, _ = model.apply(params, {}, {"image": image[None]}, key=None, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits[0], label)

    every: Any = next(data.digits(batch_size=None).train(0, 0))
    single = jax.vmap(jax.grad(loss), (None, 0, 0))
    grads = jax.device_get(single(flatten(state.params), every["image"], every["label"]))
    for group, pattern in (("matrices", "kernel"), ("rest", "bias")):
        chosen = [np.float64(x) for path, x in grads.items() if pattern in path]
        each = np.concatenate([x.reshape(len(x), -1) for x in chosen], 1)  # [examples, elements]
        square = np.sum(each.mean(0) ** 2)
        trace = np.sum(each.var(0))
        # In the mean over 2,000 batches, of the definitions in the paper.
        assert means[f"gradient_noise/{group}"] == pytest.approx(trace, rel=0.04)
        assert means[f"gradient_square/{group}"] == pytest.approx(square, rel=0.1)


def test_the_noise_scale_is_the_quotient_of_means_that_are_smoothed_apart():
    dice, scale = np.random.default_rng(0), NoiseScale()
    square, noise = dice.normal(1, 3, 60), dice.uniform(5, 9, 60)
    found = [
        scale.add({"gradient_square/a": x, "gradient_noise/a": y, "train/loss": 1.0})
        for x, y in zip(square, noise, strict=True)
    ]
    frame = pandas.DataFrame({"square": square, "noise": noise}).ewm(halflife=20).mean()
    for row, (_, mean) in zip(found, frame.iterrows(), strict=True):
        wanted = {"noise_scale/a": mean.noise / mean.square} if mean.square > 0 else {}
        assert row == pytest.approx(wanted, rel=1e-9)
    assert 0 < sum(not row for row in found) < 60  # some means are negative
    assert not scale.add({"gradient_square/a": np.nan, "gradient_noise/a": 1.0})
    last = scale.add({"gradient_square/a": 1.0, "gradient_noise/a": 1.0})["noise_scale/a"]
    assert last == pytest.approx(found[-1]["noise_scale/a"], rel=0.2)  # the NaN did not count


def test_the_noise_of_gradients_needs_two_halves():
    with pytest.raises(ValueError, match="batch size 60 does not divide into two halves of 4 micr"):
        experiment(ADAM, data=data.digits(batch_size=60), microbatches=4, diagnostics=NOISE)
    experiment(ADAM, data=data.digits(batch_size=60), microbatches=2, diagnostics=NOISE)
    plan = make_plan(Program(experiment(ADAM, diagnostics=NOISE)))
    assert "in about the time of two steps: gradient_square, gradient_noise" in render_plan(plan)
