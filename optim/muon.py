"""Muon: momentum, orthogonalized by Newton-Schulz."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from optim.descent import descend, scalar, wide, wide_zeros
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.newton_schulz import orthogonalize, polynomials, shape_factor

__all__ = ["MuonState", "muon"]


_DTYPES = ("bfloat16", "float16", "float32", "float64")


class MuonState(NamedTuple):
    """What Muon remembers: the momentum, shaped like the parameters."""

    momentum: Any


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
) -> optax.GradientTransformationExtraArgs:
    """Moves matrices along their orthogonalized momentum (Muon).

    With the gradient G, the momentum M and the Newton-Schulz map O, one update is

        M <- momentum * M + (1 - momentum) * G
        D  = (1 - momentum) * G + momentum * M    (nesterov; else D = M)
        W <- W - learning_rate * (factor * O(D) + weight_decay * W)

    as in torch.optim.Muon; optax.contrib.muon also corrects the bias of G and of M, which matters
    only under nesterov, because O ignores the length of D. Without `matrices`, a matrix is the last
    two axes of a parameter, [inputs, outputs] as in flax, and every axis before is batch (stacked
    layers): set it for kernels of attention and convolutions. Parameters that are no matrices
    belong to another group: no Adam hides here.

    Where the defaults differ from other programs: torch.optim.Muon has weight_decay=0.1 and
    learning_rate=1e-3, Keller Jordan's has weight_decay=0 and learning_rate=0.02. Both compute the
    Newton-Schulz steps in bfloat16 (`ns_dtype`). Keller Jordan's adds 1e-7 to the norm; torch's,
    like this one, takes the larger of the two. Keller Jordan's flattens a convolution to [out, in *
    height * width] (matrices='conv'), and its factor there is 1 for a square window, whatever the
    channels; here, as in optax, it is that of the flattened matrix.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        momentum: the decay of the momentum, in [0, 1).
        nesterov: whether the gradient is mixed into the momentum once more.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        ns_steps: the number of Newton-Schulz steps.
        ns_coefficients: their polynomials: 'jordan' (singular values end in 0.68..1.20),
            'polar_express' (after 5 steps in 0.84..1.13), one triple (a, b, c), or one a step.
        scale: the factor, torch's adjust_lr_fn: 'original' is sqrt(max(1, columns / rows)),
            'match_rms_adamw' is 0.2 * sqrt(max(rows, columns)), which suits learning rates tuned
            for AdamW, and 'none' is 1.
        eps: the least norm by which a momentum is divided.
        momentum_dtype: the dtype of the momentum's memory, such as 'bfloat16'; None for the
            parameter's own, at least float32.
        ns_dtype: the dtype of the Newton-Schulz steps; None for the parameter's own, at least
            float32, whose products are exact to float32 everywhere. 'bfloat16' is less exact, on
            an H200 about 7 times as fast, and on CPUs slower.
        matrices: which axes of a parameter are the rows and the columns of its matrices: the name
            of a layer, such as 'attention' or 'conv', a spec, such as 'in heads head_dim -> in
            (heads head_dim)', or {pattern of paths: either}; see `optim.layouts`. None, and what no
            pattern takes, has its last two axes, [inputs, outputs].

    Returns:
        The optimizer.

    Raises:
        ValueError: ns_coefficients, scale, ns_steps, matrices or a dtype are unknown; at init, a
            parameter has fewer than two axes, is complex or does not fit `matrices`; inside
            shard_map, a gradient differs from device to device.

    References: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; Liu et al., Muon is
      Scalable for LLM Training (match_rms_adamw), https://arxiv.org/abs/2502.16982
    """
    triples = polynomials(ns_coefficients, ns_steps)
    over = Matrices(matrices, "optim.muon")
    shape_factor(scale, 1, 1)  # an unknown name shows here, and not at the first update
    for name, dtype in (("momentum_dtype", momentum_dtype), ("ns_dtype", ns_dtype)):
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"{name} is {dtype!r}, but it is None or one of {', '.join(_DTYPES)}.")

    def init(params: Any) -> MuonState:
        over.declare(params)
        return MuonState(jax.tree.map(lambda p: wide_zeros(p, momentum_dtype), params))

    def orthogonal(x: jax.Array) -> tuple[jax.Array]:
        out = orthogonalize(x, triples, eps, ns_dtype)
        return (shape_factor(scale, *x.shape[-2:]) * out,)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params

        def mix(g: jax.Array, m: jax.Array) -> jax.Array:
            keep = scalar(momentum, g)
            return keep * m.astype(g.dtype) + (1 - keep) * g

        grads = jax.tree.map(wide, updates)
        moments = jax.tree.map(mix, grads, state.momentum)
        mixed = jax.tree.map(mix, grads, moments) if nesterov else moments
        kept = jax.tree.map(lambda m, old: m.astype(old.dtype), moments, state.momentum)
        [steps] = over.map(orthogonal, 1, [mixed])
        return steps, MuonState(kept)

    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)
