"""Eigenvectors of Gram matrices: bases that no rounding error decides, and inverse roots."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import scalar
from optim.division import divide
from optim.dtypes import wide_zeros
from optim.matrices import Matrices, eigh, product, qr, replicate, scatter, transpose

# An eigenvalue of a mean of G G^T counts as zero below this many machine epsilons of the largest:
# zero eigenvalues measured up to 2, for sizes 16x16 to 512x512.
_SMALLEST_EIGENVALUE = 16

# An element of Q_L^T G Q_R counts as zero below this many machine epsilons of its row and column:
# elements that are zero in exact arithmetic measured up to 26, for sizes 16x16 to 512x512.
_SMALLEST_ELEMENT = 32


class Sides(NamedTuple):
    """Values for the two sides of one parameter's matrices; () for a side that is not rotated."""

    left: Any
    right: Any


def of_sides(parameters: list[Sides]) -> tuple[list[Any], list[Any]]:
    """Returns the values of the left sides of all parameters, and those of the right ones."""
    return [x.left for x in parameters], [x.right for x in parameters]


def grams_of_sides(x: jax.Array, max_size: int = 2**31, sides: str = "both") -> Sides:
    """Returns X X^T and X^T X of X [..., rows, columns]; () for a side that is too long."""
    # Both are () for matrices without elements.
    if not x.size:  # the largest eigenvalue would be a maximum over nothing, which raises
        return Sides((), ())
    if sides == "shorter":
        max_size = min(max_size, *x.shape[-2:])
    left = product(x, transpose(x)) if x.shape[-2] <= max_size else ()
    return Sides(left, product(transpose(x), x) if x.shape[-1] <= max_size else ())


def first_sides(
    over: Matrices, params: optax.Params, grams_of: Callable[[jax.Array], Sides]
) -> list[Any]:
    """Makes the state before the first gradient: zeros, Gram matrices of zeros, identities."""
    # Returns zeros like the parameters, the Gram matrices of left and right sides, and their bases.

    def start(zeros: list[jax.Array]) -> Sequence[Any]:
        grams = of_sides(list(map(grams_of, zeros)))
        eye = jax.tree.map(lambda s: jnp.zeros_like(s) + jnp.eye(s.shape[-1], dtype=s.dtype), grams)
        return zeros, *grams, *eye

    return over.map(start, [jax.tree.map(wide_zeros, params)])


def turn(x: jax.Array, bases: Sides) -> jax.Array:
    """Computes Q_L^T X Q_R for matrices X, [..., rows, columns]."""
    return precondition(x, jax.tree.map(transpose, bases.left), bases.right)


def turn_back(x: jax.Array, bases: Sides) -> jax.Array:
    """Computes Q_L X Q_R^T for matrices X, [..., rows, columns]."""
    return precondition(x, bases.left, jax.tree.map(transpose, bases.right))


def is_noise(variance: jax.Array) -> jax.Array:
    """Finds the elements whose gradients are zero up to the rounding errors of `turn`."""
    # The rounding error of an element is proportional to the norms of its row and column and, after
    # the first of the two products, to that of the matrix. `variance` are means of squares.
    rows = jnp.sum(variance, axis=-1, keepdims=True)
    columns = jnp.sum(variance, axis=-2, keepdims=True)
    scale = rows + columns + jnp.mean(variance, axis=(-2, -1), keepdims=True)
    return variance <= (_SMALLEST_ELEMENT * jnp.finfo(variance.dtype).eps) ** 2 * scale


def first_bases(grams: list[Sides]) -> list[Sides]:
    """Computes the eigenvectors of the Gram matrices of all parameters; see `eigenvectors`."""
    leaves, structure = jax.tree.flatten(grams)
    return structure.unflatten(divide(eigenvectors, leaves))


def next_bases(
    grams: list[Sides], bases: list[Sides], sort: bool = True
) -> tuple[list[Sides], list[Sides]]:
    """Rotates bases towards the eigenvectors by a power iteration and a QR decomposition."""
    # Returns the new bases and, for each, the order into which its columns were sorted before,
    # which is () everywhere without `sort`.
    orders = jax.tree.map(falling_order, grams, bases) if sort else []
    structure = jax.tree.structure(grams)

    def iterate(gram: jax.Array, basis: jax.Array, *order: jax.Array) -> jax.Array:
        for indices in order:
            basis = jnp.take_along_axis(basis, indices[..., None, :], axis=-1)
        return scatter(power_iteration(replicate(gram), replicate(basis)), gram)

    columns = [jax.tree.leaves(x) for x in ((grams, bases, orders) if sort else (grams, bases))]
    found = structure.unflatten(divide(iterate, *columns))
    return found, orders if sort else [Sides((), ()) for _ in grams]


def sort_elements(x: jax.Array, order: Sides) -> jax.Array:
    """Sorts rows and columns of matrices, [..., rows, columns], by the orders of their sides."""
    if not isinstance(order.left, tuple):
        x = jnp.take_along_axis(x, order.left[..., :, None], axis=-2)
    if not isinstance(order.right, tuple):
        x = jnp.take_along_axis(x, order.right[..., None, :], axis=-1)
    return x


def _is_null(eigenvalues: jax.Array) -> jax.Array:
    """Finds the directions, [..., m], that the gradients so far do not span."""
    largest = jnp.max(eigenvalues, axis=-1, keepdims=True)
    return eigenvalues <= _SMALLEST_EIGENVALUE * jnp.finfo(eigenvalues.dtype).eps * largest


