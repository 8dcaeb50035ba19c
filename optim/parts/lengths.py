"""Parts that set lengths: of updates by those of the weights or of others, and of the weights."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import Updated, scalar
from optim.dtypes import widen
from optim.eigen import rescale as with_length_of
from optim.factories import with_known_extras
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.parts import base
from optim.parts.base import Part, at_least, check_count, dot, norm, of_matrices, passed

_PIN = base.Need(
    "keeps_norm",
    "after",
    "With by='output' it lengthens the updates of single outputs, and with them the weights of the"
    " matrix, whose norm that part keeps. Name it in `after`, or choose by='matrix'.",
)


def floor(
    ratio: float, by: str = "matrix", eps: float = 1e-8, matrices: MatrixSpec = None
) -> optax.GradientTransformationExtraArgs:
    """Makes updates longer whose ratio to their weights is below a floor.

    With the update U and the weights W, U is multiplied by max(1, ratio * norm(W) / norm(U)). It
    stands before the learning rate, so that the step is at least learning_rate * ratio of the
    weights.

    Args:
        ratio: the smallest ratio of the norms; a float, a traced scalar or, in a group, a schedule.
        by: "matrix", or "output" for each output of a matrix on its own. A chain with "output"
            needs a part that keeps the norms of the matrices, such as `pin_radius`, which takes
            back that the update of the whole matrix gets longer; its shape stays.
        eps: the smallest norm that is used.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `by` is unknown; at init, a parameter is not a real matrix.
    """
    axes = {"matrix": (-2, -1), "output": -2}
    base.check_option("by", by, tuple(axes))

    def lengthen(u: jax.Array, w: jax.Array) -> jax.Array:
        least = scalar(ratio, u) * at_least(norm(w, axes[by]), eps)
        return u * jnp.maximum(least / at_least(norm(u, axes[by]), eps), 1)

    needs = [_PIN] if by == "output" else []
    return of_matrices("parts.floor", matrices, lengthen, length="sets", needs=needs)


def match_norm(
    ratio: float = 1.0, eps: float = 1e-10, matrices: MatrixSpec = None
) -> optax.GradientTransformationExtraArgs:
    """Gives the updates of each matrix the norm of its weights (Hyperball).

    With the update U and the weights W, U is multiplied by ratio * norm(W) / norm(U). It stands
    before the learning rate, which then is the length of a step relative to that of the weights.

    Args:
        ratio: the ratio of the norms; a float, a traced scalar or, in a group, a schedule.
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

    return of_matrices("parts.match_norm", matrices, match, length="replaces", keeps_zeros=True)


def match_rms(
    rms: float = 0.2, eps: float = 1e-10, matrices: MatrixSpec = None
) -> optax.GradientTransformationExtraArgs:
    """Gives the elements of each matrix of updates a root mean square.

    With the update U, U is multiplied by rms / sqrt(mean of U^2). Adam's updates have one of about
    0.2 to 0.4, so that its learning rates and weight decays suit other directions as well.

    Args:
        rms: the root mean square; a float, a traced scalar or, in a group, a schedule.
        eps: the smallest root mean square by which is divided.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.

    Reference: Liu et al., Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982
    """

    def match(u: jax.Array, _: jax.Array) -> jax.Array:
        size = max(u.shape[-2] * u.shape[-1], 1)
        return u * (scalar(rms, u) / at_least(norm(u) / size**0.5, eps))

    return of_matrices("parts.match_rms", matrices, match, length="replaces")


class GraftState(NamedTuple):
    """The state of `graft`."""

    count: ArrayLike  # the number of updates so far, int32
    onto: optax.OptState  # the state of the other transformation


