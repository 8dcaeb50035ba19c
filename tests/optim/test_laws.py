"""Every optimizer, every law, every dtype: one test a pair. See laws_table.py and laws_harness.py.

Law 7, shardings, runs on simulated devices in test_laws_sharded.py.
"""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from tests import laws_table
from tests.laws_harness import (
    TOLERANCE,
    Trajectory,
    make_optimizer,
    numbers,
    rate,
    scheduled,
    step,
    trajectory,
)
from tests.laws_table import DTYPES, ROWS, Row
from trainer.checkpoint import Checkpoints


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (row, dtype), id=f"{row.name}-{dtype}", marks=laws_table.marks(row, "one device", dtype)
        )
        for row, dtype in itertools.product(ROWS, DTYPES)
    ],
)
def pair(request) -> tuple[Row, str]:
    return request.param


def run(pair: tuple[Row, str], law: int) -> Trajectory:
    row, dtype = pair
    if (reason := row.why_not(law, dtype)) is not None:
        pytest.skip(reason)
    done = trajectory(row, dtype)
    if isinstance(done, str):
        pytest.fail(done, pytrace=False)
    return done


@pytest.mark.long
def test_law_1_an_update_keeps_shapes_dtypes_and_weak_types(pair):
    done = run(pair, 1)
    for after in done.avals[1:]:
        assert after == done.avals[0]
    assert not any(weak for *_, weak in _leaves_of_avals(done.avals[0]))


def _leaves_of_avals(avals):
    # By its dtype: the states of some optimizers are tuples of three, too.
    return jax.tree.leaves(
        avals, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 3 and isinstance(x[1], str)
    )


def test_law_2_arithmetic_is_at_least_float32(pair):
    done = run(pair, 2)
    row, dtype = pair
    for before, wanted, after in zip(done.params, done.wanted, done.params[1:], strict=False):
        _assert_close(after["own"], wanted["own"], before["own"], dtype, row.tolerance)
    kept = str(row.recipe.keywords.get("mu_dtype"))
    for x in jax.tree.leaves(numbers(done.states[-1])):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        assert not floating or jnp.finfo(x.dtype).bits >= 32 or x.dtype == kept
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(done.wanted[-1]["own"]), jax.tree.leaves(done.start["own"]), strict=True
        )
    )


def _assert_close(found, wanted, before, dtype, tolerance=0.0):
    """Compares in the dtype that the parameter is kept in, and in float32 what is lost to it."""

    def close(f, w, b):
        assert f.dtype == b.dtype
        assert np.all(np.isfinite(np.asarray(f, np.complex128)))
        kind = {"bfloat16": "bfloat16", "float16": "float16"}.get(f.dtype.name, dtype)
        scale = max(tolerance, TOLERANCE["float32" if kind == "mixed" else kind])
        f, w = np.asarray(f, np.complex128), np.asarray(w, np.complex128)
        np.testing.assert_allclose(f, w, rtol=scale, atol=scale * 0.1)

    jax.tree.map(close, found, wanted, before)


def test_law_3_one_compilation_with_donation_and_after_restore(pair):
    assert run(pair, 3).compiled == 1


def test_law_4_every_float_follows_its_schedule(pair):
    done = run(pair, 4)
    row, dtype = pair
    for t, told in enumerate(done.told):
        for name, value in row.recipe.keywords.items():
            if name == "learning_rate" and name not in row.fixed:
                np.testing.assert_allclose(told["own"][name], value * rate(t), rtol=1e-6)
        np.testing.assert_allclose(told["other"]["learning_rate"], 0.03 * rate(t), rtol=1e-6)
    # The learning rate falls, and the reference's with it: the last step shows it.
    _assert_close(
        done.params[-1]["own"],
        done.wanted[-1]["own"],
        done.start["own"],
        dtype,
        row.tolerance,
    )


def test_law_5_grouping_does_not_change_updates(pair):
    done = run(pair, 5)
    for wanted, after in zip(done.wanted, done.params[1:], strict=True):
        _assert_close(after["other"], wanted["other"], done.start["other"], pair[1])
        np.testing.assert_array_equal(after["frozen"]["w"], done.start["frozen"]["w"])


def test_law_6_loops_compute_the_same_as_single_steps(pair):
    done = run(pair, 6)
    jax.tree.map(np.testing.assert_array_equal, done.at_once[0], done.params[-1])


def test_law_8_a_restored_state_continues_bit_for_bit(pair):
    done = run(pair, 8)
    wanted = numbers((done.params[-1], done.states[-1]))
    jax.tree.map(np.testing.assert_array_equal, numbers(done.resumed), wanted)


def test_law_9_evaluation_uses_the_averages(pair):
    done = run(pair, 9)
    _assert_close(done.evaluated, done.evaluated_wanted, done.start, pair[1])


def test_every_factory_has_a_row():
    unknown = laws_table.unclassified()
    assert not unknown, f"Give these a row in tests/laws_table.py: {', '.join(unknown)}"


def test_a_factory_without_a_row_is_found(monkeypatch):
    without = [row for row in ROWS if not row.name.startswith("optax.contrib.dog")]
    monkeypatch.setattr(laws_table, "ROWS", without)
    assert laws_table.unclassified() == ["optax.contrib.dog"]


def test_a_row_of_another_package_does_not_count(monkeypatch):
    def signum(learning_rate: float) -> optax.GradientTransformation:
        return optax.sign_sgd(learning_rate)

    # optax has a signum with a row.
    monkeypatch.setattr(optim, "signum", signum, raising=False)
    assert laws_table.unclassified() == ["optim.signum"]


@pytest.mark.long
def test_an_argument_that_does_not_take_a_schedule_is_refused_with_one():
    fixed = [row for row in ROWS if row.fixed]
    assert fixed
    for row in fixed:
        groups = {
            "own": optim.group("own/.*", scheduled(row.recipe)),
            "others": optim.group(".*", optim.frozen()),
        }
        whole = optim.optimizer(groups)
        with pytest.raises(
            optim.GroupError, match="a schedule or a traced value|its value at step 0"
        ):
            start = laws_table.tree_of(row, "float32")
            jax.eval_shape(lambda p, o=whole, r=row: step(o, r, p, o.init(p)), start)


@pytest.mark.parametrize(("row", "words"), laws_table.REFUSED, ids=lambda x: getattr(x, "name", ""))
def test_an_optimizer_that_cannot_keep_the_laws_is_refused(row, words):
    optimizer = make_optimizer(row)
    params = laws_table.tree_of(row, "float32")
    with pytest.raises(optim.GroupError, match=words) as caught:
        jax.eval_shape(lambda p: step(optimizer, row, p, optimizer.init(p)), params)
    assert caught.value.group == "own"


@pytest.mark.long
def test_a_checkpoint_keeps_the_states_of_all_optimizers(tmp_path):
    # One checkpoint with every row's state: scalars, keys of random numbers, empty arrays.
    states = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
        for row in ROWS:
            states[row.name.replace("/", "-")] = make_optimizer(row).init(
                laws_table.tree_of(row, "mixed")
            )
    states = jax.device_put(states, jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    try:
        checkpoints.save(1, states)
        checkpoints.wait()
        restored = checkpoints.restore(abstract)
    finally:
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, numbers(restored), numbers(states))
    jax.tree.map(lambda a, b: _same_kind(a, b), restored, states)


def _same_kind(a, b):
    assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
