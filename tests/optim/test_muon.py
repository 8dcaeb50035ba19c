"""Muon against closed forms in NumPy, optax.contrib.muon and itself under every sharding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim import newton_schulz
from optim.muon import muon
from optim.newton_schulz import polynomials
from tests import runs, short
from tests.programs import keller_jordan

SHAPES = [(6, 6), (4, 12), (12, 4), (3, 5, 9), (2, 3, 8, 5), (1, 7)]


def composed(values, triples):
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


def by_svd(x, triples):
    """The definition: polynomials applied to the singular values of the normalised matrix."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt(np.sum(s**2, -1, keepdims=True))
    return (u * composed(s, triples)[..., None, :]) @ v


def orthogonalize(x, triples):
    return jax.jit(lambda x: newton_schulz.orthogonalize(x, triples))(x)


def apply(params, updates) -> Any:
    return optax.apply_updates(params, updates)


def matrices(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("coefficients", ["jordan", "polar_express", (2.0, -1.5, 0.5)])
@short.parametrize("shape", SHAPES)
def test_orthogonalize_is_a_polynomial_of_singular_values(shape, coefficients):
    triples = polynomials(coefficients, 5)
    x = 1e-3 * matrices(shape)
    with jax.enable_x64(True):
        got = orthogonalize(jnp.asarray(x), triples)
        assert got.dtype == jnp.float64 and got.shape == shape
        np.testing.assert_allclose(got, by_svd(x, triples), rtol=0, atol=1e-10)
    got32 = orthogonalize(jnp.asarray(x, jnp.float32), triples)
    assert got32.dtype == jnp.float32
    np.testing.assert_allclose(got32, by_svd(x, triples), rtol=0, atol=1e-4)


def test_triples_for_each_step_may_be_lists_as_a_config_has_them():
    several = [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]
    assert polynomials(several, 3) == [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0)]
    assert polynomials(tuple(map(tuple, several)), 1) == [(2.0, -1.5, 0.5)]


@pytest.mark.parametrize(
    "coefficients, low, high", [("jordan", 0.68, 1.21), ("polar_express", 0.86, 1.14)]
)
def test_singular_values_end_near_one(coefficients, low, high):
    # Every singular value at least a hundredth of the norm lands in the interval.
    s = np.geomspace(0.01, 0.9, 8)
    s[-1] = np.sqrt(1 - np.sum(s[:-1] ** 2))
    u, _ = np.linalg.qr(matrices((8, 8)))
    v, _ = np.linalg.qr(matrices((24, 8), seed=1))
    out = orthogonalize(jnp.asarray((u * s) @ v.T, jnp.float32), polynomials(coefficients, 5))
    values = np.linalg.svd(np.asarray(out), compute_uv=False)
    assert low < values.min() and values.max() < high


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
@short.parametrize("steps", [5, 12])
def test_float32_holds_for_ill_conditioned_matrices(shape, steps):
    # Rank 3 of 16 and singular values over 12 orders: the Gram form squares the condition.
    rows, columns = shape
    low_rank = matrices((rows, 3)) @ matrices((3, columns), seed=1)
    s = np.geomspace(1.0, 1e-12, 16)
    u, _ = np.linalg.qr(matrices((rows, 16)))
    v, _ = np.linalg.qr(matrices((columns, 16), seed=1))
    steep = (u * s) @ v.T
    for coefficients in ["jordan", "polar_express"]:
        triples = polynomials(coefficients, steps)
        for x in (low_rank, steep):
            out = np.asarray(orthogonalize(jnp.asarray(x, jnp.float32), triples))
            values = np.linalg.svd(out, compute_uv=False)
            assert values.max() < 1.25
            # What float32 resolves comes out right; the rest is rounding of the input itself.
            if steps == 5:
                np.testing.assert_allclose(out, by_svd(x, triples), rtol=0, atol=3e-3)


