"""Scion: steps of a fixed length in a norm chosen for the layer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import Updated, descend, moving_average, scalar
from optim.division import Axes
from optim.dtypes import wide_zeros
from optim.layouts import Layout, MatrixSpec
from optim.matrices import Matrices
from optim.newton_schulz import orthogonalize_all, polynomials
from optim.parts.base import check_option

_NORMS = ("spectral", "spectral_conv", "sign", "col_norm", "row_norm", "bias_rms")


class ScionState(NamedTuple):
    """The state of Scion: the mean of the gradients, shaped like the parameters."""

    momentum: optax.Params


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
    """Moves towards the point of a norm ball that minimizes the linearized loss (Scion).

    With the gradient G and the mean M, one update is

        M <- (1 - momentum) * M + momentum * G
        W <- (1 - learning_rate) * W - learning_rate * radius * F(M)     (constrained)
        W <- W - learning_rate * radius * F(M)                           (otherwise)

    With constrained=True, weights that start in the ball stay in it. The norms have the names of
    the authors' program, whose matrices are [o, i]: rows are outputs, columns are inputs. Here
    parameters are [i, o], as in flax. For a matrix of o outputs and i inputs F(M) is

        spectral       sqrt(o / i) * O(M), where O maps singular values to about 1: hidden layers
        spectral_conv  sqrt(o / c) / k * O(M), for a convolution of c input channels and k positions
                       of its window, flattened to one matrix with i = c * k inputs
        sign           sign(M) / i: last layers, and embeddings whose weights are shared with them
        col_norm       each column of [o, i], the weights of one input, divided by its root mean
                       square: embeddings, input layers
        row_norm       each row of [o, i], the weights of one output, divided by sqrt(i) times its
                       norm: last layers
        bias_rms       the last axis of the parameter divided by its root mean square: biases

    Differences from the authors' program: it calls `radius` scale and constrained=True
    unconstrained=False; its default momentum is 1 (no mean; the authors recommend 0.1); it runs
    Newton-Schulz in bfloat16; its col_norm and row_norm have the options normalized and transpose;
    and in later versions M starts at the first gradient. Here and in the paper M starts at 0.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        radius: the radius of the ball. For a GPT the paper uses 50 for hidden layers and 3000 for
            the last layer.
        momentum: the weight of the new gradient in the mean, as in the authors' program: 1 minus
            what other optimizers call momentum. At 1, M is the gradient.
        norm: 'spectral', 'spectral_conv', 'sign', 'col_norm', 'row_norm' or 'bias_rms'.
        constrained: whether each update also multiplies the weights by 1 - learning_rate.
        ns_steps: for 'spectral' and 'spectral_conv', the number of Newton-Schulz steps.
        ns_coefficients: for the same norms, the coefficients of the steps, as in `optim.muon`.
        eps: added to the divisor of 'col_norm', 'row_norm' and 'bias_rms', and the smallest norm by
            which Newton-Schulz divides.
        matrices: which axes of a parameter are the rows and the columns of its matrices, as in
            `optim.muon`; for 'spectral_conv' None means 'conv'. With 'spectral_conv', the last row
            axis is the input channels, and the row axes before it are the window.

    Returns:
        The optimizer.

    Raises:
        ValueError: if the norm, ns_coefficients, ns_steps or matrices is unknown; at init, if a
            parameter has fewer than two axes (one for 'bias_rms'), is complex, or does not fit
            `matrices`; inside shard_map, if a gradient differs between devices.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optim
        >>> tx = optim.scion(learning_rate=0.1, radius=2.0, momentum=1.0, norm="sign")
        >>> params = {"kernel": jnp.eye(2)}
        >>> grads = {"kernel": jnp.array([[1.0, 2.0], [3.0, 5.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[-0.2 -0.1]
         [-0.1 -0.2]]

    Reference: Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs,
      https://arxiv.org/abs/2502.07529
    """
    check_option("norm", norm, _NORMS)
    triples = polynomials(ns_coefficients, ns_steps)
    if norm == "bias_rms" and matrices is not None:
        raise ValueError("norm='bias_rms' uses the last axis of every parameter: remove matrices.")
    conv = norm == "spectral_conv"
    spec = "conv" if conv and matrices is None else matrices
    over = Matrices(spec, f"optim.scion with norm={norm!r}")

    def init(params: optax.Params) -> ScionState:
        if norm != "bias_rms":
            over.declare(params, _doubts(momentum), partial(_length, norm))
        elif any(x.ndim == 0 for x in jax.tree.leaves(params)):
            raise ValueError(
                "optim.scion with norm='bias_rms' needs parameters with at least one axis, got a "
                "scalar. Put it in another group (min_ndim=1 keeps it out of this one)."
            )
        return ScionState(jax.tree.map(wide_zeros, params))

    def farthest(splits: list[tuple[Axes, Axes]], arrays: list[jax.Array]) -> list[list[jax.Array]]:
        if norm in ("spectral", "spectral_conv"):
            found = orthogonalize_all(arrays, triples, eps, splits=splits)
            # Arrays are [matrices, inputs, outputs], so this is sqrt(outputs / inputs).
            return [[(x.shape[-1] / max(x.shape[-2], 1)) ** 0.5 * x for x in found]]
        return [[_normalized(norm, eps, x) for x in arrays]]

    def directions(moments: Any) -> Any:
        if norm == "bias_rms":
            return jax.tree.map(partial(_normalized, norm, eps), moments)
        [found] = over.map(partial(farthest, over.splits(moments)), [moments])
        if not conv:
            return found
        leaves, structure = jax.tree.flatten(found)
        # `farthest` has multiplied by sqrt(o / (c * k)) for k positions: sqrt(o / c) / k is wanted.
        factors = [max(at.window, 1) ** -0.5 for at in over.layouts(moments)]
        return structure.unflatten([f * x for f, x in zip(factors, leaves, strict=True)])

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        def follow(g: jax.Array, m: jax.Array) -> jax.Array:
            weight = scalar(momentum, g)
            return moving_average(m, g, 1 - weight, weight)

        moments = jax.tree.map(follow, updates, state.momentum)
        kept = jax.tree.map(lambda m, old: m.astype(old.dtype), moments, state.momentum)
        return jax.tree.map(lambda x: scalar(radius, x) * x, directions(moments)), ScionState(kept)

    tx = optax.GradientTransformation(init, update)
    # (1 - learning_rate) * W is weight decay with a factor of 1.
    return descend(tx, learning_rate, 1.0 if constrained else 0.0)


def _normalized(norm: str, eps: Any, m: jax.Array) -> jax.Array:
    # A column of the authors' [outputs, inputs] is a row here: the mean is over the outputs.
    if norm in ("col_norm", "bias_rms"):
        return m / (jnp.sqrt(jnp.mean(m**2, -1, keepdims=True)) + scalar(eps, m))
    inputs = m.shape[-2]
    if norm == "sign":
        return jnp.sign(m) / inputs
    length = jnp.sqrt(jnp.sum(m**2, -2, keepdims=True))
    return m / (inputs**0.5 * length + scalar(eps, m))


def _length(norm: str, layout: Layout) -> float:
    """Returns the length of a direction, the `length` of `declarations.declare`."""
    count, rows, columns = layout.matrices
    if norm in ("spectral", "spectral_conv"):
        window = layout.window if norm == "spectral_conv" else 1
        return (count * min(rows, columns) * columns / rows / window) ** 0.5
    size = count * rows * columns
    return {"sign": size**0.5 / rows, "col_norm": size**0.5, "row_norm": size**0.5 / rows}[norm]


def _doubts(momentum: Any) -> list[str]:
    if not isinstance(momentum, float) or not 0.5 < momentum < 1:
        return []
    return [
        f"optim.scion has momentum={momentum:g}: it is the weight of the new gradient, as in the"
        f" authors' program, so the mean keeps little of old gradients. For a decay of"
        f" {momentum:g}, set momentum={1 - momentum:g}."
    ]
