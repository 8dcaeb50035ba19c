"""Parts of optimizers of matrices, which `optim.chain` composes.

A part is an optax transformation. Its updates are what the part before it returned: directions of
ascent before the learning rate, and steps, which are added to the parameters, after it.

The matrices of a parameter are its last two axes, [inputs, outputs] as in flax, and every axis
before them is batch, unless `matrices` says otherwise; see `optim.layouts`. Programs in torch store
[outputs, inputs]: what they call a row is an output here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import average_updates, moving_average, scalar
from optim.dtypes import wide_zeros, widen
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.newton_schulz import length_of_factors, polar_factors, polynomials, shape_factor

__all__ = [
    "cautious_decay",
    "floor",
    "match_norm",
    "momentum",
    "normalize",
    "pin_radius",
    "polar",
    "radial_brake",
]

Part = optax.GradientTransformationExtraArgs


class MomentumState(NamedTuple):
    """The state of `momentum`: the mean of the gradients, shaped like the parameters."""

    momentum: optax.Params


def momentum(decay: float = 0.95, nesterov: bool = True) -> Part:
    """Averages the updates over the steps.

    With the update G, one step is

        M <- decay * M + (1 - decay) * G
        D  = (1 - decay) * G + decay * M     (nesterov; else D = M)

    Args:
        decay: in [0, 1); a float, a traced scalar or, in a group, a schedule.
        nesterov: whether the update is averaged into the momentum a second time.

    Returns:
        The part.

    Example:
        >>> import jax.numpy as jnp
        >>> from optim import parts
        >>> part = parts.momentum(0.5)
        >>> direction, state = part.update(jnp.ones(1), part.init(jnp.zeros(1)))
        >>> float(state.momentum[0]), float(direction[0])
        (0.5, 0.75)
    """

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(jax.tree.map(wide_zeros, params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **_: Any
    ) -> tuple[optax.Updates, MomentumState]:
        del params
        mixed, moments = average_updates(state.momentum, updates, decay, nesterov)
        return mixed, MomentumState(moments)

    return Part(init, update)


def polar(
    polynomial: str | Sequence[Any] = "jordan",
    steps: int = 5,
    norm: str = "frobenius",
    scale: str = "original",
    eps: float = 1e-7,
    dtype: str | None = None,
    matrices: MatrixSpec = None,
) -> Part:
    """Replaces each matrix by an approximation of its polar factor, by Newton-Schulz steps.

    Args:
        polynomial: the coefficients of the steps, as `ns_coefficients` of `optim.muon`: a name, a
            triple (a, b, c) for all steps, or a triple for each step.
        steps: the number of steps.
        norm: by which a matrix X is divided first: "frobenius", or "gram", the square root of the
            Frobenius norm of X X^T, which is smaller and still at least the largest singular value.
        scale: the factor for the shape of the matrix, as in `optim.muon`.
        eps: the smallest norm by which a matrix is divided.
        dtype: the dtype of the steps, such as "bfloat16"; None for that of the updates.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: an argument is unknown; at init, a parameter is not a real matrix.

    References: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    if norm not in ("frobenius", "gram"):
        raise ValueError(f"norm must be 'frobenius' or 'gram', got {norm!r}.")
    triples = polynomials(polynomial, steps)
    over = Matrices(matrices, "optim.parts.polar")
    shape_factor(scale, 1, 1)  # raises on an unknown name here, and not at the first update

    def init(params: optax.Params) -> optax.EmptyState:
        over.declare(params, length=partial(length_of_factors, scale=scale))
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **_: Any
    ) -> tuple[optax.Updates, Any]:
        del params
        return polar_factors(over, updates, triples, scale, eps, dtype, norm), state

    return Part(init, update)


class NormalizeState(NamedTuple):
    """The state of `normalize`: the mean squares, [batch axes..., outputs] for each parameter."""

    variance: optax.Params