def polar_express_as_printed(g, steps):
    """Implementation 1 of arXiv:2505.16932, in NumPy and float64."""
    table = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ]
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in table[:-1]] + table[-1:]
    x = g / (np.linalg.norm(g) * 1.01 + 1e-7)
    for i in range(steps):
        a, b, c = safe[min(i, len(safe) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_polar_express_agrees_with_the_program_printed_in_its_paper(steps):
    g = matrices((6, 9))
    with jax.enable_x64(True):
        got = orthogonalize(jnp.asarray(g), polynomials("polar_express", steps))
    np.testing.assert_allclose(got, polar_express_as_printed(g, steps), rtol=0, atol=1e-6)


def test_orthogonalize_ignores_the_scale_and_keeps_zero():
    triples = polynomials("jordan", 5)
    x = jnp.asarray(matrices((4, 12)), jnp.float32)
    unit = orthogonalize(x, triples)
    for factor in (1e-6, 1e30):
        np.testing.assert_allclose(orthogonalize(factor * x, triples), unit, rtol=0, atol=1e-5)
    assert not np.any(orthogonalize(0 * x, triples))
    assert np.abs(orthogonalize(1e-12 * x, triples)).max() < 0.05  # below eps it fades
    assert np.all(np.isnan(orthogonalize(x.at[0, 0].set(jnp.nan), triples)))


def test_orthogonalize_in_bfloat16_keeps_singular_values_near_one():
    x = jnp.asarray(matrices((4, 12)), jnp.bfloat16)
    out = orthogonalize(x, polynomials("jordan", 5))
    assert out.dtype == jnp.bfloat16
    values = np.linalg.svd(np.asarray(out, np.float32), compute_uv=False)
    assert 0.6 < values.min() and values.max() < 1.3


def plain_in(dtype, x, triples):
    """The steps as Keller Jordan's program computes them, with every product rounded to `dtype`."""
    x = jnp.asarray(x / np.linalg.norm(x), dtype)
    for triple in triples:
        a, b, c = (jnp.asarray(value, dtype) for value in triple)
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("columns", [64, 96, 128])
@pytest.mark.parametrize(
    "coefficients, steps", [("jordan", 5), ("polar_express", 5), ("polar_express", 8)]
)
def test_the_gram_form_in_16_bits_is_as_exact_as_the_plain_one(coefficients, steps, columns, dtype):
    rows, triples = 32, polynomials(coefficients, steps)
    u, _ = np.linalg.qr(matrices((rows, rows)))
    v, _ = np.linalg.qr(matrices((columns, rows), seed=1))
    spectra = {
        "uniform": np.linspace(1, 0.03, rows),
        "1 / rank": 1 / np.arange(1, rows + 1),
        "four decades": np.geomspace(1, 1e-4, rows),
        "rank 4": np.r_[np.ones(4), np.zeros(rows - 4)],
        "one large": np.r_[1, np.full(rows - 1, 0.01)],
    }
    in_16_bits = jax.jit(lambda x: newton_schulz.orthogonalize(x, triples, dtype=dtype))
    for name, s in spectra.items():
        x = (u * s) @ v.T
        exact = by_svd(x, triples)
        got = in_16_bits(jnp.asarray(x, jnp.float32))
        error, plain = (
            np.linalg.norm(np.asarray(result, np.float64) - exact)
            for result in (got, plain_in(dtype, x, triples))
        )
        # Orders of rounding differ by a tenth; with three steps of a Gram matrix it is twice that.
        assert error < 1.2 * plain, (name, error, plain)
        assert np.linalg.norm(got, 2) < 1.25, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(32, 32), (32, 48), (32, 64), (128, 32)])
def test_the_operations_are_those_that_flops_counts(shape, dtype):
    triples = polynomials("jordan", 5)
    made = jax.jit(lambda x: newton_schulz.orthogonalize(x, triples, dtype=dtype))
    analysis: Any = made.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).cost_analysis()
    counted = newton_schulz.flops(min(shape), max(shape), 5, jnp.dtype(dtype).itemsize)
    # Besides the products, which `flops` counts, there are sums of matrices.
    assert counted <= analysis["flops"] < 1.2 * counted
    plain = 5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
    assert (counted < plain) == (max(shape) > 1.5 * min(shape))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("size", [2e38, 1.0, 1e-5])
