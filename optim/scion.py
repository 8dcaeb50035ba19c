"""Scion: steps of a given length in a norm that suits the layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import descend, scalar, wide, wide_zeros
from optim.matrices import gather, require_matrices, scatter
from optim.newton_schulz import orthogonalize, polynomials

__all__ = ["ScionState", "scion"]

_NORMS = ("spectral", "sign", "col_norm", "row_norm", "bias_rms")


class ScionState(NamedTuple):
    """What Scion remembers: the mean of the gradients."""

    momentum: Any


def scion(
    learning_rate: optax.ScalarOrSchedule,
    radius: float = 1.0,
    momentum: float = 0.9,
    norm: str = "spectral",
    constrained: bool = True,
    ns_steps: int = 5,
    coefficients: str | Sequence[Any] = "jordan",
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Moves towards the point of a norm's ball that lies farthest against the gradient (Scion).

    With the gradient G and the mean M, one update is

        M <- momentum * M + (1 - momentum) * G
        W <- (1 - learning_rate) * W - learning_rate * radius * F(M)     (constrained)
        W <- W - learning_rate * radius * F(M)                           (otherwise)

    Constrained, the weights never leave a ball that they start in. For a matrix of i inputs and o
    outputs, the last two axes [i, o] of a parameter (every axis before is batch), F(M) is

        spectral   sqrt(o / i) * O(M), where O pushes the singular values to one: hidden layers
        sign       sign(M) / i: last layers, and embeddings whose weights are shared with them
        col_norm   each input's row divided by its root mean square: embeddings, input layers
        row_norm   each output's column divided by sqrt(i) times its norm: last layers
        bias_rms   the last axis divided by its root mean square: biases (the paper's names are for
                   matrices [o, i])

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        radius: the radius of the ball; the paper has 50 for hidden layers of a GPT, 3000 for its
            last one.
        momentum: the decay of the mean; one minus the authors' argument of this name.
        norm: 'spectral', 'sign', 'col_norm', 'row_norm' or 'bias_rms'.
        constrained: whether the weights shrink by the learning rate, too.
        ns_steps: for 'spectral', the number of Newton-Schulz steps.
        coefficients: for 'spectral', their polynomials, as in `optim.muon`.
        eps: added to what divides.

    Returns:
        The optimizer.

    Raises:
        ValueError: the norm, the coefficients or ns_steps are unknown; at init, a parameter has
            fewer than two axes (one for 'bias_rms') or is complex; inside shard_map, a gradient
            differs from device to device.

    Reference: Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs,
      https://arxiv.org/abs/2502.07529
    """
    if norm not in _NORMS:
        raise ValueError(f"norm is {norm!r}, but it is one of {', '.join(_NORMS)}.")
    triples = polynomials(coefficients, ns_steps)

    def check(tree: Any) -> None:
        if norm != "bias_rms":
            require_matrices(tree, f"optim.scion with norm={norm!r}")
        elif any(x.ndim == 0 for x in jax.tree.leaves(tree)):
            raise ValueError(
                "optim.scion with norm='bias_rms' moves parameters of at least one axis, and one "
                "has none. Put it in another group (min_ndim=1 keeps it out of this one)."
            )

    def init(params: Any) -> ScionState:
        check(params)
        return ScionState(jax.tree.map(wide_zeros, params))

    def direction(m: jax.Array) -> jax.Array:
        small = scalar(eps, m)
        if norm == "bias_rms":
            return scalar(radius, m) * m / (jnp.sqrt(jnp.mean(m**2, -1, keepdims=True)) + small)
        whole = gather(m, "optim.scion")
        inputs, outputs = m.shape[-2:]
        if norm == "spectral":
            out = (outputs / inputs) ** 0.5 * orthogonalize(whole, triples, eps)
        elif norm == "sign":
            out = jnp.sign(whole) / inputs
        elif norm == "col_norm":
            out = whole / (jnp.sqrt(jnp.mean(whole**2, -1, keepdims=True)) + small)
        else:
            length = jnp.sqrt(jnp.sum(whole**2, -2, keepdims=True))
            out = whole / (inputs**0.5 * length + small)
        return scatter(scalar(radius, m) * out, m)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScionState]:
        del params
        check(updates)

        def mix(g: jax.Array, m: jax.Array) -> jax.Array:
            keep = scalar(momentum, g)
            return keep * m.astype(g.dtype) + (1 - keep) * g

        moments = jax.tree.map(mix, jax.tree.map(wide, updates), state.momentum)
        kept = jax.tree.map(lambda m, old: m.astype(old.dtype), moments, state.momentum)
        return jax.tree.map(direction, moments), ScionState(kept)

    tx = optax.GradientTransformation(init, update)
    return descend(tx, learning_rate, 1.0 if constrained else 0.0)
