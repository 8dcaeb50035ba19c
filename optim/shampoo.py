"""Shampoo, as in PyTorch's Distributed Shampoo: with decaying averages, grafted to Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, map_parts, scalar, wide, wide_zeros
from optim.matrices import everywhere, gather, product, require_matrices, scatter, transpose

__all__ = ["ShampooState", "shampoo"]


class ShampooState(NamedTuple):
    """What Shampoo remembers.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the gradients.
        variance: the mean of their squares, for Adam's length.
        left: the mean of G G^T, [..., m, m]; an empty tuple where that side is not preconditioned.
        right: the mean of G^T G, [..., n, n]; likewise.
        left_root: the inverse root of `left` when it was last taken.
        right_root: that of `right`.
    """

    count: jax.Array
    mean: Any
    variance: Any
    left: Any
    right: Any
    left_root: Any
    right_root: Any


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-12,
    weight_decay: float = 0.0,
    precondition_frequency: int = 10,
    start_preconditioning: int | None = None,
    max_precond_dim: int = 8192,
    graft_eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions matrices from both sides, with steps as long as Adam's (Shampoo).

    With the means, corrected for their bias, M of the gradients G, V of their squares, L of G G^T
    and R of G^T G, an update goes along

        P = (L + eps I)^(-1/4) M (R + eps I)^(-1/4),   D = |A| / |P| * P,
        A = M / (sqrt(V) + graft_eps)

    with Frobenius norms, and D = A before `start_preconditioning`. The roots are taken anew every
    `precondition_frequency` updates. Where one side is too long, the other has the power -1/2;
    where both are, D = A.

    A matrix is the last two axes of a parameter; every axis before is batch (stacked layers).
    Other parameters belong to another group. Matrices are not cut into blocks.

    Args:
        learning_rate: a float, a traced scalar or a schedule; one for Adam suits.
        b1: the decay of M.
        b2: the decay of V, L and R. At 1 they are sums, not averages, and have no bias to correct:
            the original Shampoo and Meta's default, with the length of AdaGrad's steps.
        eps: added to the eigenvalues of L and R.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        precondition_frequency: the number of updates between two roots.
        start_preconditioning: the first update, counted from 1, that is preconditioned; None for
            `precondition_frequency`.
        max_precond_dim: a longer side of a matrix is not preconditioned.
        graft_eps: added to the root of V.

    Returns:
        The optimizer.

    Raises:
        ValueError: a number of updates is not positive; at init, a parameter has fewer than two
            axes or is complex; inside shard_map, a gradient differs from device to device.

    References: Gupta et al., Shampoo, https://arxiv.org/abs/1802.09568; Shi et al., A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer,
      https://arxiv.org/abs/2309.06497
    """
    start = precondition_frequency if start_preconditioning is None else start_preconditioning
    if precondition_frequency < 1 or start < 1:
        raise ValueError(
            f"precondition_frequency is {precondition_frequency} and start_preconditioning is"
            f" {start}, but both are numbers of updates, 1 or more."
        )

    def init(params: Any) -> ShampooState:
        require_matrices(params, "optim.shampoo")

        def one(p: jax.Array) -> tuple[Any, ...]:
            zeros = wide_zeros(p)
            grams = _grams(gather(zeros, "optim.shampoo"), max_precond_dim)
            return zeros, wide_zeros(p), *grams, *jax.tree.map(jnp.zeros_like, grams)

        return ShampooState(jnp.zeros((), jnp.int32), *map_parts(one, 6, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ShampooState]:
        del params
        require_matrices(updates, "optim.shampoo")
        count = jnp.asarray(optax.safe_increment(state.count))
        due = (count == start) | ((count > start) & (count % precondition_frequency == 0))

        def one(g: jax.Array, mean: jax.Array, variance: jax.Array, *sides: Any) -> tuple[Any, ...]:
            whole = gather(wide(g), "optim.shampoo")
            grams, roots = sides[:2], sides[2:]
            keep1, keep2 = scalar(b1, whole), scalar(b2, whole)
            mean = keep1 * gather(mean, "optim.shampoo") + (1 - keep1) * whole
            part = jnp.where(keep2 == 1, 1, 1 - keep2)  # at 1 these are sums
            variance = keep2 * gather(variance, "optim.shampoo") + part * whole**2
            news = _grams(whole, max_precond_dim)
            grams = jax.tree.map(lambda old, new: keep2 * old + part * new, grams, news)
            real = jnp.where(keep2 == 1, 1, bias_correction(b2, count, whole))
            roots = jax.lax.cond(
                due, lambda grams, _: _roots(grams, real, eps), lambda _, roots: roots, grams, roots
            )
            corrected = mean / bias_correction(b1, count, whole)
            adam = corrected / (jnp.sqrt(variance / real) + scalar(graft_eps, whole))
            step = jnp.where(count < start, adam, _graft(_precondition(corrected, roots), adam))
            step = step if jax.tree.leaves(roots) else adam
            return scatter(step, g), scatter(mean, g), scatter(variance, g), *grams, *roots

        steps, *parts = map_parts(one, 7, updates, *state[1:])
        return steps, ShampooState(count, *parts)

    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)


def _grams(g: jax.Array, longest: int) -> tuple[Any, Any]:
    left = product(g, transpose(g)) if g.shape[-2] <= longest else ()
    right = product(transpose(g), g) if g.shape[-1] <= longest else ()
    return left, right


def _roots(grams: Any, real: jax.Array, eps: Any) -> Any:
    """Takes the inverse root of every side: the fourth, or the square root of a single one."""
    power = -0.5 / max(len(jax.tree.leaves(grams)), 1)

    def inverse_root(gram: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(everywhere(gram / real))
        # Below this an eigenvalue is rounding, and its root would be noise times a large number.
        noise = jnp.finfo(gram.dtype).eps * gram.shape[-1] * jnp.max(values, -1, keepdims=True)
        values = jnp.maximum(values, jnp.maximum(noise, 0)) + scalar(eps, gram)
        root = product(vectors * values[..., None, :] ** power, transpose(vectors))
        return scatter(root, gram)

    return jax.tree.map(inverse_root, grams)


def _precondition(x: jax.Array, roots: tuple[Any, Any]) -> jax.Array:
    left, right = roots
    x = x if isinstance(left, tuple) else product(left, x)
    return x if isinstance(right, tuple) else product(x, right)


def _graft(direction: jax.Array, length: jax.Array) -> jax.Array:
    """Gives each matrix the Frobenius norm of another."""
    norms = [jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (length, direction)]
    return direction * (norms[0] / (norms[1] + scalar(1e-16, direction)))
