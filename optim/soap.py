"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, scalar, wide, wide_zeros
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, everywhere, product, scatter, transpose

__all__ = ["SoapState", "soap"]


class SoapState(NamedTuple):
    """What SOAP remembers.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the gradients, in the eigenbasis.
        variance: the mean of their squares, in the eigenbasis.
        left: the mean of G G^T, [batch axes..., rows, rows]; an empty tuple where that side is not
            rotated.
        right: the mean of G^T G, [batch axes..., columns, columns]; likewise.
        left_basis: the eigenvectors of `left`, as columns.
        right_basis: those of `right`.
    """

    count: jax.Array
    mean: Any
    variance: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


# An eigenvalue of a mean of G G^T is rounding where it is below this many machine epsilons of the
# largest: null spaces of 16x16 to 512x512 gave up to 2.
_SMALLEST_EIGENVALUE = 16

# An element of Q_L^T G Q_R is rounding below this many machine epsilons of its row and column:
# zeros of 16x16 to 512x512 gave up to 26.
_SMALLEST_ELEMENT = 32


class _Sides(NamedTuple):
    left: Any
    right: Any


def soap(
    learning_rate: optax.ScalarOrSchedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10_000,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs Adam in the slowly turning eigenbasis of Shampoo's preconditioner (SOAP).

    With the gradient G and the bases Q_L and Q_R, which are the eigenvectors of the means of G G^T
    and of G^T G, Adam sees Q_L^T G Q_R, and its step is turned back. As in the authors' program,
    the first update only finds the bases, and neither moves nor decays anything; later the bases
    follow, every `precondition_frequency` updates, by one power iteration and a QR decomposition,
    after the step.
    (The authors shrink the weights after the step, here it is one sum, as in AdamW.)

    A first gradient of 16x24 has 16 right singular vectors, and the other 8 columns of Q_R are
    arbitrary: an eigendecomposition returns whatever rounding makes of them, and the whole run
    depends on it. Here rounding does not choose. Where the gradients so far span no direction, the
    first basis is completed from the identity's columns, and later changes keep the columns they
    find. Elements of the turned gradients that are zero but for rounding do not move, where Adam
    would divide noise by noise. On gradients of full rank this is the authors' program.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before is batch
    (stacked layers). Parameters that are no matrices belong to another group.

    Where the defaults differ from the authors' program: it has weight_decay=0.01. It gives every
    axis of a parameter with more than two a basis of its own, or, with merge_dims, merges axes;
    here a parameter is always made of matrices.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        b1: the decay of the mean of gradients.
        b2: the decay of the mean of their squares.
        shampoo_beta: the decay of the means of G G^T and G^T G; None for `b2`.
        eps: added to the root of the squares.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        precondition_frequency: the number of updates between two changes of the bases.
        max_precond_dim: a longer side of a matrix is not rotated.
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; None for the last two.

    Returns:
        The optimizer.

    Raises:
        ValueError: the frequency is not positive, or matrices is unknown; at init, a parameter has
            fewer than two axes, is complex or does not fit `matrices`; inside shard_map, a gradient
            differs from device to device.

    Reference: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam,
      https://arxiv.org/abs/2409.11321
    """
    if precondition_frequency < 1:
        raise ValueError(
            f"precondition_frequency is {precondition_frequency}, but it is a number of updates, 1"
            " or more."
        )

    over = Matrices(matrices, "optim.soap")

    def init(params: Any) -> SoapState:
        over.declare(params)

        def one(zeros: jax.Array) -> tuple[Any, ...]:
            sides = _grams(zeros, max_precond_dim)
            eyes = jax.tree.map(
                lambda s: jnp.zeros_like(s) + jnp.eye(s.shape[-1], dtype=s.dtype), sides
            )
            return zeros, *sides, *eyes

        mean, *sides = over.map(one, 5, [jax.tree.map(wide_zeros, params)])
        variance = jax.tree.map(wide_zeros, params)
        return SoapState(jnp.zeros((), jnp.int32), mean, variance, *sides)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SoapState]:
        del params
        count = state.count

        def one(
            whole: jax.Array, mean: jax.Array, variance: jax.Array, *sides: Any
        ) -> tuple[Any, ...]:
            grams, bases = _Sides(*sides[:2]), _Sides(*sides[2:])
            keep1, keep2 = scalar(b1, whole), scalar(b2, whole)
            turned = _turn(whole, bases)
            first = count == 0
            mean = jnp.where(first, 0, keep1 * mean + (1 - keep1) * turned)
            variance = jnp.where(first, 0, keep2 * variance + (1 - keep2) * turned**2)
            rate = jnp.sqrt(bias_correction(b2, count, whole)) / bias_correction(b1, count, whole)
            direction = mean / (jnp.sqrt(variance) + scalar(eps, whole))
            if jax.tree.leaves(bases):
                direction = jnp.where(_is_noise(variance), 0, direction)
            step = rate * _turn_back(direction, bases)

            keep = scalar(b2 if shampoo_beta is None else shampoo_beta, whole)
            news = _grams(whole, max_precond_dim)
            grams = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, grams, news)
            due = jnp.where(count % precondition_frequency == 0, 1, 0)
            mean, variance, bases = jax.lax.switch(
                jnp.where(first, 2, due), [_stay, _follow, _begin], mean, variance, grams, bases
            )
            return step, mean, variance, *grams, *bases

        grads = jax.tree.map(wide, updates)
        steps, *parts = over.map(one, 7, [grads, state.mean, state.variance], state[3:])
        return steps, SoapState(jnp.asarray(optax.safe_increment(count)), *parts)

    tx = descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)

    def update_all(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        moves, new = tx.update(updates, state, params, **extra)
        first = state.direction.count == 0
        return jax.tree.map(lambda u: jnp.where(first, jnp.zeros_like(u), u), moves), new

    return optax.GradientTransformationExtraArgs(tx.init, update_all)


def _grams(g: jax.Array, longest: int) -> _Sides:
    left = product(g, transpose(g)) if g.shape[-2] <= longest else ()
    right = product(transpose(g), g) if g.shape[-1] <= longest else ()
    return _Sides(left, right)


def _turn(x: jax.Array, bases: _Sides) -> jax.Array:
    x = x if isinstance(bases.left, tuple) else product(transpose(bases.left), x)
    return x if isinstance(bases.right, tuple) else product(x, bases.right)


def _turn_back(x: jax.Array, bases: _Sides) -> jax.Array:
    x = x if isinstance(bases.left, tuple) else product(bases.left, x)
    return x if isinstance(bases.right, tuple) else product(x, transpose(bases.right))


def _stay(mean: Any, variance: Any, grams: _Sides, bases: _Sides) -> tuple[Any, Any, _Sides]:
    del grams
    return mean, variance, bases


def _is_noise(variance: jax.Array) -> jax.Array:
    """Finds the elements whose gradients are zero but for the rounding of `_turn`.

    Rounding leaves an error in proportion to the norms of an element's row and column, and, from
    the first of the two products, to the norm of the whole.
    """
    rows = jnp.sum(variance, axis=-1, keepdims=True)
    columns = jnp.sum(variance, axis=-2, keepdims=True)
    scale = rows + columns + jnp.mean(variance, axis=(-2, -1), keepdims=True)
    return variance <= (_SMALLEST_ELEMENT * jnp.finfo(variance.dtype).eps) ** 2 * scale


def _is_null(eigenvalues: jax.Array) -> jax.Array:
    """Finds the directions, [..., m], that the gradients so far do not span."""
    largest = jnp.max(eigenvalues, axis=-1, keepdims=True)
    return eigenvalues <= _SMALLEST_EIGENVALUE * jnp.finfo(eigenvalues.dtype).eps * largest


def _begin(mean: Any, variance: Any, grams: _Sides, bases: _Sides) -> tuple[Any, Any, _Sides]:
    """Finds the first bases; the mean is still zero, and needs no turning."""
    del bases
    return mean, variance, jax.tree.map(_eigenvectors, grams)


def _eigenvectors(gram: jax.Array) -> jax.Array:
    """Finds a basis of eigenvectors, [..., m, m], that rounding does not choose.

    In the null space every basis is one of eigenvectors. This one holds the eigenvectors of a fixed
    diagonal matrix, restricted to the null space: they turn as little as the null space does. A
    row that the gradient did not touch keeps its own column of the identity, to the bit.
    """
    size = gram.shape[-1]
    gram, like = everywhere(gram), gram
    untouched = jnp.diagonal(gram, axis1=-2, axis2=-1) == 0
    values, vectors = jnp.linalg.eigh(gram)
    null = _is_null(values)[..., None, :]
    spanned = jnp.where(null | untouched[..., :, None], 0, vectors)
    outside = jnp.eye(size, dtype=gram.dtype) - product(spanned, transpose(spanned))
    diagonal = jnp.arange(size, dtype=gram.dtype) / size + jnp.where(untouched, 3.0, 1.0)
    # Negative, so that the null space comes first, as it does in `vectors`; in it, untouched rows.
    completion = jnp.linalg.eigh(-product(outside * diagonal[..., None, :], outside))[1]
    basis = jnp.where(null, completion, spanned)
    # eigh leaves rounding where untouched rows have zeros and ones.
    rows = jnp.argsort(jnp.where(untouched, -jnp.arange(size), size), axis=-1)[..., None, :]
    own = jnp.take_along_axis(untouched[..., None, :], rows, axis=-1)
    ones = (jnp.arange(size)[:, None] == rows).astype(basis.dtype)
    basis = jnp.where(own, ones, jnp.where(untouched[..., :, None], 0, basis))
    # Eigenvalues fall, as they do after every later sort.
    return scatter(jnp.flip(basis, -1), like)


def _follow(mean: Any, variance: Any, grams: _Sides, bases: _Sides) -> tuple[Any, Any, _Sides]:
    """Turns the bases towards the eigenvectors, by one power iteration."""
    back = _turn_back(mean, bases)
    orders = jax.tree.map(_falling_order, grams, bases)
    if not isinstance(orders.left, tuple):
        variance = jnp.take_along_axis(variance, orders.left[..., :, None], axis=-2)
    if not isinstance(orders.right, tuple):
        variance = jnp.take_along_axis(variance, orders.right[..., None, :], axis=-1)

    def iterate(gram: jax.Array, basis: jax.Array, order: jax.Array) -> jax.Array:
        basis = jnp.take_along_axis(basis, order[..., None, :], axis=-1)
        return scatter(_power_iteration(everywhere(gram), everywhere(basis)), gram)

    bases = jax.tree.map(iterate, grams, bases, orders)
    return _turn(back, bases), variance, bases


def _power_iteration(gram: jax.Array, basis: jax.Array) -> jax.Array:
    """Multiplies a basis by the Gram matrix, and orthonormalises the columns in their order.

    The product maps columns in the null space to rounding errors. Such columns are taken from the
    old basis instead, and made orthogonal to all others.
    """
    powered = product(gram, basis)
    found, triangle = jnp.linalg.qr(powered)
    null = _is_null(jnp.abs(jnp.diagonal(triangle, axis1=-2, axis2=-1)))
    # Columns before that are nearly dependent magnify rounding, so that the triangle alone may miss
    # a column of noise. What such a column became lies in the null space, too.
    null |= _is_null(_rayleigh_quotients(gram, found))

    def complete() -> jax.Array:
        columns = jnp.where(null[..., None, :], basis, powered)
        null_last = jnp.argsort(null, axis=-1)
        columns = jnp.take_along_axis(columns, null_last[..., None, :], axis=-1)
        places = jnp.argsort(null_last, axis=-1)  # a column keeps its place, and so its variance
        return jnp.take_along_axis(jnp.linalg.qr(columns)[0], places[..., None, :], axis=-1)

    return jax.lax.cond(jnp.any(null), complete, lambda: found)


def _falling_order(gram: jax.Array, basis: jax.Array) -> jax.Array:
    eigenvalues = _rayleigh_quotients(gram, basis)
    # Rounding must not order the null space either: argsort keeps the order of equal numbers.
    eigenvalues = jnp.where(_is_null(eigenvalues), 0, eigenvalues)
    return jnp.argsort(eigenvalues, axis=-1, descending=True)


def _rayleigh_quotients(gram: jax.Array, basis: jax.Array) -> jax.Array:
    return jnp.sum(basis * product(gram, basis), axis=-2)