def test_the_update_does_not_depend_on_the_size_of_the_gradient(size, dtype):
    # By singular values: U p(S / |S|) V^T, as long as the norm is far above eps.
    g = matrices((4, 6))
    g = g / np.abs(g).max() * size
    tx = muon(1.0, momentum=0.0, ns_dtype=dtype, scale="none")
    params = jnp.zeros(g.shape)
    update: Any = tx.update(jnp.asarray(g, jnp.float32), tx.init(params), params)[0]
    wanted = -by_svd(g, polynomials("jordan", 5))
    error = {"bfloat16": 0.1, "float16": 0.02}.get(str(dtype), 2e-3 if size < 1 else 1e-5)
    np.testing.assert_allclose(update, wanted, atol=error)


def test_eps_is_the_smallest_norm_that_divides():
    g = matrices((4, 6)) * 1e-9
    got = newton_schulz.orthogonalize(jnp.asarray(g, jnp.float32), polynomials("jordan", 1), 1e-6)
    a, b, c = polynomials("jordan", 1)[0]
    u, s, v = np.linalg.svd(g / 1e-6, full_matrices=False)
    np.testing.assert_allclose(got, (u * (a * s + b * s**3 + c * s**5)) @ v, rtol=1e-4)
    tiny = jnp.full((2, 2), 1e-44, jnp.float32)
    assert np.isfinite(newton_schulz.orthogonalize(tiny, polynomials("jordan", 5))).all()


def reference(grads, start, *, rate, momentum, nesterov, decay, factor, triples):
    """Muon in NumPy, from its definition."""
    w, m = start.copy(), np.zeros_like(start)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        d = (1 - momentum) * g + momentum * m if nesterov else m
        w = w - rate * (factor * by_svd(d, triples) + decay * w)
    return w


def run(tx, grads, start):
    params = {"w": jnp.asarray(start)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update({"w": jnp.asarray(g)}, state, params)
        params = apply(params, updates)
    return np.asarray(params["w"])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "scale, factor", [("original", np.sqrt(9 / 4)), ("match_rms_adamw", 0.6), ("none", 1.0)]
)
def test_a_trajectory_in_float64_agrees_with_the_reference(nesterov, scale, factor):
    grads, start = matrices((20, 3, 4, 9)), matrices((3, 4, 9), seed=1)
    with jax.enable_x64(True):
        tx = muon(0.02, 0.9, nesterov=nesterov, weight_decay=0.1, scale=scale)
        got = run(tx, grads, start)
    expected = reference(
        grads,
        start,
        rate=0.02,
        momentum=0.9,
        nesterov=nesterov,
        decay=0.1,
        factor=factor,
        triples=polynomials("jordan", 5),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-9)


@short.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_muon_agrees_with_optax(shape):
    # Without Nesterov: optax corrects the momentum's bias, which orthogonalization does not see.
    grads, start = matrices((20, *shape)), matrices(shape, seed=1)
    for ours, theirs in [
        ({"scale": "original"}, {}),
        ({"scale": "match_rms_adamw"}, {"consistent_rms": 0.2}),
        (
            {"ns_coefficients": "polar_express"},
            {"ns_coeffs": tuple(polynomials("polar_express", 5))},
        ),
    ]:
        with jax.enable_x64(True):
            got = run(muon(0.02, 0.9, nesterov=False, weight_decay=0.1, **ours), grads, start)
            tx = optax.contrib.muon(
                0.02, beta=0.9, nesterov=False, weight_decay=0.1, eps=1e-15, **theirs
            )
            expected = run(tx, grads, start)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_stacked_layers_move_like_single_ones():
    grads, start = matrices((5, 3, 4, 9)), matrices((3, 4, 9), seed=1)
    stacked = run(muon(0.02), grads.astype(np.float32), start.astype(np.float32))
    for layer in range(3):
        one = run(muon(0.02), grads[:, layer].astype(np.float32), start[layer].astype(np.float32))
        np.testing.assert_allclose(stacked[layer], one, atol=1e-6)


