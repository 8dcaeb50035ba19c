"""Rounding must not steer SOAP where its Gram matrices have null spaces.

Two runs, of which one begins with a gradient that differs in its last bits, must stay together, and
so must a sharded run and an unsharded one. A basis of the null space that rounding chose made them
part by 13 to 120% of the way that they went.
"""

import os
import textwrap
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim.soap import soap
from tests import runs, short

STEPS = 20


def gradients(kind, shape):
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((STEPS, *shape))
    *batch, rows, columns = shape
    if kind.startswith("rank 2"):
        left = rng.standard_normal((STEPS, *batch, rows, 2))
        left = left[:1] if kind == "rank 2, always the same columns" else left
        grads = left @ rng.standard_normal((STEPS, *batch, 2, columns))
    if kind == "rows of zeros":  # as of an embedding
        grads *= rng.random((STEPS, *batch, rows, 1)) < 0.3
        grads[..., -2:, :] = 0
    if kind == "columns that sum to zero":  # as of the inputs of a softmax
        grads -= grads.mean(axis=-1, keepdims=True)
    if kind == "zero at first":
        grads[:3] = 0
    return grads.astype(np.float32)


@cache
def trainer(every):
    tx = soap(0.01, precondition_frequency=every)

    @jax.jit
    def train(start, grads):
        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    return train


def parted(kind, shape, every):
    """Trains twice; returns the distance between the ends, and that from the start to an end."""
    grads = gradients(kind, shape)
    noise = np.random.default_rng(1).choice([-4e-7, 4e-7], shape)
    other = grads.copy()
    other[0] = other[0] * (1 + noise)
    start = jnp.zeros(shape)
    ends = [np.asarray(trainer(every)(start, x), np.float64) for x in (grads, other)]
    return np.linalg.norm(ends[0] - ends[1]), np.linalg.norm(ends[0])


@short.parametrize(
    ("kind", "shape", "every"),
    [
        ("full rank", (16, 24), 3),
        ("full rank", (16, 24), 10),
        ("full rank", (64, 256), 3),
        ("full rank", (2, 24, 16), 3),
        ("full rank", (16, 16), 3),
        ("rank 2", (16, 24), 3),
        ("rank 2, always the same columns", (16, 24), 3),
        ("rows of zeros", (16, 24), 3),
        ("rows of zeros", (16, 16), 3),
        ("columns that sum to zero", (24, 10), 3),
        ("columns that sum to zero", (24, 10), 10),
    ],
)
def test_rounding_errors_in_a_gradient_are_not_magnified(kind, shape, every):
    distance, way = parted(kind, shape, every)
    assert way > 0.1
    # Nearly equal eigenvalues among 256, and single elements near the limit of rounding, cost some.
    assert distance < 0.02 * way


@pytest.mark.long
def test_zero_gradients_leave_parameters_unchanged():
    zeros = np.zeros((STEPS, 4, 7), np.float32)
    np.testing.assert_array_equal(trainer(3)(jnp.ones((4, 7)), zeros), np.ones((4, 7)))
    distance, way = parted("zero at first", (16, 24), 3)
    assert distance == 0 and np.isfinite(way) and way > 0.1


def test_untouched_rows_do_not_move():
    grads = gradients("full rank", (16, 24))
    grads[:, [0, 3, 15]] = 0
    grads[:10, 7] = 0  # touched later
    end = np.asarray(trainer(3)(jnp.zeros((16, 24)), grads))
    assert np.abs(end[[0, 3, 15]]).max() < 1e-7
    assert np.abs(end[7]).max() > 1e-3


@pytest.mark.long
def test_updates_do_not_depend_on_the_signs_of_the_bases():
    # LAPACK, cuSOLVER and two releases of either differ in the signs of eigenvectors.
    grads = gradients("full rank", (8, 12))
    tx, params = soap(0.01, precondition_frequency=3), jnp.zeros((8, 12))
    _, state = tx.update(grads[0], tx.init(params), params)
    flip = jnp.asarray([1.0, -1.0] * 4)
    flipped = state._replace(
        direction=state.direction._replace(left_basis=state.direction.left_basis * flip)
    )
    update, ends = jax.jit(tx.update), []
    for now in (state, flipped):
        end = params
        for g in grads[1:]:
            updates, now = update(g, now, end)
            end = optax.apply_updates(end, updates)
        ends.append(np.asarray(end))
    assert np.abs(ends[0]).max() > 0.01
    np.testing.assert_allclose(*ends, atol=1e-5)


SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.optim.test_soap_rounding import gradients, trainer

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
out = {}
for kind, shape in [
    ("full rank", (16, 24)), ("full rank", (64, 256)), ("rank 2", (16, 24)),
]:
    start, grads = jnp.zeros(shape), gradients(kind, shape)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    alone = np.asarray(trainer(10)(start, grads))
    spread = np.asarray(trainer(10)(put(start, "data"), put(grads, None, "data")))
    out[f"{kind} {shape}"] = float(np.linalg.norm(spread - alone) / np.linalg.norm(alone))
print(json.dumps(out))
"""


@pytest.mark.long
def test_a_run_sharded_by_fsdp_takes_the_same_path():
    parts = runs.on_four_devices(SHARDED)
    assert len(parts) == 3 and all(part < 0.01 for part in parts.values()), parts


TWO_CORES = textwrap.dedent(
    """
    import os
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    import jax
    import optim

    key = jax.random.key(0)
    shapes = {"qkv": (4, 3, 64, 64), "up": (4, 64, 96), "down": (4, 96, 64)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    optimizer = optim.soap(1e-3)
    update = jax.jit(optimizer.update)
    for _ in range(10):
        jax.block_until_ready(update(params, optimizer.init(params), params))
    """
)


VMAPPED = textwrap.dedent(
    """
    import os
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    import jax
    import numpy as np
    from optim.matrices import eigh, qr

    trials = np.random.default_rng(0).normal(size=(16, 4, 256, 256)).astype(np.float32)
    trials += trials.swapaxes(-1, -2)
    for decompose in (qr, eigh):
        found = jax.jit(jax.vmap(lambda matrices: [decompose(x) for x in matrices]))(trials)
        for number, (first, second) in enumerate(jax.device_get(found)):
            if decompose is qr:
                product = first @ second
            else:
                product = (second * first[:, None]) @ second.swapaxes(-1, -2)
            np.testing.assert_allclose(product, trials[:, number], atol=1e-3)
    """
)


@pytest.mark.long
@pytest.mark.parametrize("code", [TWO_CORES, VMAPPED], ids=["stacked layers", "vmap"])
def test_batches_of_several_shapes_do_not_wait_for_each_other(code):
    # jaxlib distributes a batched eigh to the threads that compute the program; on two cores, two
    # of them waited for each other in each of three attempts; so did those of 16 trials under vmap.
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("The number of cores of a process cannot be set on this system.")
    runs.python("-c", code, OPENBLAS_NUM_THREADS="1")
