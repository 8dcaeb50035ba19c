"""A part of a chain that Lockstep does not have: Dion, steps of low rank by power iteration."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class DionState(NamedTuple):
    """The state of `dion`.

    Attributes:
        momentum: the sum of gradients, less most of what steps used, shaped like the parameters.
        bases: Q, [..., shorter side, rank] for each parameter.
    """

    momentum: Any
    bases: Any


def dion(
    rank: int | None = None, decay: float = 0.95, eps: float = 1e-8, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by orthonormal directions of low rank (Dion).

    With the gradient G, and the longer side of all matrices as rows, one step is

        M <- M + G
        P <- the orthonormal factor of a QR decomposition of M Q
        R <- M^T P,    M <- M - (1 - decay) * P R^T,    Q <- R / (norms of its columns + eps)
        D  = sqrt(outputs / inputs) * P Q^T

    `rank` is the number of columns of Q, at most the shorter side, which None is; `seed` draws the
    first Q. A matrix whose M is zero has no step, and its Q is only normalized. Leaves are [...,
    inputs, outputs]. Weight decay is `parts.decay`. See arXiv:2504.05295.
    """

    def init(params: Any) -> DionState:
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))

        def draw(x: jax.Array, key: jax.Array) -> jax.Array:
            shorter = min(x.shape[-2:])
            columns = shorter if rank is None else min(rank, shorter)
            return jax.random.normal(key, (*x.shape[:-2], shorter, columns), x.dtype)

        bases = [draw(x, key) for x, key in zip(leaves, keys, strict=False)]
        return DionState(jax.tree.map(jnp.zeros_like, params), structure.unflatten(bases))

    def one(g: jax.Array, m: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        inputs, outputs = g.shape[-2:]
        # The rows of a square matrix are outputs, as in torch.
        turn = _transpose if inputs <= outputs else lambda x: x
        m = turn(m + g)
        zero = jnp.all(m == 0, axis=(-2, -1), keepdims=True)
        p = jnp.where(zero, 0, jnp.linalg.qr(m @ q)[0])
        r = jnp.where(zero, q, _transpose(m) @ p)
        m = m - (1 - decay) * (p @ _transpose(r))
        q = r / (jnp.linalg.norm(r, axis=-2, keepdims=True) + eps)
        move = (outputs / inputs) ** 0.5 * (p @ _transpose(q))
        return turn(move), turn(m), q

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        del params
        found = jax.tree.map(one, updates, state.momentum, state.bases)
        moves, momentum, bases = jax.tree.transpose(
            jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), found
        )
        return moves, DionState(momentum, bases)

    return optax.GradientTransformationExtraArgs(init, update)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -2, -1)