@pytest.mark.long
def test_updates_keep_dtypes_and_shapes():
    params = {
        "a": jnp.ones((4, 9), jnp.bfloat16),
        "b": jnp.ones((9, 4)),
        "c": jnp.ones((4, 4), jnp.float16),
    }
    for momentum_dtype in (None, "bfloat16"):
        tx = muon(0.02, momentum_dtype=momentum_dtype, weight_decay=0.1)
        state = tx.init(params)
        expected = jnp.dtype(momentum_dtype or "float32")
        assert all(m.dtype == expected for m in jax.tree.leaves(state))
        for grad_dtype in (jnp.float32, jnp.bfloat16):
            grads = jax.tree.map(lambda p, d=grad_dtype: p.astype(d), params)
            updates, new = jax.jit(tx.update)(grads, state, params)
            assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
            assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
    low = muon(0.02, ns_dtype="bfloat16")
    updates, _ = jax.jit(low.update)(params, low.init(params), params)
    exact, _ = jax.jit(muon(0.02).update)(params, muon(0.02).init(params), params)
    np.testing.assert_allclose(updates["b"], exact["b"], rtol=0.05)
    assert np.any(updates["b"] != exact["b"])


def test_hyperparameters_may_be_traced_scheduled_scanned_and_mapped(strict_promotion):
    grads, start = matrices((6, 4, 9)).astype(np.float32), jnp.ones((4, 9))

    def train(rate, momentum, decay, eps):
        tx = muon(rate, momentum, weight_decay=decay, eps=eps)

        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (apply(carry[0], updates), state), None

        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    rates = jnp.asarray([0.01, 0.02])
    one_by_one = [train(float(r), 0.9, 0.1, 1e-7) for r in rates]
    traced = jax.vmap(lambda r: train(r, jnp.float32(0.9), jnp.float32(0.1), jnp.float32(1e-7)))
    np.testing.assert_allclose(traced(rates), np.stack(one_by_one), atol=1e-6)
    scheduled = train(lambda count: jnp.where(count < 9, 0.01, 1.0), 0.9, lambda c: 0.1, 1e-7)
    np.testing.assert_allclose(scheduled, one_by_one[0], atol=1e-6)


@pytest.mark.long
def test_schedules_advance_without_an_outer_step():
    start, g = jnp.zeros((4, 9)), jnp.asarray(matrices((4, 9)), jnp.float32)
    tx = muon(lambda count: 0.1 * (count + 1), momentum=0.0)
    state, norms = tx.init(start), []
    for _ in range(3):
        updates, state = tx.update(g, state)
        norms.append(float(jnp.linalg.norm(updates)))
    np.testing.assert_allclose(np.array(norms) / norms[0], [1, 2, 3], rtol=1e-5)


def test_invalid_arguments_are_refused():
    matrix = jnp.ones((3, 3))
    bad = {"blocks": {"kernel": matrix, "bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"'blocks/bias' has shape \(3,\).*another group"):
        muon(0.1).init(bad)
    with pytest.raises(ValueError, match="'w' has dtype complex64"):
        muon(0.1).init({"w": matrix.astype(jnp.complex64)})
    for wrong in ({"ns_dtype": "int32"}, {"momentum_dtype": "int8"}):
        with pytest.raises(ValueError, match="must be None or one of bfloat16"):
            muon(0.1, **wrong)
    with pytest.raises(ValueError, match="triple"):
        muon(0.1, ns_coefficients=[])
    with pytest.raises(ValueError, match="scale must be one of original, .* got 'rms'"):
        muon(0.1, scale="rms")
    with pytest.raises(ValueError, match="ns_coefficients must be one of jordan, .* got 'jordon'"):
        muon(0.1, ns_coefficients="jordon")
    with pytest.raises(ValueError, match="triple"):
        muon(0.1, ns_coefficients=(1.0, 2.0))
    with pytest.raises(ValueError, match="ns_steps must be an integer, at least 1, got 0"):
        muon(0.1, ns_steps=0)
    tx = muon(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="needs parameters"):
        tx.update(matrix, tx.init(matrix))


SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optim.muon import muon

heads = {"d": "in heads head_dim -> in (heads head_dim)"}
tx = muon(0.1, weight_decay=0.1, matrices=heads)
plain = muon(0.1, weight_decay=0.1)
shapes = {"a": (4, 8, 16), "b": (16, 8), "c": (8, 8), "d": (8, 2, 4)}
keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 4)))
params = {k: jax.random.normal(keys[k], s) for k, s in shapes.items()}
grads = [jax.tree.map(lambda x, i=i: jnp.sin(x * (i + 2)), params) for i in range(2)]

