"""Shampoo, as in PyTorch's Distributed Shampoo: with decaying averages, grafted to Adam."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, moving_average, scalar
from optim.division import divide
from optim.dtypes import wide_zeros, widen
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, eigh, gram_matrices, product, replicate, scatter, transpose

__all__ = ["ShampooState", "shampoo"]


class ShampooState(NamedTuple):
    """The state of Shampoo.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the gradients.
        variance: the mean of their squares, for the length of Adam's step.
        left: the mean of G G^T, [batch axes..., rows, rows]; an empty tuple for a side that is not
            preconditioned.
        right: the mean of G^T G, [batch axes..., columns, columns]; likewise.
        left_root: the last computed inverse root of `left`.
        right_root: the last computed inverse root of `right`.
    """

    count: jax.Array
    mean: optax.Params
    variance: optax.Params
    left: optax.Params
    right: optax.Params
    left_root: optax.Params
    right_root: optax.Params


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-12,
    weight_decay: float = 0.0,
    precondition_frequency: int = 10,
    start_preconditioning: int | None = None,
    max_precond_dim: int = 8192,
    graft_eps: float = 1e-8,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions matrices from both sides and gives steps the length of Adam's (Shampoo).

    With the means, corrected for their bias, M of the gradients G, V of their squares, L of G G^T
    and R of G^T G, the direction of an update is D:

        P = (L + eps I)^(-1/4) M (R + eps I)^(-1/4),   D = |A| / |P| * P,
        A = M / (sqrt(V) + graft_eps)

    with Frobenius norms, and D = A before `start_preconditioning`. The roots are recomputed every
    `precondition_frequency` updates. If one side is longer than `max_precond_dim`, the other has
    the power -1/2; if both are, D = A.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before them is
    batch (stacked layers). Other parameters, such as biases, must be in another group.

    Differences from Meta's program and its defaults: that program merges small dimensions
    (use_merge_dims=True), preconditions every remaining axis, and splits matrices into blocks of
    max_preconditioner_dim=1024; this one uses whole matrices and does not precondition a longer
    side. Its betas are (0.9, 1.0), where b2=1 means a sum; its precondition_frequency is 1; and it
    grafts only if a grafting_config is given, while this one always grafts to Adam.

    Args:
        learning_rate: a float, a traced scalar or a schedule; values tuned for Adam are suitable.
        b1: the decay of M.
        b2: the decay of V, L and R. At 1 they are sums without bias correction, as in the original
            Shampoo and in Meta's default, and the steps have the length of AdaGrad's.
        eps: added to the eigenvalues of L and R.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        precondition_frequency: the number of updates from one computation of the roots to the next.
        start_preconditioning: the first update, counted from 1, that is preconditioned; None for
            `precondition_frequency`.
        max_precond_dim: the longest side of a matrix that is preconditioned.
        graft_eps: added to the square root of V.
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; None for the last two.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number of updates is not positive, or matrices is unknown; at init, if a
            parameter has fewer than two axes, is complex or does not fit `matrices`; inside
            shard_map, if a gradient differs between devices.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optim
        >>> tx = optim.shampoo(learning_rate=0.1, precondition_frequency=1)
        >>> params = {"kernel": jnp.eye(2)}
        >>> grads = {"kernel": jnp.array([[1.0, 2.0], [3.0, 5.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[ 0.088 -0.11 ]
         [-0.11  -0.088]]

    References: Gupta et al., Shampoo, https://arxiv.org/abs/1802.09568; Shi et al., A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer,
      https://arxiv.org/abs/2309.06497
    """
    start = precondition_frequency if start_preconditioning is None else start_preconditioning
    if precondition_frequency < 1 or start < 1:
        raise ValueError(
            f"precondition_frequency and start_preconditioning must be at least 1, got"
            f" {precondition_frequency} and {start}."
        )

    over = Matrices(matrices, "optim.shampoo")

    def init(params: optax.Params) -> ShampooState:
        over.declare(params)

        def start_from(zeros: list[jax.Array]) -> Sequence[Any]:
            sides = [gram_matrices(x, max_precond_dim) for x in zeros]
            left, right = ([x[i] for x in sides] for i in (0, 1))
            # [matrices, m, m] and [matrices, n, n], or () for a side that is too long.
            return zeros, *(jax.tree.map(jnp.zeros_like, x) for x in (left, right, left, right))

        mean, *sides = over.map(start_from, [jax.tree.map(wide_zeros, params)])
        variance = jax.tree.map(wide_zeros, params)
        return ShampooState(jnp.zeros((), jnp.int32), mean, variance, *sides)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ShampooState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        due = (count == start) | ((count > start) & (count % precondition_frequency == 0))

        def follow(
            whole: jax.Array, mean: jax.Array, variance: jax.Array, *grams: Any
        ) -> tuple[Any, ...]:
            keep1, keep2 = scalar(b1, whole), scalar(b2, whole)
            weight = jnp.where(keep2 == 1, 1, 1 - keep2)  # with b2=1 these are sums
            mean = moving_average(mean, whole, keep1)
            variance = moving_average(variance, whole**2, keep2, weight)
            news = gram_matrices(whole, max_precond_dim)
            grams = jax.tree.map(
                lambda old, new: moving_average(old, new, keep2, weight), grams, news
            )
            return mean, variance, *grams

        def step_along(mean: jax.Array, variance: jax.Array, *roots: Any) -> jax.Array:
            corrected = mean / bias_correction(b1, count, mean)
            adam = corrected / (jnp.sqrt(variance / correction(mean)) + scalar(graft_eps, mean))
            # Before `start`, the roots are still zeros, and `_graft` of zeros is 0, not 0 / 0.
            step = jnp.where(count < start, adam, _graft(_precondition(corrected, roots), adam))
            return step if jax.tree.leaves(roots) else adam

        def correction(like: jax.Array) -> jax.Array:
            """Returns the divisor of `variance` and of the Gram matrices; sums have none."""
            return jnp.where(scalar(b2, like) == 1, 1, bias_correction(b2, count, like))

        def new_roots(sides: tuple[list[Any], list[Any]], old: Any) -> Any:
            del old
            return _roots(sides, lambda gram: gram / correction(gram), eps)

        def move(*lists: list[Any]) -> Sequence[list[Any]]:
            moments, roots = lists[:5], lists[5:]
            rows = [follow(*row) for row in zip(*moments, strict=True)]
            mean, variance, left, right = ([row[i] for row in rows] for i in range(4))
            roots = jax.lax.cond(due, new_roots, lambda _, old: old, (left, right), roots)
            steps = list(map(step_along, mean, variance, *roots))
            return steps, mean, variance, left, right, *roots

        grads = widen(updates)
        steps, *fields = over.map(move, [grads, state.mean, state.variance], state[3:])
        return steps, ShampooState(count, *fields)

    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)


