"""PSGD: preconditions matrices by Kronecker factors that are fitted to whiten them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import Updated, moving_average, scalar
from optim.division import divide
from optim.dtypes import wide_zeros, widen
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, product, scatter, solve_triangular, transpose
from optim.parts.base import Part, check_option, passed


class PsgdState(NamedTuple):
    """The state of `psgd`."""

    # In the geometry "EQ", the factors are upper triangular and the bounds are ().

    count: ArrayLike  # the number of updates so far, int32
    left: optax.Params  # the factor of the rows, [batch axes..., rows, rows]
    right: optax.Params  # that of the columns, [batch axes..., columns, columns]
    left_bound: Any = ()  # of the curvature in the factor, [batch axes..., 1, 1]
    right_bound: Any = ()


def psgd(
    precond_lr: float = 1.0,
    init_scale: float | None = None,
    whiten: str = "update",
    seed: int = 0,
    geometry: Literal["EQ", "Q0.5EQ1.5"] = "EQ",
    damping: float | None = None,
    bound_decay: float | None = None,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Whitens each matrix by two factors that follow it from step to step (PSGD-Kron).

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

    The geometry "Q0.5EQ1.5" is the default of psgd_torch. Its factors are not triangular, and no
    system of equations is solved. For a matrix [m, n], one step is

        A <- L^T L (X + (damping + epsilon |X|) Z) R^T R,  epsilon the rounding error of the dtype
        l <- max(bound_decay * l + (1 - bound_decay) * b, b),  b = |A A^T| + n,   r likewise
        L <- L - precond_lr / l * (A A^T - n I) L
        R <- R - precond_lr / r * (A^T A - m I) R

    where |.| is estimated from 32 random vectors, and then a small rotation of each factor brings
    it closer to a symmetric one. Here precond_lr = 0.1 is usual. Differences from psgd_torch: it
    has a diagonal factor for a longer side (preconditioner_max_skew), draws when to balance the
    factors, which here is every update and leaves D as it is, and clips D.

    Args:
        precond_lr: the step size of the factors, in (0, 1]; a float, a traced scalar or, in a
            group, a schedule.
        init_scale: the factors are this times the identity at first; None for
            (mean of X^4)^(-1/32) of each first matrix, or, in the geometry "Q0.5EQ1.5",
            (mean of X^4 + damping^4)^(-1/16).
        whiten: which X the factors are fitted to: "update", what the part is given, such as a
            momentum, or "gradient", the gradient of the chain.
        seed: of the random numbers, which depend on it, the number of the update and the place of
            the parameter in its group only: a resumed run draws what an uninterrupted one draws.
        geometry: in which coordinates the factors move, "EQ" or "Q0.5EQ1.5".
        damping: in the geometry "Q0.5EQ1.5", the size of the noise that bounds D for small X; None
            for 1e-9.
        bound_decay: in that geometry, the decay of the bounds l and r; None for 0.9.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `whiten` or `geometry` is unknown, or there is a damping or a decay of bounds in
            the geometry "EQ"; at init, a parameter is not a real matrix; at the update, `whiten` is
            "gradient" and no chain passes one.

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
    check_option("whiten", whiten, ("update", "gradient"))
    check_option("geometry", geometry, ("EQ", "Q0.5EQ1.5"))
    triangular = geometry == "EQ"
    if triangular and not (damping is None and bound_decay is None):
        raise ValueError("damping and bound_decay belong to the geometry Q0.5EQ1.5: remove them.")
    over = Matrices(matrices, "optim.parts.psgd")

    def init(params: optax.Params) -> PsgdState:
        over.declare(params)

        def start(zeros: list[jax.Array]) -> Sequence[list[jax.Array]]:
            eyes = [_eye(x, transpose(x)) for x in zeros], [_eye(transpose(x), x) for x in zeros]
            bounds = [jnp.sum(x, (-2, -1), keepdims=True) for x in zeros]
            return zeros, *eyes, *(() if triangular else (bounds, bounds))

        _, *fields = over.map(start, [jax.tree.map(wide_zeros, params)])
        return PsgdState(jnp.zeros((), jnp.int32), *fields)

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        fitted = updates
        if whiten == "gradient":
            fitted = widen(passed(extra, "grad", "parts.psgd with whiten='gradient'"))
        rule = partial(_triangular, precond_lr)
        if not triangular:
            small = 1e-9 if damping is None else damping
            rule = partial(_rotated, precond_lr, small, 0.9 if bound_decay is None else bound_decay)

        def move(
            moves: list[jax.Array], fits: list[jax.Array], *kept: list[Any]
        ) -> Sequence[list[jax.Array]]:
            tests = [probes(seed, state.count, i, x) for i, x in enumerate(fits)]
            rows = [vectors(seed, state.count, i, x) for i, x in enumerate(fits)]
            drawn = [tests] if triangular else [tests, [x for x, _ in rows], [y for _, y in rows]]
            step = partial(_precondition, rule, init_scale, state.count == 0)
            found = divide(step, moves, fits, *kept, *drawn)
            steps, *news = ([row[i] for row in found] for i in range(1 + len(kept)))
            return steps, fits, *news

        kept = state[1:3] if triangular else state[1:]
        steps, _, *fields = over.map(move, [updates, fitted], kept)
        return steps, PsgdState(jnp.asarray(optax.safe_increment(state.count)), *fields)

    return Part(init, update, name="parts.psgd", once=True)


def probes(seed: int, count: ArrayLike, place: int, like: jax.Array) -> jax.Array:
    """Draws the matrices Z of an update, [n, rows, columns] as `like`."""
    # `count` is the number of updates before this one; `place`, that of parameters before this one.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), place)
    return scatter(jax.random.normal(key, like.shape, like.dtype), like)


def vectors(
    seed: int, count: ArrayLike, place: int, like: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws the random rows that estimate norms, [n, 32, rows] and [n, 32, columns]."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), place)
    pairs = zip(jax.random.split(jax.random.fold_in(key, 1)), like.shape[-2:], strict=True)
    left, right = (jax.random.normal(k, (len(like), 32, m), like.dtype) for k, m in pairs)
    return left, right


def _eye(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns identities of the size of products X Y, which are 0, and with their sharding."""
    return product(x, y) + jnp.eye(x.shape[-2], dtype=x.dtype)


