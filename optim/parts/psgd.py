"""PSGD: preconditions matrices by Kronecker factors that are fitted to whiten them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import scalar
from optim.division import divide
from optim.dtypes import wide_zeros, widen
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, product, scatter, solve_triangular, transpose
from optim.parts.base import Part, gradient_of

__all__ = ["psgd"]


class PsgdState(NamedTuple):
    """The state of `psgd`.

    Attributes:
        count: the number of updates so far, int32.
        left: the upper triangular factor of the rows, [batch axes..., rows, rows].
        right: that of the columns, [batch axes..., columns, columns].
    """

    count: ArrayLike
    left: optax.Params
    right: optax.Params


def psgd(
    precond_lr: float = 1.0,
    init_scale: float | None = None,
    whiten: str = "update",
    seed: int = 0,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Whitens each matrix by two triangular factors that follow it from step to step (PSGD-Kron).

    With the update U and the upper triangular factors L and R of a matrix, one step is

        L, R <- L * c, R / c                      so that their largest elements are equal
        A  = L X R^T                              X is U, or the gradient
        B  = L^-T Z R^-1                          Z is drawn from a normal distribution
        L <- L - precond_lr * triu(A A^T - B B^T) L / |A A^T + B B^T|
        R <- R - precond_lr * triu(A^T A - B^T B) R / |A^T A + B^T B|
        D  = L^T L U R^T R

    where |.| is the spectral norm, estimated by one and a half power iterations. The factors fit
    L^T L and R^T R to the inverse roots of the covariances of U, as in Shampoo, without inverses
    of matrices.

    This is PSGD of modded-nanogpt's optimizer track (2026-05-27): after the bias-corrected momentum
    `optax.ema` and before `match_norm`, with `pin_radius` after the learning rate. The program also
    changes the elements of X at random by about their rounding errors, which is left out here.
    Of psgd_torch, the program of PSGD's author, it is the geometry "EQ", which has other estimates
    of the norms, more damping, and clips D. If X is U, the root mean square of D is about 1 once
    the factors fit; before, it can be far from it, and `match_norm` or another part should set the
    length.

    Args:
        precond_lr: the step size of the factors, in (0, 1]; a float, a traced scalar or, in a
            group, a schedule.
        init_scale: the factors are this times the identity at first; None for
            (mean of X^4)^(-1/32) of each first matrix.
        whiten: which X the factors are fitted to: "update", what the part is given, such as a
            momentum, or "gradient", the gradient of the chain.
        seed: of the random numbers, which depend on it, the number of the update and the place of
            the parameter in its group only: a resumed run draws what an uninterrupted one draws.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `whiten` is unknown; at init, a parameter is not a real matrix; at the update,
            `whiten` is "gradient" and no chain passes one.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from optim import parts
        >>> tx = optim.chain(
        ...     learning_rate=0.025,
        ...     before=[optax.ema(0.95), parts.psgd(), parts.match_norm()],
        ...     after=[parts.pin_radius()],
        ... )
        >>> params = {"kernel": jnp.eye(2)}
        >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
        >>> kernel = optax.apply_updates(params, updates)["kernel"]
        >>> round(float(jnp.linalg.norm(kernel)), 3)
        1.414

    References: Pooladzandi and Li, Curvature-Informed SGD via General Purpose Lie-Group
      Preconditioners, https://arxiv.org/abs/2402.04553; https://github.com/lixilinx/psgd_torch;
      https://github.com/KellerJordan/modded-nanogpt, records/track_3_optimization
    """
    if whiten not in ("update", "gradient"):
        raise ValueError(f"whiten must be 'update' or 'gradient', got {whiten!r}.")
    over = Matrices(matrices, "optim.parts.psgd")

    def init(params: optax.Params) -> PsgdState:
        over.declare(params)

        def start(zeros: list[jax.Array]) -> Sequence[list[jax.Array]]:
            return (
                zeros,
                [_eye(x, transpose(x)) for x in zeros],
                [_eye(transpose(x), x) for x in zeros],
            )

        _, left, right = over.map(start, [jax.tree.map(wide_zeros, params)])
        return PsgdState(jnp.zeros((), jnp.int32), left, right)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, PsgdState]:
        del params
        fitted = updates
        if whiten == "gradient":
            fitted = widen(gradient_of(extra, "parts.psgd with whiten='gradient'"))

        def move(
            moves: list[jax.Array], fits: list[jax.Array], lefts: list[Any], rights: list[Any]
        ) -> Sequence[list[jax.Array]]:
            tests = [probes(seed, state.count, i, x) for i, x in enumerate(fits)]
            precondition = partial(_precondition, precond_lr, init_scale, state.count == 0)
            found = divide(precondition, moves, fits, tests, lefts, rights)
            steps, lefts, rights = ([row[i] for row in found] for i in range(3))
            return steps, fits, lefts, rights

        steps, _, left, right = over.map(move, [updates, fitted], [state.left, state.right])
        count = jnp.asarray(optax.safe_increment(state.count))
        return steps, PsgdState(count, left, right)

    return Part(init, update, name="parts.psgd")


