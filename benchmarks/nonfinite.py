"""Measures the cost of detecting values that are not finite, over a step by hand without checks.

    python -m benchmarks.nonfinite [--rounds=60] [--only=halt]

The model is a perceptron of 135k parameters, trained by AdamW on the digits, under each policy of
`on_nonfinite`, with and without `clip_norm`. The step written by hand in optax clips equally.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optim
from benchmarks.interleave import interleave, report
from benchmarks.step import stepper
from trainer import data, losses, models
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.train import runtime

# With clip_norm the step by hand computes the norm of the gradients, too; without, that norm is the
# cost of `halt`. `skip` and `rollback` read every parameter at every step, and `skip` writes
# parameters and state twice; jax.lax.cond instead of the selection took the same time.
TARGETS = {
    "halt": {1.0: 1.02, None: 1.05},
    "skip": {1.0: 1.20, None: 1.25},
    "rollback": {1.0: 1.05, None: 1.15},
}


def by_hand(experiment: Experiment, clip_norm: float | None) -> Callable[[int], None]:
    """Builds a step in optax alone, which does not look for values that are not finite.

    Args:
        experiment: the experiment whose model, data and loss are used.
        clip_norm: the largest global norm of the gradients; None does not clip.

    Returns:
        A function that runs a given number of steps and waits for the last.
    """
    transforms = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    tx = optax.chain(*transforms, optax.adamw(1e-3, weight_decay=0.05))
    model: Any = experiment.model
    host = next(experiment.data.train(0, 0))

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def mean_loss(params: optax.Params) -> jax.Array:
            outputs, _ = model.apply(params, {}, batch, key=None, train=True)
            values: Any = experiment.loss(outputs, batch)
            return values.mean()

        value, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    @jax.jit
    def init(key: jax.Array) -> Any:
        params, _ = model.init(key, jax.tree.map(jnp.zeros_like, host))
        return params, tx.init(params)

    held = {"state": init(jax.random.key(0))}

    def steps(number: int) -> None:
        for _ in range(number):
            held["state"], loss = step(held["state"], jax.device_put(host))
        jax.block_until_ready(loss)

    return steps


def main() -> None:
    """Times each policy of `on_nonfinite` against the step by hand and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=30, help="steps a round")
    parser.add_argument("--width", type=int, default=240)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--only", choices=TARGETS, help="one policy")
    arguments = parser.parse_args()
    runtime.keep_freed_memory()  # for both sides: they share the process
    for clip_norm in (1.0, None):
        recipe = partial(optax.adamw, learning_rate=1e-3, weight_decay=0.05)
        experiment = Experiment(
            model=models.mlp(width=arguments.width, depth=arguments.depth),
            data=data.digits(batch_size=arguments.batch_size, crop=0),
            loss=losses.softmax_cross_entropy(),
            optimizer=optim.optimizer({"all": optim.group(".*", recipe)}, clip_norm),
            steps=1_000_000,
            log_every=1_000,
            eval_every=1_000_000,
            save_every=1_000_000,
        )
        theirs = partial(by_hand(experiment, clip_norm), arguments.steps)
        for action in [arguments.only] if arguments.only else TARGETS:
            watched = dataclasses.replace(experiment, on_nonfinite=action)
            mine = stepper(Program(watched), arguments.steps)
            interleave([mine, theirs], 1)  # warms up
            seconds = interleave([mine, theirs], arguments.rounds)
            to_ms = [[1e3 * x / arguments.steps for x in side] for side in seconds]
            target = TARGETS[action][clip_norm]
            report(f"{action}, clip_norm={clip_norm}", to_ms[0], to_ms[1], target, "ms")


if __name__ == "__main__":
    main()