def graft(
    onto: optax.GradientTransformation,
    start: int = 1,
    eps: float = 1e-16,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Gives the updates of each matrix the norm that another optimizer's would have (grafting).

    With the update U, the gradient G of the chain and the direction A that `onto` makes of G, one
    step is

        D = U * norm(A) / (norm(U) + eps),   and D = A before update `start`

    so that learning rates tuned for `onto` suit U. Shampoo is grafted onto Adam, by `parts.adam`,
    or onto the gradient itself, by optax.identity. It stands before the learning rate.

    Args:
        onto: a part or a transformation of optax without a learning rate, whose norms are used; it
            has a state of its own, such as Adam's averages.
        start: the first update, counted from 1, with the direction of U, such as the `start` of
            `shampoo`.
        eps: added to the norm by which is divided.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `start` is not positive, or `onto` is a part that stands after the learning
            rate; at init, a parameter is not a real matrix; at the update, outside of
            `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from optim import parts
        >>> part = parts.graft(optax.identity())
        >>> grads, update = jnp.array([[6.0, 8.0]]), jnp.array([[2.0, 0.0]])
        >>> found, _ = part.update(update, part.init(update), grad=grads)
        >>> print(found)
        [[10.  0.]]

    Reference: Agarwal et al., Disentangling Adaptive Gradient Methods from Learning Rates,
      https://arxiv.org/abs/2002.11803
    """
    check_count("start", start)
    base.check_direction("parts.graft", "onto", onto)
    inner = with_known_extras(onto)
    over = Matrices(matrices, "optim.parts.graft")

    def init(params: optax.Params) -> GraftState:
        over.declare(params, again=False)
        return GraftState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        grads = passed(extra, "grad", "parts.graft")
        others, kept = inner.update(grads, state.onto, params, **extra)
        count = jnp.asarray(optax.safe_increment(state.count))

        def one(u: jax.Array, a: jax.Array) -> jax.Array:
            return jnp.where(count < start, a, with_length_of(u, a, eps))

        return over.each(one, updates, others), GraftState(count, kept)

    return Part(init, update, name="parts.graft", length="replaces")


def radial_brake(
    outward: float = 0.5, inward: float = 1.0, eps: float = 1e-12, matrices: MatrixSpec = None
) -> optax.GradientTransformationExtraArgs:
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

    return of_matrices("parts.radial_brake", matrices, brake)


class PinState(NamedTuple):
    """The state of `pin_radius`: the first norms, [batch axes...] for each parameter, or ()."""

    radius: Any


def pin_radius(
    radius: Literal["current", "initial"] = "current",
    radial: bool = False,
    eps: float = 1e-8,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the Frobenius norm of each matrix.

    With the weights W and the step S, it returns the step to R * (W + S) / norm(W + S), where R is
    the norm of W. It stands after the learning rate; with `match_norm` before it, it is Hyperball.
    Unless `radial`, weight decay before it has no effect on the norm, and a matrix of zeros stays
    zero.

    Args:
        radius: whether R is the norm of W before the step ("current", as the authors have it), or
            the norm before the first step ("initial"), which does not drift by rounding, and needs
            a number in the state for each matrix.
        radial: whether the norm follows the part of the step that is parallel to the weights, to
            first order: R is then norm(W) + <S, W> / norm(W). For "current" only.
        eps: the smallest norm that is used.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: `radius` is unknown, or "initial" with `radial`; at init, a parameter is not a
            real matrix.

    Reference: https://arxiv.org/abs/2606.16899
    """
    base.check_option("radius", radius, ("current", "initial"))
    if radius == "initial" and radial:
        raise ValueError("radial=True moves the norm, and radius='initial' keeps it: choose one.")
    over = Matrices(matrices, "optim.parts.pin_radius")

    def init(params: optax.Params) -> PinState:
        over.declare(params, again=False)
        if radius == "current":
            return PinState(())
        return PinState(over.map(lambda x: (x, [norm(w)[:, 0, 0] for w in x]), [widen(params)])[1])

    def pin(step: jax.Array, w: jax.Array, kept: jax.Array) -> jax.Array:
        to = at_least(kept, eps)
        if radial:
            to = at_least(to + dot(step, w) / to, eps)
        new = w + step
        return new * (to / at_least(norm(new), eps)) - w

    def move(
        steps: list[jax.Array], weights: list[jax.Array], *kept: list[jax.Array]
    ) -> Sequence[list[jax.Array]]:
        now = [x[:, None, None] for x in kept[0]] if kept else [norm(w) for w in weights]
        return list(map(pin, steps, weights, now)), weights

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        kept = [state.radius] if radius == "initial" else []
        steps, _weights = over.map(move, [updates, widen(params)], kept)
        return steps, state

    return Part(
        init,
        update,
        name="parts.pin_radius",
        place="after",
        keeps_norm=True,
        lets_decay=radial,
        keeps_zeros=not radial,  # a radius that follows the step grows from zero
    )
