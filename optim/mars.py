"""MARS: AdamW on gradients that are corrected by their change since the last step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import Updated, bias_correction, descend, map_unzip, moving_average, scalar
from optim.dtypes import wide_zeros


class MarsState(NamedTuple):
    """The state of MARS."""

    count: jax.Array  # the number of updates so far, int32
    mean: optax.Params  # the mean of the corrected gradients
    variance: optax.Params  # the mean of their squares
    last: optax.Params  # the last gradient


def mars(
    learning_rate: optax.ScalarOrSchedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.99,
    gamma: float = 0.025,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Runs AdamW on gradients corrected by their last change (MARS-AdamW, approximate).

    With the gradient g and the previous gradient h (0 at first), AdamW receives

        c = g + gamma * b1 / (1 - b1) * (g - h)

    scaled to norm 1 if its norm is larger. The norm is taken over a whole parameter, all stacked
    layers together. h is the gradient of the previous batch at the previous parameters, as in the
    authors' default; their exact variant evaluates the previous parameters on the current batch.

    The authors use MARS for matrices and AdamW for other parameters: put them in two groups.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        b1: the decay of the mean of corrected gradients.
        b2: the decay of the mean of their squares.
        gamma: the scale of the correction; gamma=0 is AdamW with clipped gradients.
        eps: added to the square root of the mean of the squares.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Returns:
        The optimizer.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optim
        >>> tx = optim.mars(learning_rate=0.1)
        >>> params = {"kernel": jnp.eye(2)}
        >>> grads = {"kernel": jnp.array([[1.0, 2.0], [3.0, 5.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[-0.1 -0.1]
         [-0.1 -0.1]]

    Reference: Yuan et al., MARS: Unleashing the Power of Variance Reduction for Training Large
      Models, https://arxiv.org/abs/2411.10438
    """

    def init(params: optax.Params) -> MarsState:
        zeros = [jax.tree.map(wide_zeros, params) for _ in range(3)]
        return MarsState(jnp.zeros((), jnp.int32), *zeros)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        count = jnp.asarray(optax.safe_increment(state.count))

        def one(g: jax.Array, *moments: jax.Array) -> tuple[jax.Array, ...]:
            mean, variance, last = (x.astype(g.dtype) for x in moments)
            keep1, keep2 = scalar(b1, g), scalar(b2, g)
            c = g + scalar(gamma, g) * keep1 / (1 - keep1) * (g - last)
            c = c / jnp.maximum(jnp.linalg.norm(jnp.ravel(c)), 1)
            mean = moving_average(mean, c, keep1)
            variance = keep2 * variance + (1 - keep2) * c * c
            root = jnp.sqrt(variance / bias_correction(b2, count, g)) + scalar(eps, g)
            step = mean / bias_correction(b1, count, g) / root
            # The next step compares with this gradient itself, not with the corrected one.
            news = (mean, variance, g)
            return step, *(n.astype(o.dtype) for n, o in zip(news, moments, strict=True))

        steps, *fields = map_unzip(one, 4, updates, *state[1:])
        return steps, MarsState(count, *fields)

    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)
