"""Compares `optim.soap` with SOAP written by hand: temporary memory and time of an update.

    python -m benchmarks.soap [--rounds=8]

Both sides update the 16 kernels of four layers of ViT-Ti, one parameter each, on one device, with
the state donated. The side by hand follows the authors' program in jax: one kernel is computed
after the other, and nothing is done for gradients of low rank, where ours keeps rounding errors out
of the step and of the bases. A round is 10 updates, one of which rotates the bases.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optim
from benchmarks.interleave import interleave, report

SHAPES = [(192, 576), (192, 192), (192, 768), (768, 192)] * 4
RATE, DECAY, BETA, EPS, EVERY = 3e-3, 0.01, 0.95, 1e-8, 10

Params = dict[str, jax.Array]
Update = Callable[[Params, Any, Params], tuple[Params, Any]]


def product(*matrices: jax.Array) -> jax.Array:
    """Multiplies matrices from left to right, exact to float32."""
    found = matrices[0]
    for each in matrices[1:]:
        found = jnp.matmul(found, each, precision=jax.lax.Precision.HIGHEST)
    return found


def state_by_hand(params: Params) -> dict[str, Any]:
    """Returns the first state of the side by hand: Adam's averages, Gram matrices and bases."""
    fields = {
        name: (x * 0, x * 0, *(jnp.zeros((n, n)) for n in x.shape), *map(jnp.eye, x.shape))
        for name, x in params.items()
    }
    return {"count": jnp.zeros((), jnp.int32), "fields": fields}


def update_by_hand(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
    """Computes an update by the formulas of the paper, for one kernel after the other."""
    count = state["count"]
    moved = {
        name: _update_one(x, state["fields"][name], grads[name], count)
        for name, x in params.items()
    }
    fields = {name: of_one for name, (_, of_one) in moved.items()}
    return {name: x for name, (x, _) in moved.items()}, {"count": count + 1, "fields": fields}


def _update_one(x: jax.Array, fields: Any, g: jax.Array, count: jax.Array) -> tuple[Any, Any]:
    mean, variance, left, right, rows, columns = fields
    first = count == 0
    turned = product(rows.T, g, columns)
    mean = jnp.where(first, 0, BETA * mean + (1 - BETA) * turned)
    variance = jnp.where(first, 0, BETA * variance + (1 - BETA) * turned**2)
    terms = jnp.maximum(count, 1).astype(jnp.float32)
    rate = jnp.sqrt(1 - BETA**terms) / (1 - BETA**terms)
    step = product(rows, rate * mean / (jnp.sqrt(variance) + EPS), columns.T)
    left = BETA * left + (1 - BETA) * product(g, g.T)
    right = BETA * right + (1 - BETA) * product(g.T, g)
    due = jnp.where(first, 2, jnp.where(count % EVERY == 0, 1, 0))
    branches = [_keep, _rotate, _start]
    moved = jax.lax.switch(due, branches, (mean, variance, left, right, rows, columns))
    mean, variance, rows, columns = moved
    x = x - jnp.where(first, 0, RATE * (step + DECAY * x))
    return x, (mean, variance, left, right, rows, columns)


def _keep(fields: Any) -> Any:
    mean, variance, _, _, rows, columns = fields
    return mean, variance, rows, columns


def _start(fields: Any) -> Any:
    mean, variance, *grams, _, _ = fields
    return mean, variance, *(jnp.linalg.eigh(gram)[1][:, ::-1] for gram in grams)


def _rotate(fields: Any) -> Any:
    mean, variance, left, right, rows, columns = fields
    mean = product(rows, mean, columns.T)
    orders, bases = [], []
    for gram, basis in ((left, rows), (right, columns)):
        order = jnp.argsort(-jnp.sum(basis * product(gram, basis), axis=0))
        orders.append(order)
        bases.append(jnp.linalg.qr(product(gram, basis[:, order]))[0])
    variance = variance[orders[0]][:, orders[1]]
    return product(bases[0].T, mean, bases[1]), variance, *bases


def make_side(update: Update, params: Params, state: Any, grads: list[Params]) -> tuple[float, Any]:
    """Compiles an update; returns its temporary memory in MB, and a function that runs a round.

    `grads` are those of the updates of a round: enough that their mean products have full rank.
    """
    program = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads[0]).compile()
    held = jax.tree.map(jnp.copy, (params, state))

    def run() -> None:
        nonlocal held
        for each in grads:
            held = program(*held, each)
        jax.block_until_ready(held)

    analysis: Any = program.memory_analysis()
    return analysis.temp_size_in_bytes / 1e6, run


def main() -> None:
    """Prints the ratios of memory and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    keys = iter(jax.random.split(jax.random.key(0), (1 + EVERY) * len(SHAPES)))
    params, *grads = (
        {f"kernel_{i}": jax.random.normal(next(keys), shape) for i, shape in enumerate(SHAPES)}
        for _ in range(1 + EVERY)
    )
    tx = optim.soap(RATE, eps=EPS, weight_decay=DECAY, precondition_frequency=EVERY)

    def update(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state  # type: ignore[return-value]

    ours, run_ours = make_side(update, params, tx.init(params), grads)
    other, run_other = make_side(update_by_hand, params, state_by_hand(params), grads)
    print(f"temporary memory: ours {ours:.1f} MB, by hand {other:.1f} MB; ratio {ours / other:.2f}")
    for run in (run_ours, run_other):
        run()  # the first round computes the first bases
    seconds = interleave([run_ours, run_other], arguments.rounds, time.perf_counter)
    times = [[1e3 * x / EVERY for x in side] for side in seconds]
    report("an update", *times, target=1.05, unit="ms")


if __name__ == "__main__":
    main()