def probes(seed: int, count: ArrayLike, place: int, like: jax.Array) -> jax.Array:
    """Draws the matrices Z of an update, [n, rows, columns] as `like`.

    `count` is the number of updates before this one; `place`, that of parameters before this one.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), place)
    return scatter(jax.random.normal(key, like.shape, like.dtype), like)


def _eye(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns identities of the size of products X Y, which are 0, and with their sharding."""
    return product(x, y) + jnp.eye(x.shape[-2], dtype=x.dtype)


def _precondition(
    precond_lr: ArrayLike,
    init_scale: ArrayLike | None,
    first: jax.Array,
    update: jax.Array,
    x: jax.Array,
    test: jax.Array,
    left: jax.Array,
    right: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the directions of updates [n, rows, columns], and their new factors."""
    if not x.size:
        return update, left, right
    scale = jnp.mean(x**4, axis=(-2, -1), keepdims=True)
    scale = jnp.maximum(scale, 1e-24) ** (-1 / 32)
    if init_scale is not None:
        scale = jnp.full_like(scale, init_scale)
    balance = jnp.sqrt(_largest(right) / _largest(left))
    left = jnp.where(first, scale, balance) * left
    right = jnp.where(first, scale, 1 / balance) * right
    a = product(product(left, x), transpose(right))
    b = solve_triangular(right, solve_triangular(left, test, "left"), "right")
    left = _follow(left, product(a, transpose(a)), product(b, transpose(b)), precond_lr)
    right = _follow(right, product(transpose(a), a), product(transpose(b), b), precond_lr)
    inner = product(transpose(left), product(left, update))
    return product(product(inner, transpose(right)), right), left, right


def _follow(factor: jax.Array, fit: jax.Array, test: jax.Array, precond_lr: ArrayLike) -> jax.Array:
    """Moves a factor until `fit` and `test` are equal, as a multiple of itself."""
    size = scalar(precond_lr, factor) / _spectral_norm(fit + test)
    return factor - product(size * jnp.triu(fit - test), factor)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)


def _spectral_norm(x: jax.Array) -> jax.Array:
    """Estimates the spectral norms of positive semidefinite matrices [n, m, m], as [n, 1, 1].

    Power iteration begins with the longest column, and measures how much it lengthens the second
    iterate.
    """
    scale = _largest(x)
    x = x / jnp.where(scale > 0, scale, 1)
    longest = jnp.argmax(jnp.sum(x * x, axis=-2, keepdims=True), axis=-1, keepdims=True)
    column = product(x, jnp.take_along_axis(x, longest, axis=-1))
    column = column / jnp.linalg.norm(column, axis=-2, keepdims=True)
    return scale * jnp.linalg.norm(product(x, column), axis=-2, keepdims=True)
