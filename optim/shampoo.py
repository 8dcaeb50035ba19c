"""Shampoo, as in PyTorch's Distributed Shampoo: with decaying averages, grafted to Adam."""

from typing import Any

import optax

from optim import parts
from optim.descent import descend
from optim.layouts import MatrixSpec
from optim.matrices import Matrices


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-12,
    weight_decay: float = 0.0,
    every: int = 10,
    start: int | None = None,
    max_precond_dim: int = 8192,
    graft_eps: float = 1e-8,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions matrices from both sides and gives steps the length of Adam's (Shampoo).

    With the means, corrected for their bias, M of the gradients G, V of their squares, L of G G^T
    and R of G^T G, the direction of an update is D:

        P = (L + eps I)^(-1/4) M (R + eps I)^(-1/4),   D = |A| / |P| * P,
        A = M / (sqrt(V) + graft_eps)

    with Frobenius norms, and D = A before update `start`. The roots are recomputed every `every`
    updates. If one side is longer than `max_precond_dim`, the other has the power -1/2; if both
    are, D = A.

    Without `matrices`, a matrix is the last two axes of a parameter, and every axis before them is
    batch (stacked layers). Other parameters, such as biases, must be in another group.

    Differences from Meta's program and its defaults: that program merges small dimensions
    (use_merge_dims=True), preconditions every remaining axis, and splits matrices into blocks of
    max_preconditioner_dim=1024; this one uses whole matrices and does not precondition a longer
    side. Its betas are (0.9, 1.0), where b2=1 means a sum; its precondition_frequency is 1; and it
    grafts only if a grafting_config is given, while this one always grafts to Adam.

    Its direction is that of `parts.shampoo`, which says how, and which `optim.chain` composes with
    other parts.

    Args:
        learning_rate: a float, a traced scalar or a schedule; values tuned for Adam are suitable.
        b1: the decay of M.
        b2: the decay of V, L and R. At 1 they are sums without bias correction, as in the original
            Shampoo and in Meta's default, and the steps have the length of AdaGrad's.
        eps: added to the eigenvalues of L and R.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        every: the number of updates from one computation of the roots to the next.
        start: the first update, counted from 1, that is preconditioned; None for `every`.
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
        >>> tx = optim.shampoo(learning_rate=0.1, every=1)
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
    over: Any = Matrices(matrices, "optim.shampoo")
    part = parts.shampoo(
        b2,
        eps,
        every=every,
        start=start,
        max_precond_dim=max_precond_dim,
        matrices=over,
        b1=b1,
        graft=parts.adam(None, b2, graft_eps, squares="gradient"),
    )
    return descend(part, learning_rate, weight_decay)
