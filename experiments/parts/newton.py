"""A part of a chain that Lockstep does not have: Newton-Muon's, which reads inputs of kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.parts.base import Part
from optim.paths import flatten, unflatten


class NewtonState(NamedTuple):
    """The state of `newton`.

    Attributes:
        count: the updates so far.
        moments: C, [..., inputs, inputs] for each kernel.
        inverses: what gradients are multiplied by, shaped like C.
    """

    count: jax.Array
    moments: Any
    inverses: Any


def newton(
    every: int = 64, weight: float = 0.05, damping: float = 0.2, blocks: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Multiplies gradients by inverse second moments of their kernels' inputs (Newton-Muon).

    At every `every`-th update, with the mean X of x x^T over the inputs x of a kernel in the batch,

        C <- (1 - weight) * C + weight * X,    P <- (C + (damping * mean(diag C) + 1e-8) I)^-1

    and at each one, G <- P G. C begins as 0.001 I, and P as I, which it becomes again if C is not
    positive definite. With `blocks`, only blocks [inputs / blocks, inputs / blocks] of C are kept,
    as the authors do with 4 for the second kernel of a perceptron. `parts.momentum` and
    `parts.polar` follow. Leaves are kernels [..., inputs, outputs].

    The model must observe "kernel_inputs", as all linen models do; X is computed at each step, and
    used at one in `every`. See result 15 of modded-nanogpt's optimizer track.
    """

    def diagonal(x: jax.Array, value: float) -> jax.Array:
        *stack, inputs, _ = x.shape
        size = inputs // blocks
        return jnp.broadcast_to(value * jnp.eye(size, dtype=x.dtype), (*stack, blocks, size, size))

    def init(params: Any) -> NewtonState:
        moments = jax.tree.map(lambda x: diagonal(x, 1e-3), params)
        inverses = jax.tree.map(lambda x: diagonal(x, 1.0), params)
        return NewtonState(jnp.zeros((), jnp.int32), moments, inverses)

    def refresh(c: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = c.shape[-1]
        new = [seen[..., i : i + size, i : i + size] for i in range(0, blocks * size, size)]
        c = c + weight * (jnp.stack(new, axis=-3).astype(c.dtype) - c)
        one = jnp.eye(size, dtype=c.dtype)
        scale = damping * jnp.trace(c, axis1=-2, axis2=-1)[..., None, None] / size + 1e-8
        lower = jnp.linalg.cholesky(c + scale * one)
        inverse = jax.scipy.linalg.cho_solve((lower, True), jnp.broadcast_to(one, c.shape))
        finite = jnp.isfinite(inverse).all(axis=(-2, -1), keepdims=True)
        return c, jnp.where(finite, inverse, one)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        del params
        grads, moments = flatten(updates), flatten(state.moments)
        inverses = flatten(state.inverses)
        seen = extra.get("observations", {}).get("kernel_inputs", {})
        if missing := sorted(grads.keys() - seen.keys()):
            raise ValueError(
                f"newton reads 'kernel_inputs' of {', '.join(missing)}, which only a linen model in"
                " a run observes, of the kernels of its linear layers. Match these kernels alone."
            )
        due = (state.count + 1) % every == 0
        for path, g in grads.items():
            c, p = jax.lax.cond(
                due,
                lambda c, p, x: refresh(c, x),
                lambda c, p, x: (c, p),
                *(moments[path], inverses[path], seen[path]),
            )
            rows = g.reshape(*g.shape[:-2], blocks, -1, g.shape[-1])
            grads[path], moments[path], inverses[path] = (p @ rows).reshape(g.shape), c, p
        tree = state.moments
        new = NewtonState(state.count + 1, unflatten(tree, moments), unflatten(tree, inverses))
        return unflatten(updates, grads), new

    return Part(init, update, name="newton", reads=["kernel_inputs"])
