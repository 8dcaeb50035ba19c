"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim import parts
from optim.descent import Updated, descend
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.parts.base import check_count


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
    decay_after_step: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Runs Adam in the slowly changing eigenbasis of Shampoo's preconditioner (SOAP).

    With the gradient G and the bases Q_L and Q_R, which are the eigenvectors of the means of G G^T
    and of G^T G, Adam receives Q_L^T G Q_R, and its step is rotated back. As in the authors'
    program, the first update only computes the bases and leaves the parameters unchanged; later the
    bases are updated every `precondition_frequency` updates, after the step, by one power iteration
    and a QR decomposition.

    A first gradient of 16x24 has 16 right singular vectors, and the other 8 columns of Q_R are
    arbitrary: in an eigendecomposition they depend on rounding errors, and so does the rest of the
    run. Here they do not: the first basis is completed from columns of the identity in directions
    that the gradients so far do not span, and later updates keep the columns of those directions.
    Elements of the rotated gradients that are zero up to rounding do not contribute to the step,
    where Adam would divide noise by noise. For gradients of full rank this is the authors' program.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before them is
    batch (stacked layers). Other parameters, such as biases, must be in another group.

    Differences from the authors' program: its default weight_decay is 0.01, and shrinks the weights
    after the step, which here `decay_after_step` does. For a parameter with
    more than two axes it rotates every axis, or merges axes (merge_dims); here a parameter is
    always a batch of matrices.

    Its direction is that of `parts.soap`, which `optim.chain` composes with other parts: without
    weight decay, optim.chain(learning_rate, [parts.soap(b1=0.95, b2=0.95, every=10, first="skip",
    length="free")]) has its bits.

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
        decay_after_step: whether weight decay shrinks the weights that the step has made, as in the
            authors' program; by default step and decay are one sum, as in AdamW.

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
    check_count("precondition_frequency", precondition_frequency)
    over: Any = Matrices(matrices, "optim.soap")
    options: Any = {"first": "skip", "length": "free", "max_precond_dim": max_precond_dim}
    part = parts.soap(
        b2, shampoo_beta, eps, precondition_frequency, matrices=over, b1=b1, **options
    )
    tx = descend(part, learning_rate, weight_decay, decay_after_step)

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        moves, new = tx.update(updates, state, params, **extra)
        # Weight decay too is left out of the first update.
        first = state.direction.count == 0
        return jax.tree.map(lambda u: jnp.where(first, jnp.zeros_like(u), u), moves), new

    return optax.GradientTransformationExtraArgs(tx.init, update)
