"""Scion: steps of a given length in a norm that suits the layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import descend, scalar, wide, wide_zeros
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.newton_schulz import orthogonalize, polynomials

__all__ = ["ScionState", "scion"]

_NORMS = ("spectral", "spectral_conv", "sign", "col_norm", "row_norm", "bias_rms")


class ScionState(NamedTuple):
    """What Scion remembers: the mean of the gradients."""

    momentum: Any


def scion(
    learning_rate: optax.ScalarOrSchedule,
    radius: float = 1.0,
    momentum: float = 0.1,
    norm: str = "spectral",
    constrained: bool = True,
    ns_steps: int = 5,
    ns_coefficients: str | Sequence[Any] = "jordan",
    eps: float = 1e-8,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Moves towards the point of a norm's ball that lies farthest against the gradient (Scion).

    With the gradient G and the mean M, one update is

        M <- (1 - momentum) * M + momentum * G
        W <- (1 - learning_rate) * W - learning_rate * radius * F(M)     (constrained)
        W <- W - learning_rate * radius * F(M)                           (otherwise)

    Constrained, the weights never leave a ball that they start in. The norms have the authors'
    names, whose matrices are [o, i]: rows are outputs, columns are inputs. Parameters here are
    stored as [i, o], as in flax. For a matrix of o outputs and i inputs F(M) is

        spectral       sqrt(o / i) * O(M), where O pushes the singular values to one: hidden layers
        spectral_conv  sqrt(o / c) / k * O(M), for a convolution of c input channels and k positions
                       of its window, flattened to one matrix with i = c * k inputs
        sign           sign(M) / i: last layers, and embeddings whose weights are shared with them
        col_norm       each column of [o, i], the weights of one input, divided by its root mean
                       square: embeddings, input layers
        row_norm       each row of [o, i], the weights of one output, divided by sqrt(i) times its
                       norm: last layers
        bias_rms       the last axis of the parameter divided by its root mean square: biases

    Where this differs from the authors' program: they call `radius` scale, `constrained` is their
    unconstrained=False, their default momentum is 1 (no mean; they advise 0.1), Newton-Schulz runs
    in bfloat16, col_norm and row_norm have the options normalized and transpose, and in later
    versions M starts at the first gradient instead of 0, as here and in the paper.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        radius: the radius of the ball; the paper has 50 for hidden layers of a GPT, 3000 for its
            last one.
        momentum: the weight of the new gradient in the mean, as in the authors' program: 1 minus
            what other optimizers call momentum. 1 is no mean.
        norm: 'spectral', 'spectral_conv', 'sign', 'col_norm', 'row_norm' or 'bias_rms'.
        constrained: whether the weights shrink by the learning rate, too.
        ns_steps: for 'spectral' and 'spectral_conv', the number of Newton-Schulz steps.
        ns_coefficients: for the same, their polynomials, as in `optim.muon`.
        eps: added to what divides.
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; None is 'conv' for 'spectral_conv'. Under 'spectral_conv' the last of the
            axes that make the inputs are the channels, those before it the window.

    Returns:
        The optimizer.

    Raises:
        ValueError: the norm, ns_coefficients, ns_steps or matrices are unknown; at init, a
            parameter has fewer than two axes (one for 'bias_rms'), is complex, or does not fit
            `matrices`; inside shard_map, a gradient differs from device to device.

    Reference: Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs,
      https://arxiv.org/abs/2502.07529
    """
    if norm not in _NORMS:
        raise ValueError(f"norm is {norm!r}, but it is one of {', '.join(_NORMS)}.")
    triples = polynomials(ns_coefficients, ns_steps)
    if norm == "bias_rms" and matrices is not None:
        raise ValueError("norm='bias_rms' is of the last axis, so matrices has no meaning with it.")
    conv = norm == "spectral_conv"
    spec = "conv" if conv and matrices is None else matrices
    over = Matrices(spec, f"optim.scion with norm={norm!r}")

    def init(params: Any) -> ScionState:
        if norm != "bias_rms":
            over.declare(params, _doubts(momentum))
        elif any(x.ndim == 0 for x in jax.tree.leaves(params)):
            raise ValueError(
                "optim.scion with norm='bias_rms' moves parameters of at least one axis, and one "
                "has none. Put it in another group (min_ndim=1 keeps it out of this one)."
            )
        return ScionState(jax.tree.map(wide_zeros, params))

    def farthest(m: jax.Array) -> tuple[jax.Array]:
        inputs, outputs = m.shape[-2:]
        small = scalar(eps, m)
        if norm in ("spectral", "spectral_conv"):
            return ((outputs / inputs) ** 0.5 * orthogonalize(m, triples, eps),)
        if norm == "sign":
            return (jnp.sign(m) / inputs,)
        if norm == "col_norm":
            return (m / (jnp.sqrt(jnp.mean(m**2, -1, keepdims=True)) + small),)
        length = jnp.sqrt(jnp.sum(m**2, -2, keepdims=True))
        return (m / (inputs**0.5 * length + small),)

    def directions(moments: Any) -> Any:
        if norm == "bias_rms":
            return jax.tree.map(
                lambda m: m / (jnp.sqrt(jnp.mean(m**2, -1, keepdims=True)) + scalar(eps, m)),
                moments,
            )
        [found] = over.map(farthest, 1, [moments])
        if not conv:
            return found
        leaves, structure = jax.tree.flatten(found)
        factors = [at.window**-0.5 for at in over.layouts(moments)]
        return structure.unflatten([f * x for f, x in zip(factors, leaves, strict=True)])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScionState]:
        del params

        def mix(g: jax.Array, m: jax.Array) -> jax.Array:
            new = scalar(momentum, g)
            return (1 - new) * m.astype(g.dtype) + new * g

        moments = jax.tree.map(mix, jax.tree.map(wide, updates), state.momentum)
        kept = jax.tree.map(lambda m, old: m.astype(old.dtype), moments, state.momentum)
        steps = jax.tree.map(lambda x: scalar(radius, x) * x, directions(moments))
        return steps, ScionState(kept)

    tx = optax.GradientTransformation(init, update)
    return descend(tx, learning_rate, 1.0 if constrained else 0.0)


def _doubts(momentum: Any) -> list[str]:
    if not isinstance(momentum, float) or not 0.5 < momentum < 1:
        return []
    return [
        f"optim.scion has momentum={momentum:g}: it is the weight of the new gradient, as in the"
        f" authors' program, so that the mean hardly remembers. For a mean that keeps {momentum:g}"
        f" of itself, set momentum={1 - momentum:g}."
    ]
