"""A part of a chain that Lockstep does not have: Muown, Muon with gains of the outputs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim import parts

# Of Polar Express, with the last one for all further steps.
POLYNOMIALS = [
    *([8.2051, -22.9019, 16.4607], [4.0664, -2.8612, 0.5184], [3.9096, -2.8234, 0.5250]),
    *([3.2856, -2.4153, 0.4853], [2.2779, -1.6198, 0.3985], [1.8726, -1.2307, 0.3585]),
    *([1.8564, -1.2132, 0.3568], [1.8750, -1.2500, 0.3750]),
]


class MuownState(NamedTuple):
    """The state of `muown`; `gains` and `norms` are [..., 1, outputs] for each parameter.

    Attributes:
        count: the number of updates so far.
        gains: the norm of each output's weights.
        norms: the first norms of the directions.
        adam: the state of the Adam of the gains.
        momentum: that of the momentum of the directions.
    """

    count: Any
    gains: Any
    norms: Any
    adam: Any
    momentum: Any


def muown(
    scale: float = 0.2,
    target: float = 1.0,
    steps: int = 1,
    power: float = 1.2,
    momentum: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Moves the weights of each output as gain * direction / norm(direction), W = g V / |V|.

    Adam moves the gains g, and Muon the directions V, by `scale` times the square root of the
    longer side. The norms of V go from those of W to `target` in so many `steps`. An output whose
    weights are all 0 has the gain sqrt(0.33), and no direction until the first update.

    It stands in `after`, takes the gradient and the learning rate of the chain, and ignores the
    step. Leaves are [..., inputs, outputs]. See arXiv:2605.10797.
    """
    adam, mean = parts.adam(b1, b2, eps), parts.momentum(momentum)
    polar = parts.polar(POLYNOMIALS, steps=12, scale="none", eps=1e-30)

    def init(params: Any) -> MuownState:
        found = jax.tree.map(_norm, params)
        gains = jax.tree.map(lambda x: jnp.where(x > 1e-12, x, 0.33**0.5), found)
        count = jnp.zeros((), jnp.int32)
        return MuownState(count, gains, gains, adam.init(gains), mean.init(params))

    def at(count: Any, first: Any) -> Any:
        # The norms that the last update set; those of W at the first.
        done = jnp.clip((count - 1).astype(first.dtype) / max(steps - 1, 1), 0, 1)
        progress = jnp.where(count == 0, 0, done**power if steps > 1 else 1)
        return first + (target - first) * progress

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        grad, learning_rate = given["grad"], given["learning_rate"]
        norms = jax.tree.map(partial(at, state.count), state.norms)
        units = jax.tree.map(jnp.divide, params, state.gains)
        of_gains = jax.tree.map(lambda g, u: jnp.sum(g * u, -2, keepdims=True), grad, units)
        of_units = jax.tree.map(lambda g, u, x: g - u * x, grad, units, of_gains)
        scaled = jax.tree.map(lambda x, g, n: x * (g / n), of_units, state.gains, norms)
        mixed, moments = mean.update(scaled, state.momentum)
        factors, _empty = polar.update(mixed, optax.EmptyState())
        moves, adams = adam.update(of_gains, state.adam)
        gains = jax.tree.map(lambda g, x: g - learning_rate * x, state.gains, moves)

        def step(w: Any, u: Any, n: Any, o: Any, g: Any) -> Any:
            v = u * n - learning_rate * scale * max(w.shape[-2:]) ** 0.5 * o
            return g * v / jnp.maximum(_norm(v), 1e-12) - w

        found = jax.tree.map(step, params, units, norms, factors, gains)
        return found, MuownState(state.count + 1, gains, state.norms, adams, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x, axis=-2, keepdims=True)
