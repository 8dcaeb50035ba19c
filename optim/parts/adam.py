"""Parts of Adam's family that optax does not have, or not as their authors define them."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import Updated, average_or_add, correction, map_unzip, moving_average, scalar
from optim.descent import bias_correction as mean_correction
from optim.dtypes import compute_dtype, wide_zeros
from optim.parts.base import Part, check_dtype, check_option, passed


class AdamState(NamedTuple):
    """The state of `adam`."""

    # the number of updates so far, int32; () without `bias_correction`
    count: ArrayLike | tuple[()]
    mean: Any  # of the updates, shaped like the parameters; an empty tuple without `b1`
    variance: optax.Params  # the mean of the squares


def adam(
    b1: float | None = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    bias_correction: bool = True,
    nesterov: bool = False,
    state_dtype: str | None = None,
    squares: Literal["update", "gradient"] = "update",
) -> optax.GradientTransformationExtraArgs:
    """Computes the direction of Adam, with or without the correction of its averages.

    With the gradient G, one step is

        M <- b1 * M + (1 - b1) * G
        V <- b2 * V + (1 - b2) * G^2
        D  = M / (sqrt(V) + eps)

    With `bias_correction`, M and V are divided by 1 - b1^t and 1 - b2^t before the last line, where
    t counts the updates from 1; this is optax.scale_by_adam, which has no other form. Without it,
    the first steps are (1 - b1) / sqrt(1 - b2) times as long, and become as long as with it after
    about 1 / (1 - b2) updates: the Adam of many short training runs.

    Args:
        b1: the decay of the mean; a float, a traced scalar or, in a group, a schedule. None for the
            update itself as M, which a part before this one has averaged, such as optax.ema.
        b2: the decay of the mean of squares. At 1 it is a sum without bias correction, as in
            AdaGrad.
        eps: added to the root of the mean of squares.
        bias_correction: whether to correct that both averages begin at 0.
        nesterov: whether the gradient is averaged into M a second time, as in NAdam; M is then
            corrected for t + 1 updates, and the gradient for t, as in optax.
        state_dtype: the dtype in which both averages are stored between the steps, such as
            "bfloat16", as torch's fused AdamW has them for a parameter in bfloat16; None for the
            parameter's dtype, at least float32. A step computes with the averages before they are
            rounded to it. In bfloat16 a b2 above .99 loses most of what is added.
        squares: whether V averages the squares of the update or those of the gradient of the chain,
            as after a part that has averaged the update.

    Returns:
        The part.

    Raises:
        ValueError: `state_dtype` or `squares` is unknown, or nesterov has no `b1`; at the update,
            with the squares of the gradient, outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp
        >>> from optim import parts
        >>> part = parts.adam(b1=0.5, b2=0.75, bias_correction=False)
        >>> direction, _ = part.update(jnp.full(1, 3.0), part.init(jnp.zeros(1)))
        >>> print(direction[0].round(3))  # 0.5 * 3 / sqrt(0.25 * 9)
        1.0

    References: Kingma and Ba, Adam, https://arxiv.org/abs/1412.6980; Dozat, Incorporating Nesterov
      Momentum into Adam, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ
    """
    check_dtype("state_dtype", state_dtype)
    check_option("squares", squares, ("update", "gradient"))
    if nesterov and b1 is None:
        raise ValueError("nesterov averages into the mean: give b1, or remove nesterov.")

    def init(params: optax.Params) -> AdamState:
        count = jnp.zeros((), jnp.int32) if bias_correction else ()
        zeros = partial(wide_zeros, dtype=state_dtype)
        mean = () if b1 is None else jax.tree.map(zeros, params)
        return AdamState(count, mean, jax.tree.map(zeros, params))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        count: Any = optax.safe_increment(state.count) if bias_correction else ()
        grads = updates if squares == "update" else passed(extra, "grad", "parts.adam")
        keep: Any = b1  # read only where there are means

        def corrected(x: jax.Array, later: int = 0) -> jax.Array:
            return x / mean_correction(keep, count + later, x) if bias_correction else x

        def one(u: jax.Array, g: jax.Array, v: jax.Array, *means: jax.Array) -> Any:
            kept, news = v.dtype, [moving_average(m, u, keep) for m in means]
            v = average_or_add(v, jnp.square(g), b2)
            ahead = corrected(news[0], later=int(nesterov)) if means else u
            if nesterov:
                ahead = moving_average(ahead, corrected(u), keep)
            unbiased = v / correction(b2, count, v) if bias_correction else v
            move = ahead / (jnp.sqrt(unbiased) + scalar(eps, u))
            return move, *(x.astype(kept) for x in (v, *news))

        means = [] if b1 is None else [state.mean]
        trees = updates, grads, state.variance, *means
        moves, variance, *means = map_unzip(one, 2 + len(means), *trees)
        return moves, AdamState(count, means[0] if means else (), variance)

    return Part(init, update, name="parts.adam", once=True)


class LapropState(NamedTuple):
    """The state of `laprop`."""

    count: ArrayLike  # the number of updates so far, int32
    rate: jax.Array  # the mean of the learning rates, a scalar
    mean: optax.Params  # of learning rate times normalized gradient
    variance: optax.Params  # the mean of the squares of the gradients


def laprop(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-15
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients that have been divided by the root of their mean square (LaProp).

    Adam divides the mean of the gradients; LaProp divides each gradient and averages the quotients.
    With the gradient G, the learning rate R and the number of the update t, one step is

        V <- b2 * V + (1 - b2) * G^2
        U  = G / (sqrt(V / (1 - b2^t)) + eps)
        M <- b1 * M + (1 - b1) * R * U
        r <- b1 * r + (1 - b1) * R
        D  = M / r

    As in the authors' program, a quotient counts in the mean with the learning rate of its step. At
    a constant learning rate, this is the usual correction: D is the mean of U over 1 - b1^t. D is 0
    as long as the learning rate was.

    Differences from the authors' program: at a learning rate of exactly 0, which leaves the
    weights unchanged here, it adds -M to them. Its weight decay is not multiplied by the learning
    rate; see `decay` for a decay that is. Its options amsgrad and centered do not exist here.

    Args:
        b1: the decay of the mean; a float, a traced scalar or, in a group, a schedule.
        b2: the decay of the mean of squares.
        eps: added to the root of the mean of squares.

    Returns:
        The part.

    Raises:
        ValueError: at the update, if it is called outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, optim
        >>> from optim import parts
        >>> tx = optim.chain(0.1, before=[parts.laprop()])
        >>> params = jnp.zeros(2)
        >>> updates, _ = tx.update(jnp.array([3.0, -5.0]), tx.init(params), params)
        >>> print(updates.round(3))
        [-0.1  0.1]

    Reference: Ziyin, Wang and Ueda, LaProp: Separating Momentum and Adaptivity in Adam,
      https://arxiv.org/abs/2002.04839
    """

    def init(params: optax.Params) -> LapropState:
        mean, variance = (jax.tree.map(wide_zeros, params) for _ in range(2))
        rate = jnp.zeros((), compute_dtype(params))
        return LapropState(jnp.zeros((), jnp.int32), rate, mean, variance)

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        given = scalar(passed(extra, "learning_rate", "parts.laprop"), state.rate)
        count = optax.safe_increment(state.count)
        rate = moving_average(state.rate, given, b1)

        def one(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            v = moving_average(v, jnp.square(g), b2)
            unit = g / (jnp.sqrt(v / mean_correction(b2, count, g)) + scalar(eps, g))
            m = moving_average(m, scalar(given, g) * unit, b1)
            return m / scalar(jnp.where(rate > 0, rate, 1), g), m, v

        moves, mean, variance = map_unzip(one, 3, updates, state.mean, state.variance)
        return moves, LapropState(count, rate, mean, variance)

    return Part(init, update, name="parts.laprop", once=True)


class ProdigyState(NamedTuple):
    """The state of `prodigy`."""

    # `estimate`, `largest` and `numerator` are scalars.

    count: ArrayLike  # the number of updates so far, int32
    estimate: jax.Array  # the factor of the learning rate
    largest: jax.Array  # the largest estimate so far, before its growth was limited
    numerator: jax.Array  # of the estimate
    start: optax.Params  # the first parameters
    mean: optax.Params  # of the gradients times the factor
    variance: optax.Params  # the mean of the squares of gradients times the factor
    total: optax.Params  # the weighted sum of the gradients


def prodigy(
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = False,
    safeguard_warmup: bool = False,
    estim_lr0: float = 1e-6,
    estim_lr_coef: float = 1.0,
    growth_rate: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies Adam's direction by an estimate of the learning rate (Prodigy).

    The learning rate of the chain is then a factor, usually 1 or a schedule with peak 1. The
    estimate d grows from `estim_lr0` with the distance of all parameters of the group from their
    first values, so that a group is one problem, as in the authors' program. Steps whose learning
    rate is 0 change nothing.

    Differences from optax 0.2.8: optax.contrib.prodigy always corrects Adam's bias, which the
    authors' program does only with use_bias_correction=True, and has no limit of the growth.
    Difference from the authors' program: its options slice_p and decouple=False do not exist here.

    Args:
        b1: the decay of the mean; a float, a traced scalar or, in a group, a schedule.
        b2: the decay of the mean of squares.
        b3: the decay of the sums that estimate the learning rate; None for sqrt(b2).
        eps: added to the root of the mean of squares, times d.
        weight_decay: decoupled weight decay, multiplied by the learning rate and by d.
        bias_correction: whether to correct Adam's averages.
        safeguard_warmup: whether the sum in the denominator leaves out the learning rate, so that
            a warm-up does not raise the estimate.
        estim_lr0: the first estimate; positive, and no schedule.
        estim_lr_coef: a factor of the estimates.
        growth_rate: by which factor the estimate may grow in a step, after the first step in which
            it grows; None for any.

    Returns:
        The part.

    Raises:
        ValueError: at the update, if it is called without parameters, or outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, optim
        >>> from optim import parts
        >>> tx = optim.chain(1.0, before=[parts.prodigy(estim_lr0=0.01)])
        >>> params = jnp.zeros(2)
        >>> updates, _ = tx.update(jnp.array([3.0, -5.0]), tx.init(params), params)
        >>> print(updates.round(4))  # 0.01 * (1 - b1) / sqrt(1 - b2)
        [-0.0316  0.0316]

    Reference: Mishchenko and Defazio, Prodigy, https://arxiv.org/abs/2306.06101
    """

    def init(params: optax.Params) -> ProdigyState:
        first = jnp.asarray(estim_lr0, compute_dtype(params))
        zeros = (jax.tree.map(wide_zeros, params) for _ in range(3))
        count = jnp.zeros((), jnp.int32)
        return ProdigyState(count, first, first, jnp.zeros_like(first), params, *zeros)

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("parts.prodigy needs parameters: call update(updates, state, params).")
        d, count = state.estimate, optax.safe_increment(state.count)
        rate = scalar(passed(extra, "learning_rate", "parts.prodigy"), d)
        factor = d
        if bias_correction:
            factor = d * jnp.sqrt(mean_correction(b2, count, d)) / mean_correction(b1, count, d)
        keep = jnp.sqrt(scalar(b2, d)) if b3 is None else scalar(b3, d)
        weight = d / scalar(estim_lr0, d)

        def follow(g: jax.Array, m: jax.Array, v: jax.Array, s: jax.Array) -> tuple[Any, ...]:
            scaled = scalar(d, g) * g
            m = moving_average(m, scaled, b1)
            v = moving_average(v, jnp.square(scaled), b2)
            share = weight * (d if safeguard_warmup else factor * rate)
            return m, v, scalar(keep, g) * s + scalar(share, g) * g

        def direct(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            adam = m / (jnp.sqrt(v) + scalar(new, w) * scalar(eps, w))
            return jnp.where(counts, scalar(factor, w) * (adam + scalar(weight_decay, w) * w), 0)

        means = map_unzip(follow, 3, updates, state.mean, state.variance, state.total)
        way = optax.tree.vdot(updates, optax.tree.sub(state.start, params))
        numerator = keep * state.numerator + weight * factor * rate * way
        sums = [jnp.sum(jnp.abs(s), dtype=d.dtype) for s in jax.tree.leaves(means[2])]
        denominator = jnp.asarray(sum(sums), d.dtype)
        counts = (rate > 0) & (denominator > 0)
        share = numerator / jnp.where(counts, denominator, 1)
        largest = jnp.maximum(state.largest, found := scalar(estim_lr_coef, d) * share)
        new = largest
        if growth_rate is not None:  # the authors' program does not limit the first growth
            grown = jnp.where(d == scalar(estim_lr0, d), jnp.maximum(d, found), d)
            new = jnp.minimum(largest, grown * scalar(growth_rate, d))
        after = ProdigyState(count, new, largest, numerator, state.start, *means)
        kept = jax.tree.map(lambda x, old: jnp.where(counts, x, old), after, state)
        return jax.tree.map(direct, params, means[0], means[1]), kept

    return Part(init, update, name="parts.prodigy", length="sets", once=True)
