"""Newton-Schulz: maps the singular values of a matrix to about 1 by matrix products only.

One step maps X to (a I + b X X^T + c (X X^T)^2) X, that is, each singular value s to
a s + b s^3 + c s^5. Several steps on a matrix of norm 1 approximate U V^T, where U S V^T
is its singular value decomposition.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optim.descent import scalar
from optim.division import Axes, divide
from optim.factories import ArgumentError
from optim.matrices import product, transpose
from optim.paths import did_you_mean

# Keller Jordan's coefficients: steep at 0 but not convergent; singular values end in 0.68..1.20.
_JORDAN = (3.4445, -4.7750, 2.0315)

# Algorithm 1 of the Polar Express, for lower bound 1e-3: each is optimal after the previous ones.
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
# To keep singular values below 1 despite rounding, the paper divides the argument of all steps but
# the last by this factor; that of the first twice, as it also divides the matrix by norm * factor.
_SAFETY = 1.01


def _steps_of_a_gram(itemsize: int) -> int:
    """Returns after how many steps of the Gram form the matrix itself is computed again."""
    # Every step multiplies the rounding error of the Gram matrix by a**2. With two steps, results
    # in 16 bits are as near to the exact ones as those of the plain form, and mostly nearer
    # (benchmarks.gram); with five they diverge.
    return 5 if itemsize >= 4 else 2


Triple = tuple[ArrayLike, ArrayLike, ArrayLike]


def polynomials(
    ns_coefficients: str | Sequence[Any],
    steps: int,
    names: tuple[str, str] = ("ns_coefficients", "ns_steps"),
) -> list[Triple]:
    """Returns the coefficients of every Newton-Schulz step; raises ArgumentError."""
    # For `ns_coefficients`, see `optim.muon`; `names` is what the caller's user calls the two
    # arguments. Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; Amsel et al., The
    # Polar Express, https://arxiv.org/abs/2505.16932.
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"{names[1]} must be an integer, at least 1, got {steps!r}.", names[1])
    if isinstance(ns_coefficients, str):
        # Dividing the argument of a s + b s^3 + c s^5 by a scale divides a, b and c by its powers.
        scales = [_SAFETY**2, *[_SAFETY] * (len(_POLAR_EXPRESS) - 2), 1.0]
        known = {
            "jordan": [_JORDAN],
            "polar_express": [
                (a / scale, b / scale**3, c / scale**5)
                for (a, b, c), scale in zip(_POLAR_EXPRESS, scales, strict=True)
            ],
        }
        if ns_coefficients not in known:
            raise ArgumentError(
                f"{names[0]} must be one of {', '.join(known)} or a triple (a, b, c), got"
                f" {ns_coefficients!r}.{did_you_mean(ns_coefficients, known)}",
                names[0],
            )
        triples: Sequence[Any] = known[ns_coefficients]
    else:
        first = ns_coefficients[0] if len(ns_coefficients) > 0 else 0.0
        several = isinstance(first, list | tuple) or jnp.ndim(first) > 0
        triples = ns_coefficients if several else [ns_coefficients]
    if any(len(triple) != 3 for triple in triples):
        raise ArgumentError(
            f"{names[0]} must be a triple (a, b, c), or one for each step, got"
            f" {ns_coefficients!r}.",
            names[0],
        )
    # The last triple of the Polar Express converges to 1 when it is repeated.
    rest = [triples[-1]] * (steps - len(triples))
    return [(a, b, c) for a, b, c in [*triples[:steps], *rest]]


def range_of_results(triples: Sequence[Any]) -> tuple[float, float]:
    """Returns the least and the largest value to which the steps map values in [0, 1]."""
    # They are singular values. The largest is infinite for steps that diverge.
    x = np.linspace(0, 1, 2001)
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b, c in triples:
            x = a * x + b * x**3 + c * x**5
    if not np.isfinite(x).all():
        return 0.0, math.inf
    return float(x.min()), float(x.max())


def orthogonalize(
    x: jax.Array,
    triples: Sequence[Triple],
    eps: ArrayLike = 1e-7,
    dtype: DTypeLike | None = None,
    norm: str = "frobenius",
    add_eps: bool = False,
    axes: Axes = (),
) -> jax.Array:
    """Orthogonalizes matrices [..., m, n] approximately, by Newton-Schulz steps."""
    # Returns p(s / max(norm, eps)) for singular values s, where p is the composition of the steps'
    # polynomials; with `add_eps`, p(s / (norm + eps)). A zero matrix stays zero. For `norm`, see
    # `parts.polar`. `dtype` is that of the steps: matrices are normalized in that of `x` in any
    # case, because the square of 1e-5 is 0 in float16. Inside shard_map, `axes` are those whose
    # devices compute the products together, each of them its rows of the result: all have `x`,
    # which has no more rows than columns, and they divide its rows.

    # The products of a step are then of the smaller side.
    tall = x.shape[-2] > x.shape[-1]
    x = transpose(x) if tall else x
    # The largest value is scaled to 1, so that neither the squares nor the norm under- or overflow;
    # a power of two comes first, because the reciprocal of a very large number underflows.
    # initial: for arrays without elements.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    power = jnp.where(largest > 1, scalar(2.0**-8, x), scalar(2.0**8, x))
    largest = jnp.where(largest > 0, largest * power, jnp.ones_like(largest))
    x = x * power / largest
    square = _gather(product(_own_rows(x, axes), transpose(x)), axes) if norm == "gram" else x
    length = jnp.linalg.norm(square, axis=(-2, -1), keepdims=True)
    length = jnp.sqrt(length) if norm == "gram" else length
    # eps is for the norm of the matrix that was given, which is length * largest / power here.
    least = scalar(eps, x) * power / largest
    x = x / (length + least if add_eps else jnp.maximum(length, least))
    kept = x.dtype
    x = x if dtype is None else x.astype(dtype)
    some_steps = _gram_steps if _prefers_gram(x.shape[-2], x.shape[-1]) else _plain_steps
    count = _steps_of_a_gram(x.dtype.itemsize)
    for start in range(0, len(triples), count):
        x = _gather(x, axes) if start else x
        x = some_steps(x, triples[start : start + count], axes)
    return (transpose(x) if tall else x).astype(kept)


def orthogonalize_all(
    batches: Sequence[jax.Array],
    triples: Sequence[Triple],
    eps: ArrayLike = 1e-7,
    dtype: DTypeLike | None = None,
    norm: str = "frobenius",
    add_eps: bool = False,
    splits: Sequence[tuple[Axes, Axes]] = (),
) -> list[jax.Array]:
    """Orthogonalizes the matrices of many parameters, [k, m, n] each; see `orthogonalize`."""
    # `splits` has the mesh axes that split their rows and columns, if they are known; see
    # `division.divide` for several devices.

    def cost(shape: tuple[int, ...]) -> float:
        size = jnp.finfo(batches[0].dtype if dtype is None else dtype).bits // 8
        return flops(min(shape), max(shape), len(triples), size)

    # A matrix and its transpose cost the same; with one orientation, `divide` can stack them.
    turned = _turned(batches, splits or [((), ())] * len(batches))
    flat = [transpose(x) if t else x for x, t in zip(batches, turned, strict=True)]

    def by_rows(x: jax.Array, axes: Axes) -> jax.Array:
        return orthogonalize(x, triples, eps, dtype, norm, add_eps, axes)

    found = divide(lambda x: by_rows(x, ()), flat, cost=cost, by_rows=by_rows)
    return [transpose(x) if t else x for x, t in zip(found, turned, strict=True)]


def _turned(batches: Sequence[jax.Array], splits: Sequence[tuple[Axes, Axes]]) -> list[bool]:
    """Returns which parameters' matrices to transpose, so that `divide` stacks them."""
    # If square ones are split in both ways, as queries by (rows, columns) and outputs by (columns,
    # rows), the compiler would gather their stack on every device; a transposition moves nothing.
    # If only one side is split, they stay: it exchanges single axes well.
    numbers: Counter[tuple[int, tuple[Axes, Axes]]] = Counter()
    for x, split in zip(batches, splits, strict=True):
        if x.shape[-2] == x.shape[-1]:
            numbers[x.shape[-1], split] += x.shape[0]

    def is_turned(x: jax.Array, split: tuple[Axes, Axes]) -> bool:
        (rows, columns), other = x.shape[-2:], (split[1], split[0])
        if rows != columns or not all(split):
            return rows > columns
        # The way of most matrices, or else the later one in the alphabet.
        return (numbers[rows, other], other) > (numbers[rows, split], split)

    return list(map(is_turned, batches, splits))


