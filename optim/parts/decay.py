"""Parts that make weights smaller."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.descent import Updated, scalar
from optim.factories import with_known_extras
from optim.parts.base import OBSERVATIONS, Part, at_least, passed
from optim.paths import flatten, unflatten

_shrinking = partial(Part, place="after", once=True, decays=True)


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
    inner = with_known_extras(around or optax.identity())

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        learning_rate = passed(extra, "learning_rate", "parts.cautious_decay", "after")
        steps, state = inner.update(updates, state, params, **extra)

        def decay(given: jax.Array, step: jax.Array, w: jax.Array) -> jax.Array:
            kept = 1 - scalar(learning_rate, w) * scalar(rate, w)
            return (w + step) * jnp.where(given * w < 0, kept, 1) - w

        return jax.tree.map(decay, updates, steps, params), state

    return _shrinking(inner.init, update, name="parts.cautious_decay", around=around)


def decay(rate: float, peak: float | None = None) -> optax.GradientTransformationExtraArgs:
    """Decays all weights by the learning rate (decoupled weight decay), or by its square.

    With the step S and the weights W, the step becomes S - learning_rate * rate * W, as in AdamW.
    With `peak`, the decay is multiplied by learning_rate / peak (corrected weight decay, AdamC):
    S - learning_rate^2 / peak * rate * W. Its paper proposes this for the weights of layers that a
    normalization follows, whose gradients otherwise grow while the learning rate falls. It stands
    after the learning rate.

    Args:
        rate: the weight decay; a float, a traced scalar or, in a group, a schedule.
        peak: the largest learning rate of the schedule; None for a decay that is not corrected.

    Returns:
        The part.

    Raises:
        ValueError: at the update, if it is called without parameters, or outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from optim import parts
        >>> params = jnp.array([10.0, -10.0])
        >>> for peak in (None, 0.4):
        ...     tx = optim.chain(0.1, [optax.identity()], [parts.decay(0.5, peak)])
        ...     print(tx.update(jnp.zeros(2), tx.init(params), params)[0])
        [-0.5  0.5]
        [-0.125  0.125]

    References: Loshchilov and Hutter, AdamW, https://arxiv.org/abs/1711.05101; Defazio, Why
      Gradients Rapidly Increase Near the End of Training, https://arxiv.org/abs/2506.02285
    """

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("parts.decay needs parameters: call update(updates, state, params).")
        learning_rate = passed(extra, "learning_rate", "parts.decay", "after")

        def shrink(step: jax.Array, w: jax.Array) -> jax.Array:
            lost = scalar(learning_rate, w) * scalar(rate, w)
            if peak is not None:
                lost = lost * (scalar(learning_rate, w) / scalar(peak, w))
            return step - lost * w

        return jax.tree.map(shrink, updates, params), state

    return _shrinking(lambda params: optax.EmptyState(), update, name="parts.decay")


def qk_clip(largest: float = 100.0) -> optax.GradientTransformationExtraArgs:
    """Makes queries and keys smaller where a logit of attention was too large (QK-Clip).

    With the step S, the weights W of a head's queries or keys, and the largest logit L of the head
    in the batch, one step is

        W <- sqrt(min(1, largest / L)) * (W + S)

    so that logits that grew are brought back to `largest`, and those below it stay. L is that of
    the forward pass whose gradient made S, over all examples and microbatches. Heads that share
    keys are clipped together, by the largest of their logits. Other parameters of the group stay.
    It stands after the learning rate, and after weight decay. `python -m trainer optimizers
    MuonClip` prints the optimizer that it was published with.

    The model must observe "attention_logits", as `models.gpt` does without `qk_norm`; each step
    then computes the products of queries and keys once more. A norm of queries and keys would undo
    what this part does to their weights.

    Args:
        largest: the largest logit that is not clipped, after the scaling by 1 / sqrt(head_dim).

    Returns:
        The part.

    Raises:
        ValueError: at the update, if no parameter of the group is one of queries or keys, or the
            model's observations are missing, as outside of a run.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from optim import parts
        >>> tx = optim.chain(0.1, [optax.identity()], [parts.qk_clip(largest=100.0)])
        >>> params, grads = {"kernel": jnp.ones(2)}, {"kernel": jnp.array([0.0, 1.0])}
        >>> seen = {"attention_logits": {"kernel": jnp.array([400.0, 50.0])}}
        >>> tx.update(grads, tx.init(params), params, observations=seen)[0]["kernel"]
        Array([-0.5, -0.1], dtype=float32)

    Reference: Kimi Team, Kimi K2, https://arxiv.org/abs/2507.20534, algorithm 1
    """
    name, observed = "parts.qk_clip", "attention_logits"

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        logits = extra.get(OBSERVATIONS, {}).get(observed)
        if logits is None:
            raise ValueError(f"{name} reads {observed!r}, which only a model in a run observes.")
        steps, weights = flatten(updates), flatten(params)
        if not logits.keys() & weights.keys():
            raise ValueError(
                f"{name} is for the kernels of queries and keys, of which the group has none: the"
                f" model observes {observed!r} of {', '.join(sorted(logits))}."
            )
        for path in logits.keys() & weights.keys():
            step, w, most = steps[path], weights[path], logits[path].astype(weights[path].dtype)
            kept = jnp.sqrt(scalar(largest, w) / at_least(most, largest))
            steps[path] = jnp.where(kept < 1, (w + step) * kept - w, step)
        return unflatten(updates, steps), state

    return Part(
        lambda _: optax.EmptyState(), update, name=name, place="after", once=True, reads=[observed]
    )