def train(params, grads):
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state

expected, _ = jax.jit(train)(params, grads)
error = lambda got: max(
    float(abs(np.asarray(got[k]) - np.asarray(expected[k])).max()) for k in shapes)
layouts = {
    "columns": {"a": P(None, None, "x"), "b": P(None, "x"), "c": P("x", None),
                "d": P(None, "x", None)},
    "both": {"a": P(None, "x", "y"), "b": P(("x", "y")), "c": P("y", "x"),
             "d": P("x", None, "y")},
    "layers": {"a": P("x", None, None), "b": P(), "c": P(), "d": P("x", "y", None)},
    "mixed": {"a": P("x", None, "y"), "b": P("x", "y"), "c": P(), "d": P(None, "y", "x")},
}
out = {}
for kind in ("Auto", "Explicit"):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
    for name, specs in layouts.items():
        if (kind, name) in [("Auto", "columns"), ("Auto", "mixed")]:
            continue
        put = lambda tree: {
            k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
        with jax.set_mesh(mesh):
            got, state = jax.jit(train)(put(params), [put(g) for g in grads])
        out[f"{kind} {name}"] = error(got)
        kept = all(
            got[k].sharding.is_equivalent_to(NamedSharding(mesh, specs[k]), got[k].ndim)
            and state.direction.momentum[k].sharding.is_equivalent_to(
                got[k].sharding, got[k].ndim)
            for k in shapes)
        if kind == "Explicit" and not kept:
            out[f"{kind} {name} keeps its sharding"] = 1.0

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
for check in (True, False):
    mapped = jax.shard_map(
        lambda p, g: train(p, g)[0], mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check)
    out[f"shard_map replicated {check}"] = error(jax.jit(mapped)(params, grads))

def data_parallel(params, batch):
    # Gradients of replicated parameters arrive summed over the mesh.
    loss = lambda p: jnp.sum((batch @ p) ** 2)
    return optax.apply_updates(params, plain.update(
        jax.grad(loss)(params), plain.init(params), params)[0])
batch = jax.random.normal(jax.random.key(5), (8, 16))
mapped = jax.shard_map(data_parallel, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
out["shard_map gradients"] = float(abs(
    jax.jit(mapped)(params["b"], batch) - data_parallel(params["b"], batch)).max())

try:
    jax.jit(jax.shard_map(
        lambda p, g: train(p, g)[0], mesh=mesh, in_specs=P("x"), out_specs=P("x"),
    ))(params, grads)
    out["shard_map sharded is refused"] = 1.0
except ValueError as problem:
    out["refusal"] = str(problem)
print(json.dumps(out))
"""


@pytest.mark.long
def test_sharded_updates_equal_the_unsharded_ones():
    out = runs.on_four_devices(SHARDED)
    refusal = out.pop("refusal", "")
    assert "optim.muon" in refusal and "mesh axis x" in refusal
    assert len(out) == 9
    assert all(error < 3e-5 for error in out.values()), out


@pytest.mark.parametrize("size", [1e-9, 1e-7, 1.0])
def test_eps_may_be_added_to_the_norm_as_in_keller_jordans_program(size):
    # His matrices are [out, in], and he adds 1e-7.
    grads = [size * np.random.default_rng(step).normal(size=(6, 4)) for step in range(3)]
    differences = {}
    with jax.enable_x64(True):
        for add_eps in (True, False):
            tx, params = muon(0.02, add_eps=add_eps), jnp.zeros((4, 6))
            state, found = tx.init(params), []
            for grad, wanted in zip(grads, keller_jordan(grads), strict=True):
                update, state = tx.update(jnp.asarray(grad.T), state, params)
                found.append(np.abs(np.asarray(update).T - wanted).max())
            differences[add_eps] = max(found)
    assert differences[True] < 1e-12
    assert differences[False] > {1e-9: 1e-5, 1e-7: 1e-4, 1.0: 1e-11}[size]
