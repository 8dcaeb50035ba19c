"""Newton-Schulz: a matrix's singular values pushed to one, by matrix products alone.

One step maps X to (a I + b X X^T + c (X X^T)^2) X, that is, each singular value s to
a s + b s^3 + c s^5. Several steps on a matrix of norm one give approximately U V^T, where U S V^T
is its singular value decomposition.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optim.descent import scalar
from optim.matrices import product, transpose

__all__ = ["orthogonalize", "polynomials"]

# Keller Jordan's coefficients: the steepest at 0, and not convergent: values end in 0.68..1.20.
_JORDAN = (3.4445, -4.7750, 2.0315)

# Algorithm 1 of the Polar Express, for lower bound 1e-3: each is optimal after those before it.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Against rounding above 1 the paper scales the argument of all but the last down by it; that of
# the first twice, because it divides the matrix by more than its norm too.
_SAFETY = 1.01

# Every step of the Gram form multiplies the rounding of the Gram matrix by a**2; after so many the
# matrix itself is formed anew.
_RESTART = 5

Triple = tuple[ArrayLike, ArrayLike, ArrayLike]


def polynomials(ns_coefficients: str | Sequence[Any], steps: int) -> list[Triple]:
    """Lists the polynomial of every Newton-Schulz step.

    Args:
        ns_coefficients: 'jordan', 'polar_express', one triple (a, b, c) for all steps, or a triple
            for each step (the last is repeated where there are fewer than steps).
        steps: the number of steps, at least 1.

    Returns:
        One triple for each step.

    Raises:
        ValueError: another name, something that is not made of triples, or no step.

    References: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; Amsel et al., The
      Polar Express, https://arxiv.org/abs/2505.16932
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps is {steps!r}, but it is a whole number, 1 or more.")
    if isinstance(ns_coefficients, str):
        scales = [_SAFETY**2, *[_SAFETY] * (len(_POLAR_EXPRESS) - 2), 1.0]
        known = {
            "jordan": [_JORDAN],
            "polar_express": [
                (a / scale, b / scale**3, c / scale**5)
                for (a, b, c), scale in zip(_POLAR_EXPRESS, scales, strict=True)
            ],
        }
        if ns_coefficients not in known:
            raise ValueError(
                f"ns_coefficients is {ns_coefficients!r}, but it is one of {', '.join(known)},"
                " or a triple (a, b, c)."
            )
        triples: Sequence[Any] = known[ns_coefficients]
    else:
        several = len(ns_coefficients) > 0 and jnp.ndim(ns_coefficients[0]) > 0
        triples = ns_coefficients if several else [ns_coefficients]
    if any(len(triple) != 3 for triple in triples):
        raise ValueError(
            f"ns_coefficients is {ns_coefficients!r}, but it is a triple (a, b, c), or one for each"
            " step."
        )
    rest = [triples[-1]] * (steps - len(triples))
    return [(a, b, c) for a, b, c in [*triples[:steps], *rest]]


def orthogonalize(
    x: jax.Array, triples: Sequence[Triple], eps: ArrayLike = 1e-7, dtype: Any = None
) -> jax.Array:
    """Orthogonalizes matrices approximately, by Newton-Schulz steps.

    Products of float32 matrices are exact to float32 on every platform; bfloat16 is faster on
    accelerators.

    Args:
        x: [..., m, n]; every axis before the last two is batch.
        triples: the coefficients (a, b, c) of every step.
        eps: the least Frobenius norm by which a matrix is divided; the zero matrix stays zero.
        dtype: the dtype of the steps; None for that of `x`, which normalizes the matrices anyway:
            a gradient of 1e-5 has no square in float16.

    Returns:
        An array like `x`; its singular values are p(s / max(norm, eps)), where s are those of `x`
        and p is the composition of the steps' polynomials a s + b s^3 + c s^5.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = transpose(x) if tall else x
    # The norm of values near 1, so that neither a square nor the norm under- or overflows; and
    # first a power of two, because the reciprocal of a number near the largest underflows.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    power = jnp.where(largest > 1, scalar(2.0**-8, x), scalar(2.0**8, x))
    largest = jnp.where(largest > 0, largest * power, jnp.ones_like(largest))
    x = x * power / largest
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = x / jnp.maximum(norm, scalar(eps, x) * power / largest)
    kept = x.dtype
    x = x if dtype is None else x.astype(dtype)
    rows, columns = x.shape[-2:]
    # Products of a step: plain 4 m^2 n + 2 m^3; Gram 8 m^3, and 4 m^2 n + 2 m^3 - 8 m^3 once.
    gram = 2 * columns > 3 * rows and x.dtype.itemsize >= 4
    for start in range(0, len(triples), _RESTART):
        part = triples[start : start + _RESTART]
        x = _gram_steps(x, part) if gram else _plain_steps(x, part)
    return (transpose(x) if tall else x).astype(kept)


def _plain_steps(x: jax.Array, triples: Sequence[Triple]) -> jax.Array:
    for triple in triples:
        a, b, c = (scalar(value, x) for value in triple)
        gram = product(x, transpose(x))
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x


def _gram_steps(x: jax.Array, triples: Sequence[Triple]) -> jax.Array:
    """Does the same with products of the small side alone: all steps are polynomials of X X^T."""
    gram = product(x, transpose(x))
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    whole = None
    for i, triple in enumerate(triples):
        a, b, c = (scalar(value, x) for value in triple)
        step = a * identity + b * gram + c * product(gram, gram)
        whole = step if whole is None else product(step, whole)
        if i + 1 < len(triples):
            gram = product(product(step, gram), step)
    return x if whole is None else product(whole, x)


def shape_factor(scale: str, rows: int, columns: int) -> float:
    """Tells by how much an orthogonal update is multiplied, from the shape of its matrix.

    Args:
        scale: 'original', 'match_rms_adamw' or 'none'.
        rows: the inputs of the matrix (y = x W).
        columns: its outputs.

    Returns:
        sqrt(max(1, columns / rows)), 0.2 * sqrt(max(rows, columns)), or 1.

    Raises:
        ValueError: another name.
    """
    factors = {
        "original": math.sqrt(max(1.0, columns / max(rows, 1))),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "none": 1.0,
    }
    if scale == "spectral":
        raise ValueError(
            "scale is 'spectral', which is now called 'original', as in torch.optim.Muon."
        )
    if scale not in factors:
        raise ValueError(f"scale is {scale!r}, but it is one of {', '.join(factors)}.")
    return factors[scale]
