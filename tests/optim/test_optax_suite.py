"""optax's own tools on the state of `Optimizer.tx`, and a part of optax's own tests.

The rest of optax's tests take minutes: `python -m tests.optax_suite`.
"""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from tests import optax_suite
from tests.laws_harness import with_floats
from tests.laws_table import ROWS, tree_of

SGD = partial(optax.sgd, 0.1)


def whole(recipe: Any, **options: Any) -> optim.Optimizer:
    return optim.optimizer({"all": optim.group(".*", recipe)}, **options)


def quietly(function: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
        return function(*args)


def mapped(tx: Any, params: Any) -> list[Any]:
    """Lists what `optax.tree.map_params` finds: the shapes of all copies of the parameters."""
    state = jax.eval_shape(tx.init, params)
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append((x.shape, x.dtype))
        return x

    after = optax.tree.map_params(tx, note, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_map_params_finds_the_same_leaves_as_under_bare_optax(row):
    params = tree_of(row, "float32")["own"]
    try:
        bare: Any = quietly(with_floats, row.recipe, lambda name, x: x, True)
        tx = bare.gradient_transformation() if isinstance(bare, optax.MultiSteps) else bare
        wanted = quietly(mapped, tx, params)
    except (IndexError, ValueError) as error:
        pytest.skip(f"optax cannot do it: {error}")
    if row.recipe.func is optax.lookahead:  # here its state holds the slow parameters
        wanted += [(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    ours = quietly(mapped, whole(row.recipe).tx, params)
    assert sorted(map(str, ours)) == sorted(map(str, wanted))


def test_map_params_takes_trees_beside_the_parameters():
    params = {"a": {"kernel": jnp.ones((3, 2))}, "b": jnp.ones(2), "s": jnp.ones(())}
    specs = {"a": {"kernel": "rows"}, "b": "none", "s": "scalar"}
    tx = whole(partial(optax.adam, 0.1)).tx
    state = tx.init(params)
    found: Any = optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: None
    )
    adam = found.groups["all"][0]
    assert (adam.count, adam.mu, adam.nu, found.step) == (None, specs, specs, None)
    assert optax.tree.get(state, "count") == 0
    jax.tree.map(np.testing.assert_array_equal, optax.tree.get(state, "mu")["b"], jnp.zeros(2))


@pytest.mark.long
def test_map_params_over_groups_leaves_masked_nodes_for_others():
    shapes = {"k": (3, 2), "b": (2,), "f": (1,)}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    groups = {
        "k": optim.group("k", partial(optim.muon, 0.1)),
        "f": optim.group("f", optim.frozen()),
        "rest": optim.group(".*", partial(optax.adam, 0.1)),
    }
    optimizer = optim.optimizer(groups, low_precision="master")
    tx, specs = optimizer.tx, {"k": "k", "b": "b", "f": "f"}
    state, plain = tx.init(params), optimizer.init(params)
    found: Any = optax.tree.map_params(
        tx,
        lambda x, spec: x if isinstance(x, optax.MaskedNode) else spec,
        state,
        specs,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    masked = optax.MaskedNode()
    assert found.groups["rest"][0].mu == {"k": masked, "b": "b", "f": masked}
    assert found.groups["k"].direction.momentum == {"k": "k", "b": masked, "f": masked}
    assert found.master == {"k": "k", "b": "b", "f": masked}
    for _ in range(3):
        updates, state = jax.jit(tx.update)(params, state, params)
        after, plain = optimizer.update(params, plain, params)
        stepped: Any = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(stepped["f"], after["f"])
        params = after
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    jax.tree.map(np.testing.assert_array_equal, state.master["k"], plain.master["k"])
    assert state.step == optimizer.position(plain) == 3


def test_optaxs_schedule_free_evaluation_reads_the_state_of_an_optimizer():
    params: Any = {"w": jnp.asarray([1.0, -2.0]), "b": {"x": jnp.ones(3)}}
    recipe = partial(optax.contrib.schedule_free_adamw, 0.1)
    optimizer, alone = whole(recipe), recipe()
    tx, inner, w = optimizer.tx, alone.init(params), params
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        updates, inner = alone.update(w, inner, w)
        w: Any = optax.apply_updates(w, updates)
    wanted = optax.contrib.schedule_free_eval_params(inner, w)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, optax.contrib.schedule_free_eval_params(state, params), wanted)
    jax.tree.map(close, optimizer.eval_params(state, params), wanted)
    two = optim.optimizer({"w": optim.group("w", recipe), "b": optim.group(".*", SGD)})
    with pytest.raises(AttributeError, match="Optimizer.eval_params"):
        optax.contrib.schedule_free_eval_params(two.tx.init(params), params)


@pytest.mark.long
def test_a_selection_of_optaxs_own_tests_passes():
    # Every factory once, and the properties that a wrapper would be the first to break.
    ran, _, failed, passed = optax_suite.run(
        lambda name: "test_optimizers_accept_extra_args" in name and "alias_test" in name
    )
    assert ran > 30 and not failed, "\n".join(failed.values())
    assert not passed, f"Not expected to pass: {passed}"
