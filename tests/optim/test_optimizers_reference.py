"""Our optimizers against their papers' algorithms, which programs.py restates in NumPy float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import chain, parts
from optim.cautious import cautious, grams
from optim.mars import mars
from optim.scion import scion
from optim.shampoo import shampoo
from optim.soap import soap
from tests import runs, short
from tests.programs import (
    cautious_lion,
    cautious_mask,
    grams_mask,
    mars_by_the_paper,
    masked_adamw_by_the_paper,
    scion_by_the_paper,
    shampoo_by_the_paper,
    soap_by_the_paper,
)

STEPS = 20


def problem(shape, scale=1.0):
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape), scale * (rng.standard_normal((STEPS, *shape)) + 0.5)


def apply(params, updates) -> Any:
    return optax.apply_updates(params, updates)


def run(tx, start, grads):
    """Trains in float64; returns the parameters after every step, and the last state."""
    with jax.enable_x64(True):
        params: Any = {"w": jnp.asarray(start)}
        state, seen = tx.init(params), []
        update = jax.jit(tx.update)
        for g in grads:
            updates, new = update({"w": jnp.asarray(g)}, state, params)
            assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
            params, state = apply(params, updates), new
            seen.append(np.asarray(params["w"]))
        return np.stack(seen), jax.tree.map(np.asarray, state)


def agree(got, expected):
    expected = np.stack([*expected])
    assert got.dtype == np.float64
    assert np.abs(expected[-1] - expected[0]).max() > 1e-2  # they went somewhere
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)


# ---- SOAP: Vyas et al. 2024, algorithm 3, and the order of events of the authors' program


@short.parametrize("every", [1, 3])
@short.parametrize("beta", [None, 0.7])
def test_soap_agrees_with_its_paper(every, beta):
    start, grads = problem((2, 6, 6))
    tx = soap(0.03, 0.9, 0.95, beta, weight_decay=0.1, precondition_frequency=every)
    got, _ = run(tx, start, grads)
    for layer in range(2):
        expected = soap_by_the_paper(
            start[layer], grads[:, layer], 0.03, 0.9, 0.95, beta or 0.95, 1e-8, 0.1, every
        )
        agree(got[:, layer], expected)


@pytest.mark.long
def test_soap_on_rectangles_agrees_with_its_paper():
    # With fewer columns than rows G G^T has a null space, whose basis the paper leaves open: so the
    # reference begins with our bases, once they are seen to be bases of eigenvectors.
    start, grads = problem((4, 7))
    tx = soap(0.03, 0.9, 0.95, precondition_frequency=2)
    _, state = run(tx, start, grads[:1])
    bases = [state.direction.left_basis["w"], state.direction.right_basis["w"]]
    for q, gram in zip(bases, (grads[0] @ grads[0].T, grads[0].T @ grads[0]), strict=True):
        np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
        eigenvalues = q.T @ gram @ q
        np.testing.assert_allclose(eigenvalues, np.diag(np.diag(eigenvalues)), atol=1e-11)
        assert np.diff(np.diag(eigenvalues)).max() < 1e-11
    got, _ = run(tx, start, grads)
    agree(got, soap_by_the_paper(start, grads, 0.03, 0.9, 0.95, 0.95, 1e-8, 0.0, 2, bases))


def test_soap_without_bases_equals_adam_one_step_later():
    start, grads = problem((4, 7))
    got, _ = run(soap(0.03, 0.9, 0.95, eps=1e-12, max_precond_dim=3), start, grads)
    adam, _ = run(optax.adam(0.03, 0.9, 0.95, eps=1e-12), start, grads[1:])
    np.testing.assert_allclose(got[1:], adam, rtol=1e-6)
    np.testing.assert_array_equal(got[0], start)


# ---- Shampoo: Shi et al. 2023, with eigendecompositions and Adam's grafting


@pytest.mark.parametrize("every, begin", [(1, None), (3, 5), (4, 2)])
def test_shampoo_agrees_with_its_paper(every, begin):
    start, grads = problem((2, 4, 7))
    # eps well above rounding: the root of a null space is noise otherwise, in anyone's program.
    options = {"eps": 1e-6, "weight_decay": 0.1, "every": every}
    got, _ = run(shampoo(0.03, 0.9, 0.97, start=begin, **options), start, grads)
    for layer in range(2):
        expected = shampoo_by_the_paper(
            start[layer], grads[:, layer], 0.03, 0.9, 0.97, 1e-6, 0.1, every, begin or every
        )
        agree(got[:, layer], expected)


@pytest.mark.long
def test_shampoo_with_sums_in_place_of_averages_agrees_with_the_paper():
    start, grads = problem((4, 7))
    expected = [*shampoo_by_the_paper(start, grads, 0.03, 0.9, 1.0, 1e-6, 0.1, 2, 2)]
    options = {"eps": 1e-6, "weight_decay": 0.1, "every": 2}
    agree(run(shampoo(0.03, 0.9, 1.0, **options), start, grads)[0], expected)
    recipe = partial(shampoo, 0.03, 0.9, lambda t: jnp.where(t < 0, 0.5, 1.0), **options)
    for b2 in (recipe, partial(shampoo, 0.03, 0.9, 1.0, **options)):
        whole = optim.optimizer({"all": optim.group(".*", b2)})
        agree(run(whole.tx, start, grads)[0], expected)


def test_shampoo_does_not_precondition_sides_above_max_precond_dim():
    start, grads = problem((4, 7))
    one_side = shampoo(0.03, 0.9, 0.97, 1e-6, every=2, max_precond_dim=5)
    expected = shampoo_by_the_paper(start, grads, 0.03, 0.9, 0.97, 1e-6, 0.0, 2, 2, sides="l")
    agree(run(one_side, start, grads)[0], expected)
    no_side = shampoo(0.03, 0.9, 0.97, every=2, max_precond_dim=3)
    agree(run(no_side, start, grads)[0], run(optax.adam(0.03, 0.9, 0.97), start, grads)[0])


# ---- MARS: Yuan et al. 2024, algorithm 2 (MARS-AdamW), approximate


@pytest.mark.parametrize("scale", [1.0, 0.05])  # clipped, and not
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_mars_agrees_with_its_paper(scale, shape):
    start, grads = problem(shape, scale)
    got, _ = run(mars(0.03, 0.9, 0.95, 0.05, 1e-6, 0.1), start, grads)
    agree(got, mars_by_the_paper(start, grads, 0.03, 0.9, 0.95, 0.05, 1e-6, 0.1))


# ---- Scion: Pethick et al. 2025, algorithms 1 and 2, with the norms of tables 2 and 4


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("norm", ["spectral", "sign", "col_norm", "row_norm", "bias_rms"])
def test_scion_agrees_with_its_paper(norm, constrained):
    start, grads = problem((2, 5) if norm == "bias_rms" else (2, 4, 7))
    tx = scion(0.02, 3.0, 0.1, norm, constrained, eps=1e-14)
    got, _ = run(tx, start, grads)
    for layer in range(2):
        expected = scion_by_the_paper(
            start[layer], grads[:, layer], 0.02, 3.0, 0.1, norm, constrained
        )
        agree(got[:, layer], expected)


# ---- Masks: Liang et al. 2024 and Cao et al. 2024, on AdamW and on Lion


MASKS = pytest.mark.parametrize(
    "wrapper, mask", [(cautious, cautious_mask), (grams, grams_mask)], ids=["cautious", "grams"]
)


@MASKS
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_cautious_and_grams_on_adamw_agree_with_their_authors_programs(wrapper, mask, decay):
    # The decay is AdamW's own, or the wrapper's around Adam: the same run, outside of the mask.
    start, grads = problem((3, 4))
    expected = [*masked_adamw_by_the_paper(start, grads, 0.03, 0.9, 0.95, 1e-8, decay, mask)]
    adamw = partial(optax.adamw, learning_rate=0.03, b1=0.9, b2=0.95, weight_decay=decay)
    agree(run(wrapper(adamw), start, grads)[0], expected)
    adam = partial(optax.adam, learning_rate=0.03, b1=0.9, b2=0.95)
    agree(run(wrapper(adam, weight_decay=decay), start, grads)[0], expected)
    inside = partial(optax.chain, partial(optax.identity), adam)
    agree(run(wrapper(inside, weight_decay=decay), start, grads)[0], expected)


@MASKS
def test_masks_follow_the_schedules_of_the_base(wrapper, mask):
    start, grads = problem((3, 4))
    rates = 0.03 * 0.9 ** np.arange(STEPS)
    decays = np.linspace(0.1, 0.3, STEPS)
    expected = [*masked_adamw_by_the_paper(start, grads, rates, 0.9, 0.95, 1e-8, decays, mask)]
    rate: Any = lambda t: 0.03 * 0.9 ** jnp.asarray(t, float)  # noqa: E731
    decay: Any = lambda t: 0.1 + 0.2 * t / (STEPS - 1)  # noqa: E731
    adamw = partial(optax.adamw, rate, 0.9, 0.95, weight_decay=decay)
    agree(run(wrapper(adamw), start, grads)[0], expected)
    adam = partial(optax.adam, rate, 0.9, 0.95)
    agree(run(wrapper(adam, weight_decay=decay), start, grads)[0], expected)
    for recipe in (partial(wrapper, adamw), partial(wrapper, adam, weight_decay=decay)):
        whole = optim.optimizer({"all": optim.group(".*", recipe)})
        agree(run(whole.tx, start, grads)[0], expected)


@MASKS
def test_weight_decay_keeps_the_mask_and_the_scale_of_the_base_optimizer(wrapper, mask):
    # Scaled after the learning rate (Adafactor), on some parameters only, of a factory of ours.
    start, grads = problem((3, 4))
    plain = run(wrapper(partial(optax.adamw, 0.03, weight_decay=0.0)), start, grads)[0]
    none = partial(optax.adamw, 0.03, weight_decay=0.1, mask={"w": False})
    agree(run(wrapper(none), start, grads)[0], plain)
    ours = partial(mars, 0.03, 0.9, 0.95, weight_decay=0.1)
    decayed = run(wrapper(ours), start, grads[:1])[0]
    without = run(wrapper(partial(ours, weight_decay=0.0)), start, grads[:1])[0]
    np.testing.assert_allclose(decayed - without, -0.03 * 0.1 * start[None], rtol=1e-6)
    factored = partial(optax.adafactor, 0.03, weight_decay_rate=0.02, clipping_threshold=None)
    decayed = run(wrapper(factored), start, grads[:1])[0]
    without = run(wrapper(partial(factored, weight_decay_rate=None)), start, grads[:1])[0]
    np.testing.assert_allclose(decayed - without, -0.02 * start[None], rtol=1e-6)


def test_cautious_on_lion_and_against_the_gradient():
    start, grads = problem((3, 4))
    got, _ = run(cautious(optax.lion(0.01, 0.9, 0.95, weight_decay=0.0)), start, grads)
    agree(got, cautious_lion(start, grads, 0.01, 0.9, 0.95))
    ascent = optax.scale(1.0)
    params = jnp.ones(3)
    tx = cautious(ascent)
    updates: Any = tx.update(params, tx.init(params), params)[0]
    assert not np.any(updates)


def test_masks_pass_extra_arguments_to_the_base_optimizer():
    tx = cautious(partial(optax.contrib.momo, 0.1))
    params = jnp.ones(3)
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.float32(1.0))
    assert jnp.all(jnp.isfinite(jnp.asarray(updates)))


ADAM = partial(optax.adam, 0.1)


@pytest.mark.parametrize("wrapper", [cautious, grams])
@pytest.mark.parametrize(
    ("base", "decay", "words"),
    [
        (optax.adam(0.1), 0.1, "finished optax transformation.*functools.partial"),
        (partial(optax.scale_by_adam), 0.1, "optax.scale_by_adam has no learning_rate"),
        (partial(optax.contrib.cocob), 0.1, None),
        (partial(optax.polyak_sgd), 0.1, "optax.polyak_sgd has no learning_rate"),
        (partial(optax.chain, ADAM, ADAM), 0.1, "args.0.learning_rate and args.1.learning_rate"),
        (partial(optax.adamw, 0.1), 0.1, "weight_decay is 0.0001. Set one of the two to 0"),
        (optax.adamw(0.1), 0.0, "finished optax transformation.*reads the parameters"),
        (partial(optax.lamb, 0.1, weight_decay=0.1), 0.0, "cannot be separated"),
        (partial(optax.chain, partial(optax.add_decayed_weights, 0.1), ADAM), 0.0, "be separated"),
    ],
)
def test_invalid_weight_decay_is_refused(wrapper, base, decay, words):
    params = {"w": jnp.ones(3)}

    def step():
        tx = wrapper(base, weight_decay=decay)
        return tx.update(params, tx.init(params), params)

    if words is None:
        step()
    else:
        with pytest.raises(ValueError, match=words):
            step()


# ---- All of them


FACTORIES = {
    "soap": partial(soap, precondition_frequency=2),
    "shampoo": partial(shampoo, every=2),
    "mars": mars,
    **{norm: partial(scion, norm=norm) for norm in ["spectral", "sign", "col_norm", "row_norm"]},
    "bias_rms": partial(scion, norm="bias_rms"),
    "laprop": lambda rate: chain(rate, [parts.laprop()], [parts.decay(0.1, peak=0.02)]),
    "prodigy": lambda rate: chain(rate, [parts.prodigy(bias_correction=True, estim_lr0=0.1)]),
    "uncorrected adam": lambda rate: chain(rate, [parts.adam(bias_correction=False)]),
    "psgd": lambda rate: chain(rate, [parts.psgd(0.1), parts.match_norm()]),
    "cautious": lambda rate: cautious(mars(rate)),
    "grams": lambda rate: grams(mars(rate)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FACTORIES)
def test_updates_keep_dtypes_and_take_scans_and_traced_rates(name, strict_promotion):
    start = {"a": jnp.ones((2, 3, 5), jnp.bfloat16), "b": jnp.ones((4, 4))}
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.ndim), (4, *p.shape), jnp.float32), start
    )

    def train(rate):
        tx = FACTORIES[name](rate)

        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (apply(carry[0], updates), state), None

        # scan refuses a carry whose avals change
        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    rates = jnp.asarray([0.01, 0.02])
    many = jax.jit(jax.vmap(train))(rates)
    scheduled: Any = jax.jit(lambda: train(lambda count: jnp.float32(0.02)))()
    assert many["a"].dtype == jnp.bfloat16 and many["b"].dtype == jnp.float32
    np.testing.assert_allclose(many["b"][1], scheduled["b"], rtol=2e-5)
    assert np.all(np.isfinite(scheduled["a"].astype(np.float32)))
    assert not np.array_equal(many["b"][0], many["b"][1])


@pytest.mark.parametrize("name", ["soap", "shampoo", "spectral", "row_norm"])
def test_matrix_optimizers_refuse_vectors(name):
    with pytest.raises(ValueError, match=r"the parameter 'blocks/bias' has shape \(3,\)"):
        FACTORIES[name](0.1).init({"blocks": {"bias": jnp.ones(3), "kernel": jnp.ones((3, 3))}})


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="norm must be one of spectral"):
        scion(0.1, norm="frobenius")
    with pytest.raises(ValueError, match="precondition_frequency must be at least 1, got 0"):
        soap(0.1, precondition_frequency=0)
    for name in ("every", "start"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            shampoo(0.1, **{name: 0})
    tx = cautious(partial(optax.sgd, 0.1), weight_decay=0.1)
    with pytest.raises(ValueError, match="needs parameters"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optim.scion import scion
from optim.shampoo import shampoo
from optim.soap import soap

factories = {
    "soap": soap(0.1, precondition_frequency=1),
    "shampoo": shampoo(0.1, every=2),
    "col_norm": scion(0.1, norm="col_norm"),
}
params = {"a": jax.random.normal(jax.random.key(0), (2, 4, 4)), "b": jnp.eye(4) + 0.1}
specs = {"a": P("x", None, "y"), "b": P("y", "x")}
grads = {k: jax.random.normal(jax.random.key(1), (4, *v.shape)) for k, v in params.items()}

def train(tx, params, grads):
    def step(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None
    return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]

out = {}
for name, tx in factories.items():
    expected = jax.jit(lambda p, g: train(tx, p, g))(params, grads)
    for kind in ("Auto", "Explicit"):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
        put = lambda tree, *lead: {
            k: jax.device_put(v, NamedSharding(mesh, P(*lead, *specs[k])))
            for k, v in tree.items()}
        with jax.set_mesh(mesh):
            got = jax.jit(lambda p, g: train(tx, p, g))(put(params), put(grads, None))
        out[name + kind] = max(
            float(abs(np.asarray(got[k]) - np.asarray(expected[k])).max()) for k in params)
print(json.dumps(out))
"""


@pytest.mark.long
def test_sharded_updates_equal_the_unsharded_ones():
    errors = runs.on_four_devices(SHARDED)
    assert len(errors) == 6 and all(error < 1e-4 for error in errors.values()), errors
