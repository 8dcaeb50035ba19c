"""Inverse roots of Gram matrices, with which Shampoo preconditions, and grafting."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optim.descent import bias_correction, moving_average, scalar
from optim.division import divide
from optim.matrices import eigh, product, replicate, scatter, transpose


def average_or_add(old: jax.Array, new: jax.Array, decay: ArrayLike) -> jax.Array:
    """Returns decay * old + (1 - decay) * new, or the sum of both for a decay of 1."""
    keep = scalar(decay, new)
    return moving_average(old, new, keep, jnp.where(keep == 1, 1, 1 - keep))


def correction(decay: ArrayLike, count: ArrayLike, like: jax.Array) -> jax.Array:
    """Returns the divisor that corrects the bias of `average_or_add`; sums have none."""
    return jnp.where(scalar(decay, like) == 1, 1, bias_correction(decay, count, like))


def is_due(count: jax.Array, start: int, every: int) -> jax.Array:
    """Returns whether update number `count`, from 1, computes roots."""
    return (count == start) | ((count > start) & (count % every == 0))


def inverse_roots(
    sides: tuple[list[Any], list[Any]],
    corrected: Callable[[jax.Array], jax.Array],
    eps: ArrayLike | None,
    exponent: ArrayLike | None = None,
    tolerance: ArrayLike | None = None,
) -> tuple[list[Any], list[Any]]:
    """Returns inverse roots of left and right Gram matrices, [n, m, m] or (), like `sides`."""
    # `eps` is added to the eigenvalues; None is for pseudo-inverses, where zeros stay zero, and so
    # does what is up to `tolerance` times the largest (None: the rounding errors of the dtype). If
    # `exponent` is None, it is 1/4 where a parameter has two sides, and 1/2 where one.

    def root(gram: jax.Array, power: jax.Array) -> jax.Array:
        values, vectors = eigh(replicate(corrected(gram)))
        # A smaller eigenvalue is a rounding error, and its inverse root would amplify noise.
        least = jnp.finfo(gram.dtype).eps * gram.shape[-1]
        if eps is None and tolerance is not None:
            least = scalar(tolerance, gram)
        noise = jnp.maximum(least * jnp.max(values, -1, keepdims=True), 0)
        if eps is None:
            is_zero = values <= noise
            powers = jnp.where(is_zero, 1, values)[..., None, :] ** power
            powers = jnp.where(is_zero[..., None, :], 0, powers)
        else:
            values = jnp.maximum(values, noise) + scalar(eps, gram)
            powers = values[..., None, :] ** power
        return scatter(product(vectors * powers, transpose(vectors)), gram)

    def power_of(left: Any, right: Any) -> Any:
        number = max(len(jax.tree.leaves((left, right))), 1)
        power: Any = -0.5 / number if exponent is None else -jnp.asarray(exponent)
        # One power for each matrix, because `divide` stacks matrices of parameters with one and two
        # sides.
        return jax.tree.map(
            lambda x: jnp.full((len(x), 1, 1), scalar(power, x), x.dtype), (left, right)
        )

    pairs = list(map(power_of, *sides))
    powers = jax.tree.leaves([[pair[i] for pair in pairs] for i in (0, 1)])
    grams, structure = jax.tree.flatten(sides)
    return structure.unflatten(divide(root, grams, powers))


def precondition(x: jax.Array, left: Any, right: Any) -> jax.Array:
    """Multiplies matrices by the roots of both sides; () is that of a side without one."""
    x = x if isinstance(left, tuple) else product(left, x)
    return x if isinstance(right, tuple) else product(x, right)


def graft(direction: jax.Array, length: jax.Array, eps: ArrayLike = 1e-16) -> jax.Array:
    """Scales each matrix of `direction` to the Frobenius norm of its counterpart in `length`."""
    norms = [jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (length, direction)]
    # eps keeps a direction of zeros from being divided by 0.
    return direction * (norms[0] / (norms[1] + scalar(eps, direction)))
