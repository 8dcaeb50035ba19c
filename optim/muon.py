"""Muon: momentum, orthogonalized by Newton-Schulz."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

from optim import parts
from optim.descent import Updated, descend
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.newton_schulz import polynomials
from optim.parts.base import check_dtype
from optim.parts.directions import polar_of


class MuonState(NamedTuple):
    """The state of Muon: the momentum, shaped like the parameters."""

    momentum: optax.Params


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    ns_steps: int = 5,
    ns_coefficients: str | Sequence[Any] = "jordan",
    scale: str = "original",
    eps: float = 1e-7,
    momentum_dtype: str | None = None,
    ns_dtype: str | None = None,
    matrices: MatrixSpec = None,
    add_eps: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Updates matrices along their orthogonalized momentum (Muon).

    With the gradient G, the momentum M and the Newton-Schulz map O, one update is

        M <- momentum * M + (1 - momentum) * G
        D  = (1 - momentum) * G + momentum * M    (nesterov; else D = M)
        W <- W - learning_rate * (factor * O(D) + weight_decay * W)

    as in torch.optim.Muon; optax.contrib.muon also corrects the bias of G and of M, which matters
    only under nesterov, because O ignores the length of D. Without `matrices`, a matrix is the last
    two axes of a parameter, [inputs, outputs] as in flax, and every axis before them is batch
    (stacked layers): set it for kernels of attention and convolutions. Other parameters, such as
    biases, must be in another group: this optimizer has no built-in Adam for them.

    Its direction is that of `parts.momentum` and `parts.polar`, which `optim.chain` composes with
    other parts: optim.chain(learning_rate, [parts.momentum(), parts.polar()]) has its bits.

    With several devices, under `jax.set_mesh`, each device orthogonalizes a share of the matrices.

    Defaults that differ from other programs: torch.optim.Muon has weight_decay=0.1 and
    learning_rate=1e-3, Keller Jordan's has weight_decay=0 and learning_rate=0.02. Both compute the
    Newton-Schulz steps in bfloat16 (`ns_dtype`). Keller Jordan's adds 1e-7 to the norm (`add_eps`);
    torch's and this one take the larger of the two. Keller Jordan's flattens a convolution to [out,
    in * height * width] (matrices='conv'), and its factor there is 1 for a square window, whatever
    the channels; here, as in optax, it is the factor of the flattened matrix.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        momentum: the decay of the momentum, in [0, 1).
        nesterov: whether the gradient is averaged into the momentum a second time.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        ns_steps: the number of Newton-Schulz steps.
        ns_coefficients: the coefficients of the steps: 'jordan' (final singular values within
            0.68..1.20), 'polar_express' (within 0.84..1.13 after 5 steps), one triple (a, b, c) for
            all steps, or a triple for each step, the last of which is repeated.
        scale: the factor, torch's adjust_lr_fn: 'original' is sqrt(max(1, columns / rows)),
            'match_rms_adamw' is 0.2 * sqrt(max(rows, columns)), which suits learning rates tuned
            for AdamW, and 'none' is 1. The updates of 'match_rms_adamw' grow with the
            root of the width; `optim.group`'s width_scaling divides the learning rate by it.
        eps: the smallest norm by which a momentum is divided.
        momentum_dtype: the dtype in which the momentum is stored, such as 'bfloat16'; None for the
            parameter's dtype, at least float32.
        ns_dtype: the dtype of the Newton-Schulz steps; None for the parameter's dtype, at least
            float32, whose products are exact to float32 on every platform. 'bfloat16' is less
            exact, about 7 times as fast on an H200, and slower on CPUs.
        matrices: which axes of a parameter are the rows and the columns of its matrices: the name
            of a layer, such as 'attention' or 'conv', a spec, such as 'in heads head_dim -> in
            (heads head_dim)', or {pattern of paths: either}; see `optim.layouts`. With None, and
            for parameters that no pattern matches, the last two axes, [inputs, outputs].
        add_eps: True adds eps to the norm by which a momentum is divided; False takes the larger of
            the two.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ns_coefficients, scale, ns_steps, matrices or a dtype is unknown; at init, if
            a parameter has fewer than two axes, is complex or does not fit `matrices`; inside
            shard_map, if a gradient differs between devices.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, optim
        >>> tx = optim.muon(learning_rate=0.02, momentum=0.95)
        >>> params = {"kernel": jnp.eye(2)}
        >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
        >>> print(np.asarray(optax.apply_updates(params, updates)["kernel"]).round(3))
        [[ 0.993 -0.007]
         [-0.007  0.993]]

    References: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; Liu et al., Muon is
      Scalable for LLM Training (match_rms_adamw), https://arxiv.org/abs/2502.16982
    """
    for name, dtype in (("momentum_dtype", momentum_dtype), ("ns_dtype", ns_dtype)):
        check_dtype(name, dtype)
    average: Any = parts.momentum(momentum, nesterov, momentum_dtype)
    over = Matrices(matrices, "optim.muon")
    triples = polynomials(ns_coefficients, ns_steps)
    factor: Any = polar_of(over, triples, scale, eps, ns_dtype, add_eps=add_eps)

    def init(params: optax.Params) -> MuonState:
        factor.init(params)  # it has no state: it checks the parameters
        return MuonState(average.init(params).momentum)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        mixed, new = average.update(updates, state)
        return factor.update(mixed, optax.EmptyState())[0], MuonState(new.momentum)

    # Not parts.decay in `after` of a chain: -rate * (D + decay * W) has other bits than
    # -rate * D - rate * decay * W.
    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)
