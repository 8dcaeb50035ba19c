"""States stored in bfloat16, against closed forms in NumPy, and the rules that name them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim.groups import GroupError

PARAMS = {"a": {"kernel": jnp.linspace(-1.0, 1.0, 48).reshape(8, 6)}, "b": jnp.ones(5)}


def grads_at(step: int) -> Any:
    keys = jax.random.split(jax.random.key(step))
    return {"a": {"kernel": jax.random.normal(keys[0], (8, 6))}, "b": jax.random.normal(keys[1], 5)}


def made(recipe: Any, **options: Any) -> optim.Optimizer:
    return optim.optimizer({"all": optim.group(".*", recipe)}, **options)


def adam(**options: Any) -> optim.Optimizer:
    return made(partial(optax.adamw, learning_rate=0.01, weight_decay=0.1), **options)


def run(optimizer: optim.Optimizer, steps: int, key: Any = None) -> Any:
    update = jax.jit(partial(optimizer.update, key=key))
    params, state = PARAMS, optimizer.init(PARAMS)
    for step in range(steps):
        params, state = update(grads_at(step), state, params)
    return params, state


def equal(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_adamw_with_its_momentum_in_bfloat16_is_the_closed_form_with_one_rounding_a_step():
    params, state = run(adam(states={"mu": "bfloat16", "all/nu": "float32"}), 10)
    adam_state = state.groups["all"][0]
    assert {x.dtype.name for x in adam_state.mu.values()} == {"bfloat16"}
    assert {x.dtype.name for x in adam_state.nu.values()} == {"float32"}
    f = np.float32
    w, m, v = np.asarray(PARAMS["b"], f), np.zeros(5, f), np.zeros(5, f)
    for step in range(10):
        g = np.asarray(grads_at(step)["b"], f)
        m = f(0.9) * m + f(0.1) * g
        v = f(0.999) * v + f(0.001) * g * g
        move = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        w = (w - 0.01 * (move + 0.1 * w)).astype(f)
        m = m.astype(jnp.bfloat16).astype(f)
    np.testing.assert_allclose(params["b"], w, rtol=1e-5)
    np.testing.assert_allclose(adam_state.mu["b"].astype(f), m, rtol=2**-8)
    np.testing.assert_allclose(adam_state.nu["b"], v, rtol=1e-5)
    # In float32 it goes elsewhere.
    assert np.abs(np.asarray(run(adam(), 10)[0]["b"]) - w).max() > 1e-5


def test_the_name_of_a_group_may_have_a_slash():
    recipe = partial(optax.adamw, learning_rate=0.01)
    for pattern in ("mu", "a/b/mu"):
        groups = {"a/b": optim.group(".*", recipe)}
        state = optim.optimizer(groups, states={pattern: "bfloat16"}).init(PARAMS)
        assert {x.dtype.name for x in state.groups["a/b"][0].mu.values()} == {"bfloat16"}


@pytest.mark.long
def test_muon_with_its_momentum_in_bfloat16_is_that_of_its_own_argument():
    params = {"kernel": PARAMS["a"]["kernel"]}
    muon = partial(optim.muon, learning_rate=0.1)
    found = []
    for optimizer in (
        made(muon, states={"all/momentum": "bfloat16"}),
        made(partial(muon, momentum_dtype="bfloat16")),
    ):
        own, state = params, optimizer.init(params)
        for step in range(5):
            own, state = jax.jit(optimizer.update)(grads_at(step)["a"], state, own)
        [momentum] = jax.tree.leaves(state.groups)
        assert momentum.dtype == jnp.bfloat16
        found.append(own["kernel"])
    np.testing.assert_allclose(*found, rtol=1e-2, atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [optim.soap, optim.shampoo, optax.lion, optim.scion])
def test_all_arrays_of_a_state_may_be_narrow_and_the_steps_stay_close(recipe: Any):
    params = {"kernel": PARAMS["a"]["kernel"]}
    ends = []
    for states in (None, {".*": "bfloat16"}):
        optimizer = made(partial(recipe, learning_rate=0.01), states=states)
        state = optimizer.init(params)
        own, new = jax.jit(optimizer.update)(grads_at(0)["a"], state, params)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
        if states:
            leaves = jax.tree.leaves((state.groups, new.groups))
            assert {x.dtype.name for x in leaves} == {"bfloat16"}
        ends.append(own["kernel"])
    # The first step reads a state of zeros or of identities, which are exact in bfloat16.
    np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_an_average_of_squares_falls_only_if_it_is_rounded_at_random():
    params = {"w": jnp.zeros(4096)}
    grads = {"w": jnp.ones(4096)}
    ends = {}
    for stored in ("bfloat16", "bfloat16 stochastic"):
        optimizer = made(partial(optax.adam, 0.0), states={"nu": stored})
        _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        zeros = jax.tree.map(jnp.zeros_like, grads)

        def step(_: int, state: Any, optimizer: Any = optimizer, zeros: Any = zeros) -> Any:
            return optimizer.update(zeros, state, params)[1]

        state = jax.jit(lambda state, step=step: jax.lax.fori_loop(0, 500, step, state))(state)
        ends[stored] = np.asarray(state.groups["all"][0].nu["w"], np.float64)
    np.testing.assert_array_equal(ends["bfloat16"], np.float64(jnp.bfloat16(0.001)))
    # 0.001 * 0.999**500 = 6.06e-4; the mean of 4096 has a deviation of 0.2%.
    np.testing.assert_allclose(ends["bfloat16 stochastic"].mean(), 0.001 * 0.999**500, rtol=0.01)


@pytest.mark.long
def test_the_noise_follows_from_key_and_step_so_that_a_resumed_run_has_the_same_bits():
    optimizer = adam(states={".*": "bfloat16 stochastic"})
    key = jax.random.key(3)
    whole = run(optimizer, 6, key)
    params, state = jax.device_get(run(optimizer, 3, key))
    for step in range(3, 6):
        params, state = jax.jit(optimizer.update)(grads_at(step), state, params, key=key)
    equal((params, state), whole)
    others = run(optimizer, 6, jax.random.key(4))[1].groups["all"][0].nu
    assert any((others[path] != x).any() for path, x in whole[1].groups["all"][0].nu.items())


def test_the_transformation_for_optax_has_the_same_states():
    optimizer = adam(states={"mu": "bfloat16"})
    params, state = PARAMS, optimizer.tx.init(PARAMS)
    for step in range(3):
        updates, state = optimizer.tx.update(grads_at(step), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, run(optimizer, 3)[0])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"mux": "bfloat16"}, "'mux' matches no array of a state. Did you mean 'mu'? The arrays"),
        ({"mu": "bfloat16", "all/mu": "float32"}, "earlier patterns match everything that 'all/mu"),
        ({"(": "bfloat16"}, "is not a regular expression"),
        ({"mu": "bf16"}, "Did you mean 'bfloat16'"),
        ({"nu": "float16"}, "squares of gradients below it would be 0. There is: 'float32', 'bf"),
        ("bfloat16", "states maps names of arrays to dtypes"),
    ],
)
def test_wrong_rules_are_refused(states: Any, message: str):
    with pytest.raises(ValueError, match="^In states|^states") as error:
        adam(states=states).init(PARAMS)
    assert message in str(error.value)


@pytest.mark.parametrize("recipe", [optax.contrib.schedule_free_adamw, optax.lbfgs])
def test_copies_of_parameters_stay_in_float32(recipe: Any):
    with pytest.raises(GroupError, match="copies of the parameters"):
        made(partial(recipe, learning_rate=0.1), states={".*": "bfloat16"}).init(PARAMS)
