"""A part of a chain that Lockstep does not have: Aurora's row-balanced polar factor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim import parts


def balanced_polar(
    iterations: int = 2, beta: float = 0.5, eps: float = 1e-7
) -> optax.GradientTransformationExtraArgs:
    """Takes the polar factor of D G, with D such that the rows of the result are equally long.

    Rows are those along the longer side of a matrix; the polar factor of a square matrix has rows
    of one length anyway. Leaves are [..., inputs, outputs]. See arXiv:2606.27715.
    """
    polar = parts.polar([2.0, -1.5, 0.5], steps=12, norm="gram", scale="none", eps=eps)

    def one(g: jax.Array) -> jax.Array:
        rows, columns = g.shape[-2:]
        if rows == columns:
            return factor(g)
        across = -1 if rows > columns else -2  # each row's elements lie along the shorter side
        wanted = min(rows, columns) / max(rows, columns)
        scale = 1 / jnp.maximum(jnp.linalg.norm(g, axis=across, keepdims=True), eps)
        found = factor(scale * g)
        for _ in range(iterations - 1):
            squares = jnp.maximum(jnp.sum(found**2, axis=across, keepdims=True), eps**2)
            scale = scale * (wanted / squares) ** beta
            found = factor(scale * g)
        return found

    def factor(x: jax.Array) -> jax.Array:
        found: Any = polar.update(x, optax.EmptyState())[0]
        return found

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        return jax.tree.map(one, updates), state

    return optax.GradientTransformationExtraArgs(polar.init, update)