def eigenvectors(gram: jax.Array) -> jax.Array:
    """Returns orthonormal eigenvectors of [..., m, m], in falling order of eigenvalues."""
    # In the null space any basis would do. To be independent of rounding errors, it is that of a
    # fixed diagonal matrix restricted to the null space, which changes as little as the null space
    # does. A row without gradients keeps its column of the identity, bit for bit.
    size = gram.shape[-1]
    gram, like = replicate(gram), gram
    # The diagonal of a mean of G G^T is 0 only for rows whose gradients were all 0.
    untouched = jnp.diagonal(gram, axis1=-2, axis2=-1) == 0
    values, vectors = eigh(gram)
    null = _is_null(values)[..., None, :]
    spanned = jnp.where(null | untouched[..., :, None], 0, vectors)
    outside = jnp.eye(size, dtype=gram.dtype) - product(spanned, transpose(spanned))
    # Distinct, so that its eigenvectors are unique, and at least 1, unlike the zeros of the span.
    diagonal = jnp.arange(size, dtype=gram.dtype) / size + jnp.where(untouched, 3.0, 1.0)
    # eigh sorts in rising order: negated, the null space is first, and untouched rows first in it.
    completion = eigh(-product(outside * diagonal[..., None, :], outside))[1]
    basis = jnp.where(null, completion, spanned)
    # eigh leaves rounding errors in untouched rows, whose exact entries are zeros and ones.
    rows = jnp.argsort(jnp.where(untouched, -jnp.arange(size), size), axis=-1)[..., None, :]
    is_untouched = jnp.take_along_axis(untouched[..., None, :], rows, axis=-1)
    ones = (jnp.arange(size)[:, None] == rows).astype(basis.dtype)
    basis = jnp.where(is_untouched, ones, jnp.where(untouched[..., :, None], 0, basis))
    # In falling order of the eigenvalues, as after every later sort.
    return scatter(jnp.flip(basis, -1), like)


def power_iteration(gram: jax.Array, basis: jax.Array) -> jax.Array:
    """Multiplies a basis [..., m, m] by the Gram matrix and orthonormalizes its columns."""
    # They are orthonormalized in order. The product maps columns in the null space to rounding
    # errors. Such columns are taken from the old basis instead and made orthogonal to all others.
    powered = product(gram, basis)
    found, triangle = qr(powered)
    null = _is_null(jnp.abs(jnp.diagonal(triangle, axis1=-2, axis2=-1)))
    # Nearly dependent earlier columns amplify rounding errors, so the triangle alone may miss a
    # column of noise. QR turns it into a column in the null space, whose Rayleigh quotient is 0.
    null |= _is_null(_rayleigh_quotients(gram, found))

    def complete() -> jax.Array:
        columns = jnp.where(null[..., None, :], basis, powered)
        null_last = jnp.argsort(null, axis=-1)
        columns = jnp.take_along_axis(columns, null_last[..., None, :], axis=-1)
        # Columns return to their places, to which Adam's variances belong.
        places = jnp.argsort(null_last, axis=-1)
        return jnp.take_along_axis(qr(columns)[0], places[..., None, :], axis=-1)

    return jax.lax.cond(jnp.any(null), complete, lambda: found)


def falling_order(gram: jax.Array, basis: jax.Array) -> jax.Array:
    """Returns the indices of columns in falling order of their eigenvalues, int [..., m]."""
    # The columns, [..., m, m], are orthonormal and close to eigenvectors of `gram`.
    eigenvalues = _rayleigh_quotients(gram, basis)
    # Zeros keep their order in argsort, so that rounding errors do not sort the null space.
    eigenvalues = jnp.where(_is_null(eigenvalues), 0, eigenvalues)
    return jnp.argsort(eigenvalues, axis=-1, descending=True)


def _rayleigh_quotients(gram: jax.Array, basis: jax.Array) -> jax.Array:
    return jnp.sum(basis * product(gram, basis), axis=-2)


# Inverse roots, with which Shampoo preconditions, and grafting.


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

    def power_of(*grams: Any) -> Any:
        number = max(len(jax.tree.leaves(grams)), 1)
        power: Any = -0.5 / number if exponent is None else -jnp.asarray(exponent)
        # One power for each matrix: `divide` stacks those of parameters with one and two sides.
        return jax.tree.map(lambda x: jnp.full((len(x), 1, 1), scalar(power, x), x.dtype), grams)

    pairs = list(map(power_of, *sides))
    powers = jax.tree.leaves([[pair[i] for pair in pairs] for i in (0, 1)])
    grams, structure = jax.tree.flatten(sides)
    return structure.unflatten(divide(root, grams, powers))


def precondition(x: jax.Array, left: Any, right: Any) -> jax.Array:
    """Multiplies matrices from both sides, by roots or bases; () is that of a side without one."""
    x = x if isinstance(left, tuple) else product(left, x)
    return x if isinstance(right, tuple) else product(x, right)


def rescale(direction: jax.Array, length: jax.Array, eps: ArrayLike = 1e-16) -> jax.Array:
    """Scales each matrix of `direction` to the Frobenius norm of its counterpart in `length`."""
    norms = [jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (length, direction)]
    # eps keeps a direction of zeros from being divided by 0.
    return direction * (norms[0] / (norms[1] + scalar(eps, direction)))