def _roots(
    sides: tuple[list[Any], list[Any]], corrected: Callable[[jax.Array], jax.Array], eps: Any
) -> tuple[list[Any], list[Any]]:
    """Computes inverse roots: fourth roots of two sides, square roots of a single side.

    `sides` has for each parameter its left and its right Gram matrices; `corrected` corrects their
    bias.
    """

    def inverse_root(gram: jax.Array, power: jax.Array) -> jax.Array:
        values, vectors = eigh(replicate(corrected(gram)))
        # A smaller eigenvalue is a rounding error, and its inverse root would amplify noise.
        noise = jnp.finfo(gram.dtype).eps * gram.shape[-1] * jnp.max(values, -1, keepdims=True)
        values = jnp.maximum(values, jnp.maximum(noise, 0)) + scalar(eps, gram)
        root = product(vectors * values[..., None, :] ** power, transpose(vectors))
        return scatter(root, gram)

    def power_of(left: Any, right: Any) -> Any:
        # -1/4 for two sides, -1/2 for one.
        power = -0.5 / max(len(jax.tree.leaves((left, right))), 1)
        # One power for each matrix, because `divide` stacks matrices of parameters with one and two
        # sides.
        return jax.tree.map(lambda x: jnp.full((len(x), 1, 1), power, x.dtype), (left, right))

    pairs = list(map(power_of, *sides))
    powers = jax.tree.leaves([[pair[i] for pair in pairs] for i in (0, 1)])
    grams, structure = jax.tree.flatten(sides)
    return structure.unflatten(divide(inverse_root, grams, powers))


def _precondition(x: jax.Array, roots: tuple[Any, Any]) -> jax.Array:
    left, right = roots
    x = x if isinstance(left, tuple) else product(left, x)
    return x if isinstance(right, tuple) else product(x, right)


def _graft(direction: jax.Array, length: jax.Array) -> jax.Array:
    """Scales each matrix of `direction` to the Frobenius norm of its counterpart in `length`."""
    norms = [jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (length, direction)]
    # 1e-16 keeps a direction of zeros from being divided by 0.
    return direction * (norms[0] / (norms[1] + scalar(1e-16, direction)))
