"""Shampoo, as in PyTorch's Distributed Shampoo: with decaying averages, grafted to Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, scalar, wide, wide_zeros
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, everywhere, product, scatter, transpose

__all__ = ["ShampooState", "shampoo"]


class ShampooState(NamedTuple):
    """What Shampoo remembers.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the gradients.
        variance: the mean of their squares, for Adam's length.
        left: the mean of G G^T, [batch axes..., rows, rows]; an empty tuple where that side is not
            preconditioned.
        right: the mean of G^T G, [batch axes..., columns, columns]; likewise.
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
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions matrices from both sides, with steps as long as Adam's (Shampoo).

    With the means, corrected for their bias, M of the gradients G, V of their squares, L of G G^T
    and R of G^T G, an update goes along

        P = (L + eps I)^(-1/4) M (R + eps I)^(-1/4),   D = |A| / |P| * P,
        A = M / (sqrt(V) + graft_eps)

    with Frobenius norms, and D = A before `start_preconditioning`. The roots are taken anew every
    `precondition_frequency` updates. Where one side is too long, the other has the power -1/2;
    where both are, D = A.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before is batch
    (stacked layers). Parameters that are no matrices belong to another group.

    Where this differs from Meta's program and its defaults: that merges small dimensions
    (use_merge_dims=True) and then gives every axis a side of its own, and cuts matrices into blocks
    of max_preconditioner_dim=1024, where this one has whole matrices and leaves a longer side out;
    its betas are (0.9, 1.0), a b2 of 1 being a sum; its precondition_frequency is 1; and it grafts
    only where a grafting_config is given, here always to Adam.

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
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; None for the last two.

    Returns:
        The optimizer.

    Raises:
        ValueError: a number of updates is not positive, or matrices is unknown; at init, a
            parameter has fewer than two axes, is complex or does not fit `matrices`; inside
            shard_map, a gradient differs from device to device.

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

    over = Matrices(matrices, "optim.shampoo")

    def init(params: Any) -> ShampooState:
        over.declare(params)

        def one(zeros: jax.Array) -> tuple[Any, ...]:
            grams = _grams(zeros, max_precond_dim)
            return zeros, *grams, *jax.tree.map(jnp.zeros_like, grams)

        mean, *sides = over.map(one, 5, [jax.tree.map(wide_zeros, params)])
        variance = jax.tree.map(wide_zeros, params)
        return ShampooState(jnp.zeros((), jnp.int32), mean, variance, *sides)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ShampooState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        due = (count == start) | ((count > start) & (count % precondition_frequency == 0))

        def one(
            whole: jax.Array, mean: jax.Array, variance: jax.Array, *sides: Any
        ) -> tuple[Any, ...]:
            grams, roots = sides[:2], sides[2:]
            keep1, keep2 = scalar(b1, whole), scalar(b2, whole)
            part = jnp.where(keep2 == 1, 1, 1 - keep2)  # at 1 these are sums
            mean = keep1 * mean + (1 - keep1) * whole
            variance = keep2 * variance + part * whole**2
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
            return step, mean, variance, *grams, *roots

        grads = jax.tree.map(wide, updates)
        steps, *parts = over.map(one, 7, [grads, state.mean, state.variance], state[3:])
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