def normalize(b2: float = 0.95, eps: float = 1e-10, matrices: MatrixSpec = None) -> Part:
    """Divides each output's updates by the root of their mean square over the steps (NorMuon).

    With the update U of a matrix [inputs, outputs] and the mean V over the inputs, one step is

        V <- b2 * V + (1 - b2) * mean over inputs of U^2
        D  = U / (sqrt(V) + eps)
        D <- D * norm(U) / norm(D)

    so that the length of the update stays what it was. It stands after `polar`, whose outputs
    have updates of different lengths if the matrix is not square.

    Args:
        b2: the decay of the mean squares; a float, a traced scalar or, in a group, a schedule.
        eps: added to the root of the mean squares.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.

    Reference: Li et al., NorMuon, https://arxiv.org/abs/2510.05491
    """
    over = Matrices(matrices, "optim.parts.normalize")

    def init(params: optax.Params) -> NormalizeState:
        def start(arrays: list[jax.Array]) -> Sequence[list[jax.Array]]:
            return arrays, [_mean_square(x) for x in arrays]

        _, variance = over.map(start, [jax.tree.map(wide_zeros, params)])
        return NormalizeState(variance)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **_: Any
    ) -> tuple[optax.Updates, NormalizeState]:
        del params

        def one(x: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array]:
            variance = moving_average(variance, _mean_square(x), scalar(b2, x))
            divided = x / (jnp.sqrt(variance) + scalar(eps, x))[:, None, :]
            return divided * (_norm(x) / _at_least(_norm(divided), eps)), variance

        def change(
            arrays: list[jax.Array], variances: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            rows = list(map(one, arrays, variances))
            return [x for x, _ in rows], [v for _, v in rows]

        moves, variance = over.map(change, [updates], [state.variance])
        return moves, NormalizeState(variance)

    return Part(init, update)


def floor(ratio: float, by: str = "matrix", eps: float = 1e-8, matrices: MatrixSpec = None) -> Part:
    """Makes updates longer whose ratio to their weights is below a floor.

    With the update U and the weights W, U is multiplied by max(1, ratio * norm(W) / norm(U)). It
    stands before the learning rate, so that the step is at least learning_rate * ratio of the
    weights.

    Args:
        ratio: the smallest ratio of the norms; a float, a traced scalar or, in a group, a schedule.
        by: "matrix", or "output" for each output of a matrix on its own.
        eps: the smallest norm that is used.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `by` is unknown; at init, a parameter is not a real matrix.
    """
    axes = {"matrix": (-2, -1), "output": -2}
    if by not in axes:
        raise ValueError(f"by must be 'matrix' or 'output', got {by!r}.")

    def lengthen(u: jax.Array, w: jax.Array) -> jax.Array:
        least = scalar(ratio, u) * _at_least(_norm(w, axes[by]), eps)
        return u * jnp.maximum(least / _at_least(_norm(u, axes[by]), eps), 1)

    return _of_matrices(lengthen, Matrices(matrices, "optim.parts.floor"))


def match_norm(ratio: float = 1.0, eps: float = 1e-10, matrices: MatrixSpec = None) -> Part:
    """Gives the updates of each matrix the norm of its weights (Hyperball).

    With the update U and the weights W, U is multiplied by ratio * norm(W) / norm(U). It stands
    before the learning rate, which then is the length of a step relative to that of the weights.

    Args:
        ratio: of the norms; a float, a traced scalar or, in a group, a schedule.
        eps: the smallest norm by which is divided.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.

    Reference: https://arxiv.org/abs/2606.16899
    """

    def match(u: jax.Array, w: jax.Array) -> jax.Array:
        return u * (scalar(ratio, u) * _norm(w) / _at_least(_norm(u), eps))

    return _of_matrices(match, Matrices(matrices, "optim.parts.match_norm"))


def radial_brake(
    outward: float = 0.5, inward: float = 1.0, eps: float = 1e-12, matrices: MatrixSpec = None
) -> Part:
    """Scales the part of an update that is parallel to the weights of its matrix.

    It stands before the learning rate, where an update against the weights makes them longer.

    Args:
        outward: the factor of the parallel part if the step makes the weights longer; a float, a
            traced scalar or, in a group, a schedule.
        inward: the factor if the step makes them shorter.
        eps: the smallest squared norm by which is divided.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.
    """

    def brake(u: jax.Array, w: jax.Array) -> jax.Array:
        share = _dot(u, w) / _at_least(_dot(w, w), eps)
        factor = jnp.where(share < 0, scalar(outward, u), scalar(inward, u))
        return u + (factor - 1) * share * w

    return _of_matrices(brake, Matrices(matrices, "optim.parts.radial_brake"))


def pin_radius(radial: bool = False, eps: float = 1e-8, matrices: MatrixSpec = None) -> Part:
    """Keeps the Frobenius norm of each matrix.

    With the weights W and the step S, it returns the step to R * (W + S) / norm(W + S), where R is
    the norm of W. It stands after the learning rate; with `match_norm` before it, it is Hyperball.
    Weight decay before it has no effect on the norm, and a matrix of zeros stays zero.

    Args:
        radial: whether the norm follows the part of the step that is parallel to the weights, to
            first order: R is then norm(W) + <S, W> / norm(W).
        eps: the smallest norm that is used.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.

    Reference: https://arxiv.org/abs/2606.16899
    """

    def pin(step: jax.Array, w: jax.Array) -> jax.Array:
        radius = _at_least(_norm(w), eps)
        if radial:
            radius = _at_least(radius + _dot(step, w) / radius, eps)
        new = w + step
        return new * (radius / _at_least(_norm(new), eps)) - w

    return _of_matrices(pin, Matrices(matrices, "optim.parts.pin_radius"))


def cautious_decay(
    rate: float, around: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Decays the weights whose step makes them smaller (cautious weight decay).

    With the step S and the weights W, weights with S * W < 0 are multiplied by
    1 - learning_rate * rate after the step. It stands after the learning rate.

    Args:
        rate: the weight decay; a float, a traced scalar or, in a group, a schedule.
        around: a part that changes the step first, such as `pin_radius`: the weights are chosen by
            the step that it is given, and decay after the one that it returns.

    Returns:
        The part.

    Reference: https://arxiv.org/abs/2510.12402
    """
    inner = optax.with_extra_args_support(around or optax.identity())

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        if "learning_rate" not in extra:
            raise ValueError(
                "parts.cautious_decay is a part of optim.chain, which passes it the learning rate:"
                " name it in `after`."
            )
        steps, state = inner.update(updates, state, params, **extra)

        def decay(given: jax.Array, step: jax.Array, w: jax.Array) -> jax.Array:
            kept = 1 - scalar(extra["learning_rate"], w) * scalar(rate, w)
            return (w + step) * jnp.where(given * w < 0, kept, 1) - w

        return jax.tree.map(decay, updates, steps, params), state

    return Part(inner.init, update)


def _of_matrices(change: Callable[[jax.Array, jax.Array], jax.Array], over: Matrices) -> Part:
    """Makes a part without a state of a function of updates and weights [n, rows, columns]."""

    def init(params: optax.Params) -> optax.EmptyState:
        over.layouts(params)  # raises where a parameter is no matrix
        return optax.EmptyState()

    def both(updates: list[jax.Array], weights: list[jax.Array]) -> Sequence[list[jax.Array]]:
        return list(map(change, updates, weights)), weights

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **_: Any
    ) -> tuple[optax.Updates, Any]:
        moves, _ = over.map(both, [updates, widen(params)])
        return moves, state

    return Part(init, update)


def _mean_square(x: jax.Array) -> jax.Array:
    """Returns the mean square of each output, [n, outputs]; 0 for one without inputs."""
    return jnp.sum(jnp.square(x), axis=-2) / max(x.shape[-2], 1)


def _norm(x: jax.Array, axes: int | tuple[int, int] = (-2, -1)) -> jax.Array:
    return jnp.linalg.norm(x, axis=axes, keepdims=True)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def _at_least(x: jax.Array, eps: float) -> jax.Array:
    return jnp.maximum(x, scalar(eps, x))
