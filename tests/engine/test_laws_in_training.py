"""The laws of what the trainer adds: accumulation, skipped steps, averages, and all at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from tests import short
from tests.engine.test_program import Points, experiment
from tests.laws_harness import avals_of, compilations_of, numbers, to_host
from trainer.engine.program import Program

falling = optax.linear_schedule(0.05, 0.01, 8)


def three_groups(**options):
    return partial(
        optim.optimizer,
        {
            "matrix": optim.group("first/kernel", partial(optim.muon, learning_rate=falling)),
            "frozen": optim.group("first/bias", partial(optim.frozen)),
            "rest": optim.group(".*", partial(optax.adamw, learning_rate=falling)),
        },
        clip_norm=1.0,
        **options,
    )


ADAM = partial(optax.adam, learning_rate=0.05)
ADDED = {
    "three groups, one frozen": dict(optimizer=three_groups()),
    "accumulation over 4 microbatches": dict(optimizer=ADAM, microbatches=4),
    "skipped steps": dict(optimizer=ADAM, on_nonfinite="skip"),
    "EMA": dict(optimizer=ADAM, ema_decay=0.9),
    "a lookahead and a readout": dict(
        optimizer=three_groups(
            lookahead=optim.ema_nesterov(0.5, 0.7, start=1, scheduled_by="matrix"),
            readout=optim.weight_ema(3.0, start=2, blend=0.6),
        ),
        on_nonfinite="skip",
    ),
    "outer steps": dict(
        optimizer=three_groups(lookahead=optim.outer_nesterov(0.7, 0.6, every=2)),
        on_nonfinite="skip",
        ema_decay=0.9,
    ),
    "all at once": dict(
        optimizer=three_groups(), microbatches=4, on_nonfinite="skip", ema_decay=0.9
    ),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
@short.parametrize("added", list(ADDED))
def test_the_laws_hold_in_training(added, precision):
    program = Program(experiment(precision=precision, **ADDED[added]))
    state = program.init()
    batches = [
        program.feed.to_devices(b) for b, _ in zip(Points().train(0, 0), range(6), strict=False)
    ]
    if "nonfinite" in str(ADDED[added]):
        batches[2] = {**batches[2], "image": batches[2]["image"] * jnp.nan}
    before, start = avals_of(state), to_host(state)
    with compilations_of("packed_step") as compiled:
        for t, batch in enumerate(batches):
            if t == 3:
                middle = to_host(state)
            state, metrics = program.step(state, batch)
            assert avals_of(state) == before  # law 1
        end = to_host(state)
        again = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), middle, state)
        for batch in batches[3:]:
            again, _ = program.step(again, batch)
    assert len(compiled) == 1  # law 3, also after restore
    jax.tree.map(np.testing.assert_array_equal, numbers(again), numbers(end))  # law 8
    for x in jax.tree.leaves(end.opt_state):  # law 2
        assert not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits == 32

    def body(state, batch):
        return program.traced_step(state, batch)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    scanned, _ = jax.jit(lambda state: jax.lax.scan(body, state, stacked))(start)  # law 6
    close = partial(np.testing.assert_allclose, rtol=1e-2 if precision != "float32" else 1e-4)
    jax.tree.map(
        lambda a, b: close(np.asarray(a, float), np.asarray(b, float), atol=1e-3),
        numbers(scanned.params),
        numbers(end.params),
    )
    if "groups" in added:
        np.testing.assert_array_equal(end.params["first"]["bias"], start.params["first"]["bias"])
    assert np.isfinite(float(metrics["grad_norm"]))


def test_accumulation_computes_the_gradient_of_the_whole_batch():
    ends = []
    for parts in (1, 4):
        program = Program(experiment(optimizer=ADAM, microbatches=parts))
        state = program.init()
        for batch, _ in zip(Points().train(0, 0), range(5), strict=False):
            state, _ = program.step(state, program.feed.to_devices(batch))
        ends.append(to_host(state.params))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *ends)


# What asks for more than gradients learns from the loop: value, value_fn, obj_fn, grad_fn.
EXTRAS = {
    "sgd, backtracking": partial(
        optax.chain,
        partial(optax.sgd, learning_rate=1.0),
        partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=10),
    ),
    "lbfgs": partial(optax.lbfgs),
    "polyak_sgd": partial(optax.polyak_sgd, max_learning_rate=0.3),
    "sophia": partial(optax.contrib.sophia, learning_rate=0.03, update_interval=2),
    "sam": partial(
        optax.contrib.sam,
        partial(optax.sgd, learning_rate=0.3),
        partial(optax.chain, partial(optax.contrib.normalize), partial(optax.sgd, 0.05)),
        opaque_mode=True,
    ),
    "schedule_free": partial(optax.contrib.schedule_free_adamw, learning_rate=0.05),
    "lookahead": partial(optax.lookahead, ADAM, sync_period=3, slow_step_size=0.5),
    "plateau": partial(optax.chain, ADAM, partial(optax.contrib.reduce_on_plateau, patience=3)),
    "mechanize": partial(optax.contrib.mechanize, partial(optax.adam, 1.0), s_init=1e-3),
    "prodigy": partial(optax.contrib.prodigy, learning_rate=1.0, estim_lr0=1e-3),
    "momo": partial(optax.contrib.momo, learning_rate=1.0),
}


class WholeSet(Points):
    """All 40 examples in every batch."""

    batch_size = 40
    element_spec = {
        name: jax.ShapeDtypeStruct((40, *x.shape[1:]), x.dtype)
        for name, x in Points.element_spec.items()
    }

    def train(self, batch_index, seed):
        while True:
            yield {"image": self.x[:40], "label": self.y[:40]}


@pytest.mark.long
@pytest.mark.parametrize("name", list(EXTRAS))
def test_an_optimizer_that_needs_more_than_gradients_learns(name):
    program = Program(experiment(optimizer=EXTRAS[name], data=WholeSet(), steps=30))
    state, losses = program.init(), []
    batch = program.feed.to_devices(next(program.experiment.data.train(0, 0)))
    evaluated = program.evaluation.run_split(state, "test")
    assert np.isfinite(evaluated["loss"])
    for _ in range(30):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < 0.9 * losses[0]
    assert np.isfinite(program.evaluation.run_split(state, "test")["loss"])


@pytest.mark.parametrize("name", ["sgd, backtracking", "lbfgs", "sophia", "sam"])
def test_an_optimizer_that_evaluates_the_loss_refuses_accumulation(name):
    groups = {
        "search": optim.group("first/.*", EXTRAS[name]),
        "rest": optim.group(".*", ADAM),
    }
    program = Program(experiment(optimizer=partial(optim.optimizer, groups), microbatches=4))
    with pytest.raises(optim.GroupError, match="Set microbatches to 1") as caught:
        jax.eval_shape(program.traced_step, program.abstract_state(), program.feed.abstract_batch())
    assert caught.value.group == "search"
    assert "\n" not in str(caught.value)