def flops(rows: int, columns: int, steps: int, itemsize: int) -> float:
    """Counts the operations that orthogonalize a matrix, a multiply-add as two."""
    # `rows` is the smaller side; `itemsize` are the bytes of a number in the dtype of the steps.
    cube, rectangle = float(rows) ** 3, float(rows) * rows * columns
    if not _prefers_gram(rows, columns):
        return steps * (4 * rectangle + 2 * cube)
    # Four products of m^3 a step, less one in the first step and two in the last of each batch, and
    # two of m^2 n a batch.
    batches = -(-steps // _steps_of_a_gram(itemsize))
    return 8 * steps * cube + batches * (4 * rectangle - 6 * cube)


def _prefers_gram(rows: int, columns: int) -> bool:
    """Returns whether the Gram form is cheaper, from `flops` for batches of several steps."""
    return 2 * columns > 3 * rows


# Devices along some mesh axes may divide the rows of matrices; without axes, each has all of them.


def _own_rows(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns this device's rows of matrices [..., rows, columns], of which each has a copy."""
    if not axes:
        return x
    size = x.shape[-2] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=x.ndim - 2)


def _gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns matrices, from each device's rows of them."""
    return jax.lax.all_gather(x, axes, axis=x.ndim - 2, tiled=True) if axes else x


def _plain_steps(x: jax.Array, triples: Sequence[Triple], axes: Axes) -> jax.Array:
    """Takes whole matrices, and returns this device's rows of the results."""
    mine = _own_rows(x, axes)
    for i, triple in enumerate(triples):
        x = _gather(mine, axes) if i else x
        a, b, c = (scalar(value, x) for value in triple)
        own = product(mine, transpose(x))
        gram = _gather(own, axes)
        mine = a * mine + product(b * own + c * product(own, gram), x)
    return mine


def _gram_steps(x: jax.Array, triples: Sequence[Triple], axes: Axes) -> jax.Array:
    """Computes all steps as polynomials of X X^T, by products of the smaller side only."""
    # Takes whole matrices, and returns this device's rows of the results.
    gram = _gather(product(_own_rows(x, axes), transpose(x)), axes)
    identity = _own_rows(jnp.eye(gram.shape[-1], dtype=gram.dtype), axes)
    whole = None
    for i, triple in enumerate(triples):
        a, b, c = (scalar(value, x) for value in triple)
        own = _own_rows(gram, axes)
        step = a * identity + b * own + c * product(own, gram)
        whole = step if whole is None else product(step, _gather(whole, axes))
        # `step` and `gram` are polynomials of one Gram matrix: they are symmetric and commute.
        if i + 1 < len(triples):
            gram = _gather(product(product(step, gram), _gather(step, axes)), axes)
    return _own_rows(x, axes) if whole is None else product(whole, x)


def shape_factor(scale: str, rows: int, columns: int) -> float:
    """Returns an orthogonal update's factor for its shape; ValueError if `scale` is unknown."""
    # Rows are inputs and columns outputs (y = x W).
    factors = {
        "original": math.sqrt(max(1.0, columns / max(rows, 1))),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "none": 1.0,
    }
    if scale == "spectral":
        raise ValueError("scale='spectral' was renamed to 'original', as in torch.optim.Muon.")
    if scale not in factors:
        raise ValueError(f"scale must be one of {', '.join(factors)}, got {scale!r}.")
    return factors[scale]
