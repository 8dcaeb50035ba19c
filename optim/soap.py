"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, moving_average, scalar
from optim.division import one_by_one
from optim.dtypes import wide_zeros, widen
from optim.eigenvectors import (
    Sides,
    first_bases,
    first_sides,
    is_noise,
    next_bases,
    of_sides,
    sort_elements,
    turn,
    turn_back,
)
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, gram_matrices

__all__ = ["SoapState", "soap"]


class SoapState(NamedTuple):
    """The state of SOAP.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the gradients, in the eigenbasis.
        variance: the mean of their squares, in the eigenbasis.
        left: the mean of G G^T, [batch axes..., rows, rows]; an empty tuple for a side that is not
            rotated.
        right: the mean of G^T G, [batch axes..., columns, columns]; likewise.
        left_basis: the eigenvectors of `left`, as columns.
        right_basis: the eigenvectors of `right`, as columns.
    """

    count: jax.Array
    mean: optax.Params
    variance: optax.Params
    left: optax.Params
    right: optax.Params
    left_basis: optax.Params
    right_basis: optax.Params


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
    """Runs Adam in the slowly changing eigenbasis of Shampoo's preconditioner (SOAP).

    With the gradient G and the bases Q_L and Q_R, which are the eigenvectors of the means of G G^T
    and of G^T G, Adam receives Q_L^T G Q_R, and its step is rotated back. As in the authors'
    program, the first update only computes the bases and leaves the parameters unchanged; later the
    bases are updated every `precondition_frequency` updates, after the step, by one power iteration
    and a QR decomposition. (The authors' program shrinks the weights after the step; here step and
    weight decay are one sum, as in AdamW.)

    A first gradient of 16x24 has 16 right singular vectors, and the other 8 columns of Q_R are
    arbitrary: in an eigendecomposition they depend on rounding errors, and so does the rest of the
    run. Here they do not: the first basis is completed from columns of the identity in directions
    that the gradients so far do not span, and later updates keep the columns of those directions.
    Elements of the rotated gradients that are zero up to rounding do not contribute to the step,
    where Adam would divide noise by noise. For gradients of full rank this is the authors' program.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before them is
    batch (stacked layers). Other parameters, such as biases, must be in another group.

    Differences from the authors' program: its default weight_decay is 0.01. For a parameter with
    more than two axes it rotates every axis, or merges axes (merge_dims); here a parameter is
    always a batch of matrices.

    A chain of `parts.momentum` and `parts.soap` is another program: it corrects no bias, begins its
    mean with the first gradient, and keeps the mean as it is, where `optim.soap` keeps it in the
    eigenbasis. So neither the bits nor the state of one are those of the other.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        b1: the decay of the mean of gradients.
        b2: the decay of the mean of their squares.
        shampoo_beta: the decay of the means of G G^T and G^T G; None for `b2`.
        eps: added to the square root of the mean of the squares.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        precondition_frequency: the number of updates from one change of the bases to the next.
        max_precond_dim: the longest side of a matrix that is rotated.
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; None for the last two.

    Returns:
        The optimizer.

    Raises:
        ValueError: if the frequency is not positive, or matrices is unknown; at init, if a
            parameter has fewer than two axes, is complex or does not fit `matrices`; inside
            shard_map, if a gradient differs between devices.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optim
        >>> tx = optim.soap(learning_rate=0.1)
        >>> params = {"kernel": jnp.eye(2)}
        >>> grads = {"kernel": jnp.array([[1.0, 2.0], [3.0, 5.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> updates["kernel"].tolist()  # the first update only computes the bases
        [[0.0, 0.0], [0.0, 0.0]]
        >>> updates, state = tx.update(grads, state, params)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[ 0.062 -0.078]
         [-0.078 -0.062]]

    Reference: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam,
      https://arxiv.org/abs/2409.11321
    """
    if precondition_frequency < 1:
        raise ValueError(
            f"precondition_frequency must be at least 1, got {precondition_frequency}."
        )

    over = Matrices(matrices, "optim.soap")

    def init(params: optax.Params) -> SoapState:
        over.declare(params)
        mean, *sides = first_sides(
            over, params, lambda x: Sides(*gram_matrices(x, max_precond_dim))
        )
        variance = jax.tree.map(wide_zeros, params)
        return SoapState(jnp.zeros((), jnp.int32), mean, variance, *sides)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        del params
        count = state.count
        first = count == 0

        def follow(
            whole: jax.Array, mean: jax.Array, variance: jax.Array, grams: Sides, bases: Sides
        ) -> tuple[Any, ...]:
            keep1, keep2 = scalar(b1, whole), scalar(b2, whole)
            turned = turn(whole, bases)
            # The first gradient only computes the bases: the averages begin with the second one.
            mean = jnp.where(first, 0, moving_average(mean, turned, keep1))
            variance = jnp.where(first, 0, moving_average(variance, turned**2, keep2))
            # As in the authors' program, eps is added to a root without bias correction. The first
            # update adds nothing to the averages, so `count` is the number of their terms.
            rate = jnp.sqrt(bias_correction(b2, count, whole)) / bias_correction(b1, count, whole)
            direction = mean / (jnp.sqrt(variance) + scalar(eps, whole))
            if jax.tree.leaves(bases):
                direction = jnp.where(is_noise(variance), 0, direction)
            step = rate * turn_back(direction, bases)

            keep = scalar(b2 if shampoo_beta is None else shampoo_beta, whole)
            news = Sides(*gram_matrices(whole, max_precond_dim))
            grams = jax.tree.map(lambda old, new: moving_average(old, new, keep), grams, news)
            return step, mean, variance, grams

        due = jnp.where(count % precondition_frequency == 0, 1, 0)
        branch = jnp.where(first, 2, due)

        def move(*lists: list[Any]) -> Sequence[list[Any]]:
            grams = list(map(Sides, *lists[3:5]))
            bases = list(map(Sides, *lists[5:]))
            rows = list(map(follow, *lists[:3], grams, bases))
            steps, mean, variance, grams = ([row[i] for row in rows] for i in range(4))
            turns = [_keep_bases, _rotate_bases, _first_bases]
            mean, variance, bases = jax.lax.switch(branch, turns, mean, variance, grams, bases)
            return steps, mean, variance, *of_sides(grams), *of_sides(bases)

        grads = widen(updates)
        steps, *fields = over.map(one_by_one(move), [grads, state.mean, state.variance], state[3:])
        return steps, SoapState(jnp.asarray(optax.safe_increment(count)), *fields)

    tx = descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)

    def update_all(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        moves, new = tx.update(updates, state, params, **extra)
        # Weight decay too is left out of the first update.
        first = state.direction.count == 0
        return jax.tree.map(lambda u: jnp.where(first, jnp.zeros_like(u), u), moves), new

    return optax.GradientTransformationExtraArgs(tx.init, update_all)


# The next functions update the bases and Adam's moments, which are lists over the parameters.

_Moved = tuple[list[jax.Array], list[jax.Array], list[Sides]]


def _keep_bases(mean: Any, variance: Any, grams: Any, bases: Any) -> _Moved:
    del grams
    return mean, variance, bases


def _first_bases(mean: Any, variance: Any, grams: list[Sides], bases: Any) -> _Moved:
    """Computes the first bases; the mean is still zero, so it need not be rotated."""
    del bases
    return mean, variance, first_bases(grams)


def _rotate_bases(
    mean: list[jax.Array], variance: list[jax.Array], grams: list[Sides], bases: list[Sides]
) -> _Moved:
    """Rotates the bases towards the eigenvectors by one power iteration."""
    # The mean is rotated to the new bases. Variances cannot be rotated: they are sorted with the
    # columns to which they belong.
    back = list(map(turn_back, mean, bases))
    bases, orders = next_bases(grams, bases)
    return list(map(turn, back, bases)), list(map(sort_elements, variance, orders)), bases
