"""Parts that set lengths: of updates by those of the weights, and of the weights."""

import jax
import jax.numpy as jnp

from optim.descent import scalar
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.parts.base import Part, at_least, dot, norm, of_matrices

__all__ = ["floor", "match_norm", "pin_radius", "radial_brake"]


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
        least = scalar(ratio, u) * at_least(norm(w, axes[by]), eps)
        return u * jnp.maximum(least / at_least(norm(u, axes[by]), eps), 1)

    return of_matrices(
        lengthen, Matrices(matrices, "optim.parts.floor"), name="parts.floor", length="sets"
    )


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
        return u * (scalar(ratio, u) * norm(w) / at_least(norm(u), eps))

    return of_matrices(
        match, Matrices(matrices, "optim.parts.match_norm"), name="parts.match_norm", length="sets"
    )


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
        share = dot(u, w) / at_least(dot(w, w), eps)
        factor = jnp.where(share < 0, scalar(outward, u), scalar(inward, u))
        return u + (factor - 1) * share * w

    return of_matrices(
        brake, Matrices(matrices, "optim.parts.radial_brake"), name="parts.radial_brake"
    )


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
        radius = at_least(norm(w), eps)
        if radial:
            radius = at_least(radius + dot(step, w) / radius, eps)
        new = w + step
        return new * (radius / at_least(norm(new), eps)) - w

    return of_matrices(
        pin,
        Matrices(matrices, "optim.parts.pin_radius"),
        name="parts.pin_radius",
        place="after",
        keeps_norm=True,
    )