def _precondition(
    rule: Callable[..., Any],
    init_scale: ArrayLike | None,
    first: jax.Array,
    update: jax.Array,
    x: jax.Array,
    left: jax.Array,
    right: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns directions of updates [n, rows, columns], and their new factors and bounds."""
    # `rest` are the bounds, if the geometry has any, and the random arrays.
    bounds = rest[: len(rest) // 2]  # 0 of 1 array, or 2 of 5
    if not x.size:
        return update, left, right, *bounds
    balance = jnp.sqrt(_largest(right) / _largest(left))
    scale = rule(x) if init_scale is None else jnp.full_like(balance, init_scale)
    left = jnp.where(first, scale, balance) * left
    right = jnp.where(first, scale, 1 / balance) * right
    left, right, *bounds = rule(x, left, right, *rest)
    inner = product(transpose(left), product(left, update))
    return product(product(inner, transpose(right)), right), left, right, *bounds


def _triangular(precond_lr: ArrayLike, x: jax.Array, *rest: jax.Array) -> Any:
    """Moves triangular factors by dL = E L; without them, returns their first scale."""
    if not rest:
        return jnp.maximum(jnp.mean(x**4, axis=(-2, -1), keepdims=True), 1e-24) ** (-1 / 32)
    left, right, test = rest
    a = product(product(left, x), transpose(right))
    b = solve_triangular(right, solve_triangular(left, test, "left"), "right")
    left = _follow(left, product(a, transpose(a)), product(b, transpose(b)), precond_lr)
    right = _follow(right, product(transpose(a), a), product(transpose(b), b), precond_lr)
    return left, right


def _follow(factor: jax.Array, fit: jax.Array, test: jax.Array, precond_lr: ArrayLike) -> jax.Array:
    """Moves a factor until `fit` and `test` are equal, as a multiple of itself."""
    size = scalar(precond_lr, factor) / _spectral_norm(fit + test)
    return factor - product(size * jnp.triu(fit - test), factor)


def _rotated(
    precond_lr: ArrayLike, damping: ArrayLike, decay: ArrayLike, x: jax.Array, *rest: jax.Array
) -> Any:
    """Moves factors by dL = L^0.5 E L^1.5; without them, returns their first scale."""
    if not rest:
        fourth = jnp.mean(x**4, axis=(-2, -1), keepdims=True) + scalar(damping, x) ** 4
        return fourth ** (-1 / 16)
    left, right, left_bound, right_bound, test, of_rows, of_columns = rest
    noisy = x + (scalar(damping, x) + jnp.finfo(x.dtype).eps * jnp.abs(x)) * test
    inner = product(transpose(left), product(left, noisy))
    a = product(product(inner, transpose(right)), right)

    def move(q: jax.Array, gram: jax.Array, bound: jax.Array, v: jax.Array, wanted: int) -> Any:
        diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None, :]
        size = _norm_of(gram, v, jnp.max(diagonal, axis=-1, keepdims=True)) + wanted
        bound = jnp.maximum(moving_average(bound, size, decay), size)
        q = q - scalar(precond_lr, q) / bound * (product(gram, q) - wanted * q)
        return _towards_symmetric(q, v), bound

    left, left_bound = move(left, product(a, transpose(a)), left_bound, of_rows, x.shape[-1])
    right, right_bound = move(right, product(transpose(a), a), right_bound, of_columns, x.shape[-2])
    return left, right, left_bound, right_bound


def _towards_symmetric(q: jax.Array, v: jax.Array) -> jax.Array:
    """Rotates factors [n, m, m] by at most 1/8, to second order, towards symmetric ones."""
    r = transpose(q) - q
    r = r / (_norm_of(r, v, _largest(r)) + jnp.finfo(q.dtype).tiny)
    rq = product(r, q)
    rrq = product(r, rq)
    first, second = (jnp.trace(y, axis1=-2, axis2=-1)[:, None, None] for y in (rq, rrq))
    best = jnp.minimum(-first / jnp.where(second < 0, second, -1), 1 / 8)
    angle = jnp.where(second < 0, best, 1 / 8)
    return q + angle * (rq + 0.5 * angle * rrq)


def _norm_of(x: jax.Array, v: jax.Array, scale: jax.Array) -> jax.Array:
    """Estimates spectral norms of [n, m, m], as [n, 1, 1], by random rows v [n, k, m]."""
    # The rows are turned towards the longest row of a matrix, and multiplied by it four times.
    tiny = jnp.finfo(x.dtype).tiny
    scale = scale + tiny
    x = x / scale
    longest = jnp.argmax(jnp.linalg.norm(x, axis=-1, keepdims=True), axis=-2, keepdims=True)
    row = jnp.take_along_axis(x, longest, axis=-2)
    v = row + jnp.sign(jnp.sum(row * v, axis=-1, keepdims=True)) * v
    for _ in range(2):
        v = product(v, x)
        v = product(v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + tiny), x)
    return scale * jnp.max(jnp.linalg.norm(v, axis=-1, keepdims=True), axis=-2, keepdims=True)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)


def _spectral_norm(x: jax.Array) -> jax.Array:
    """Estimates the spectral norms of semidefinite matrices [n, m, m], as [n, 1, 1]."""
    # They must be positive semidefinite. Power iteration begins with the longest column, and
    # measures how much it lengthens the second iterate.
    scale = _largest(x)
    x = x / jnp.where(scale > 0, scale, 1)
    longest = jnp.argmax(jnp.sum(x * x, axis=-2, keepdims=True), axis=-1, keepdims=True)
    column = product(x, jnp.take_along_axis(x, longest, axis=-1))
    column = column / jnp.linalg.norm(column, axis=-2, keepdims=True)
    return scale * jnp.linalg.norm(product(x, column), axis=-2, keepdims=True)
