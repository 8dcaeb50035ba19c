"""Defines the diagnostics of a step: sizes, angles and spectra of the updates of each group.

They are computed by a program of their own (`Program.diagnose`), and change no bit of the training.
Of a step, U is what a group's optimizer adds to its parameters W, after layer-wise decay, before a
lookahead and before rounding to low precision; G is the gradient of the loss at W, averaged over
the batch, before clipping. All are at least float32. The definitions are `GroupUpdate`'s methods.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

import optim
from optim.bound import Updates
from optim.declarations import declarations
from optim.doubts import DEPTHWISE, NO_MATRIX, ModelShapes
from optim.dtypes import widen
from optim.layouts import Layout, layouts, rules
from optim.matrices import product, transpose
from optim.paths import did_you_mean, flatten
from trainer.engine.contracts import ComponentError

Diagnostic = Literal[
    "update_rms",
    "weight_rms",
    "update_ratio",
    "gradient_cosine",
    "weight_cosine",
    "spectral_norm",
    "stable_rank",
    "rotation",
    "clipped",
    "gradient_square",
    "gradient_noise",
    "noise_scale",
]
NAMES: tuple[Diagnostic, ...] = get_args(Diagnostic)
# They differentiate the batch once more.
OF_HALVES = ("gradient_square", "gradient_noise", "noise_scale")
ALL = tuple(name for name in NAMES if name not in OF_HALVES)
COUNTED = "clipped"  # from what every step returns, by `trainer.train.pending`
_OF_MATRICES = ("spectral_norm", "stable_rank", "rotation")
_POWER_STEPS, _STARTS = 20, 8
_HALF_LIFE = 20  # rows after which a row counts half in a noise scale


def check_diagnostics(
    asked: Sequence[str] | str, clip_norm: Any, batch_size: int, microbatches: int
) -> None:
    """Raises ValueError for a name that is not a diagnostic, or for one that does not fit."""
    if asked == "all":
        return
    for name in [asked] if isinstance(asked, str) else asked:
        if name not in NAMES:
            raise ValueError(
                f"diagnostics has {name!r}, which is not one.{did_you_mean(name, NAMES)} They are "
                f"{', '.join(NAMES)}; or 'all' in place of the list."
            )
    if isinstance(asked, str):
        raise ValueError(f"diagnostics must be a list of names, or 'all': write [{asked}].")
    if "clipped" in asked and clip_norm is None:
        raise ValueError(
            "diagnostics has 'clipped', but the optimizer clips no gradients. Set clip_norm of "
            "optim.optimizer, or remove 'clipped'."
        )
    of_halves = [name for name in asked if name in OF_HALVES]
    if of_halves and batch_size % (2 * microbatches):
        raise ValueError(
            f"diagnostics has {of_halves[0]!r}, which compares the gradients of two halves of a "
            f"batch, but the batch size {batch_size} does not divide into two halves of "
            f"{microbatches} microbatches each. Choose a multiple of {2 * microbatches}."
        )


def names_computed(asked: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the names of those diagnostics that are computed of the update of a logged step.

    Example:
        >>> names_computed(["rotation", "clipped"])
        ('rotation',)
    """
    return tuple(name for name in (ALL if asked == "all" else asked) if name != COUNTED)


def check_matrices(asked: Sequence[str] | str, found: Mapping[str, Layout]) -> None:
    """Raises ComponentError for diagnostics of matrices, if no trainable parameter is one."""
    wanted = [name for name in asked if name in _OF_MATRICES]  # none if it is "all"
    if wanted and not found:
        raise ComponentError(
            "diagnostics",
            f"diagnostics has {wanted[0]!r}, which is that of matrices, but no trainable parameter "
            f"is a matrix. Remove {', '.join(map(repr, wanted))}.",
        )


def find_layouts(optimizer: optim.Optimizer, params: Any) -> dict[str, Layout]:
    """Returns path name -> the layout of its matrices, for the trainable parameters."""
    # Nothing is computed. The matrices are those that the optimizer of the group works on. For
    # other optimizers they are guessed from names and shapes, as the plan's warnings are: usually
    # the last two axes. Vectors, scales and biases (also those of stacked layers), filters of
    # depthwise convolutions and complex parameters have none.
    shapes = ModelShapes({path: tuple(x.shape) for path, x in flatten(params).items()}, whole=True)
    declared: dict[str, Layout] = {}
    for one in declarations(optimizer.init, params):
        declared = {**one.layouts, **declared}  # of several parts of a chain, the first
    found = {}
    for path, x in optimizer.trainable(params).items():
        layout = declared.get(path)
        if layout is None or layout.shape != x.shape:
            layout = _guess(path, x, shapes)
        if layout is not None and 0 not in layout.shape:
            found[path] = layout
    return found


def _guess(path: str, x: Any, shapes: ModelShapes) -> Layout | None:
    if len(x.shape) < 2 or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return None
    if (doubt := shapes.doubt(path)) in (DEPTHWISE, NO_MATRIX):
        return None
    known = rules(None if doubt is None else doubt.spec)
    [layout] = layouts(jax.ShapeDtypeStruct(x.shape, x.dtype), known, "diagnostics").values()
    return layout


def compute(
    asked: Sequence[str] | str,
    step: Updates,
    grads: Mapping[str, jax.Array],
    found: Mapping[str, Layout],
    split: Callable[[dict[str, Any]], Mapping[str, Mapping[str, Any]]],
) -> dict[str, jax.Array]:
    """Computes "<name>/<group>" -> float32 scalar of a step, as a pure function."""
    # Frozen groups have none, and those of matrices only groups that have some. "clipped" is one of
    # steps, and not of an update, and is left out. `grads` are those of the loss, by path name;
    # `found` is from `find_layouts`, and `split` is `BoundOptimizer.split`.
    values: dict[str, Any] = {}
    for group, updates in split(step.updates).items():
        of_group = GroupUpdate(updates, step.weights, grads, found)
        for name in names_computed(asked):
            # Those of halves are from `compute_noise`.
            if name in OF_HALVES or (name in _OF_MATRICES and not of_group.matrices):
                continue
            values[f"{name}/{group}"] = getattr(of_group, name)()
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def compute_noise(
    asked: Sequence[str] | str,
    first: dict[str, jax.Array],
    second: Mapping[str, jax.Array],
    examples: int,
    split: Callable[[dict[str, Any]], Mapping[str, Mapping[str, Any]]],
) -> dict[str, jax.Array]:
    """Computes the diagnostics of the gradients of two halves of a batch, as a pure function.

    Example:
        >>> halves = {"w": jnp.asarray([3.0, 1.0])}, {"w": jnp.asarray([1.0, 1.0])}
        >>> found = compute_noise(OF_HALVES, *halves, 8, lambda params: {"all": params})
        >>> print(found["gradient_square/all"], found["gradient_noise/all"])
        4.0 8.0
    """
    # Of gradients g1 and g2 of two halves with B / 2 `examples` each, "gradient_square" is
    # <g1, g2>, and "gradient_noise" is B |g1 - g2|^2 / 4. Over batches of independent examples,
    # their means are |G|^2, of the gradient of the expected loss, and the trace of the covariance
    # of the gradients of single examples. These are the estimates of McCandlish et al.
    # (arXiv:1812.06162, appendix A.1) from the batch sizes B / 2 and B; the quotient of their
    # means, not the mean of their quotients, is the gradient noise scale, see `NoiseScale`.
    first, second = widen((first, second))
    values: dict[str, Any] = {}
    for group, own in split(first).items():
        apart = {path: g - second[path] for path, g in own.items()}
        if not {"gradient_square", "noise_scale"}.isdisjoint(asked):
            values[f"gradient_square/{group}"] = _inner(own, second)
        if not {"gradient_noise", "noise_scale"}.isdisjoint(asked):
            values[f"gradient_noise/{group}"] = examples / 4 * _inner(apart, apart)
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


class NoiseScale:
    """The gradient noise scale of each group, from the rows of a run so far.

    It is the quotient of the means of "gradient_noise" and "gradient_square", in which a row counts
    half as much as one that is 20 rows newer (McCandlish et al., arXiv:1812.06162, section 2.2).

    Example:
        >>> scale = NoiseScale()
        >>> scale.add({"gradient_square/all": 1.0, "gradient_noise/all": 6.0})
        {'noise_scale/all': 6.0}
        >>> found = scale.add({"gradient_square/all": 3.0, "gradient_noise/all": 10.0})
        >>> print(f"{found['noise_scale/all']:.2f}")
        3.98
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, row: Mapping[str, float]) -> dict[str, float]:
        """Adds a row, and returns "noise_scale/<group>" of each group that the row has."""
        # Left out are groups whose mean of "gradient_square" is not positive, because the noise is
        # so much larger that nothing can be said yet, and values that are not finite.
        found, keep = {}, 0.5 ** (1 / _HALF_LIFE)
        for name, value in row.items():
            kind, _, group = name.partition("/")
            new = value, row.get(f"gradient_noise/{group}", math.nan)
            if kind != "gradient_square" or not all(map(math.isfinite, new)):
                continue
            old = self._sums.get(group, (0.0, 0.0))
            square, noise = (keep * x + y for x, y in zip(old, new, strict=True))
            self._sums[group] = square, noise
            if square > 0:
                found[f"noise_scale/{group}"] = noise / square
        return found


class GroupUpdate:
    """The update of a group; each public method computes one diagnostic, a real scalar."""

    # A quotient whose denominator is 0 is 0: ratio and angles of a group of zeros.

    def __init__(
        self,
        updates: Mapping[str, jax.Array],
        weights: Mapping[str, jax.Array],
        grads: Mapping[str, jax.Array],
        found: Mapping[str, Layout],
    ):
        self._u = dict(updates)
        self._w = {path: weights[path] for path in updates}
        self._g = widen({path: grads[path] for path in updates})
        self.matrices = [  # U and W of each parameter that has some, [matrices, rows, columns]
            (_stacked(self._u[path], found[path]), _stacked(self._w[path], found[path]))
            for path in updates
            if path in found
        ]

    def update_rms(self) -> jax.Array:
        """The root mean square of the elements of U."""
        return self._rms(self._u)

    def weight_rms(self) -> jax.Array:
        """The root mean square of the elements of W."""
        return self._rms(self._w)

    def update_ratio(self) -> jax.Array:
        """The norm of U over that of W, which is the ratio of their root mean squares."""
        return _quotient(self._norm(self._u), self._norm(self._w))

    def gradient_cosine(self) -> jax.Array:
        """The cosine of -U, the direction of descent, with G: <-U, G> / (|U| |G|)."""
        # All parameters of the group count as one vector. It is 1 along the steepest descent, and
        # positive as long as the step decreases the linearized loss.
        return -self._cosine(self._g)

    def weight_cosine(self) -> jax.Array:
        """The cosine of U with W, all parameters of the group as one vector."""
        # It is -1 if the step only shrinks the weights, and 0 if their norm stays to first order.
        return self._cosine(self._w)

    def spectral_norm(self) -> jax.Array:
        """The largest singular value of the matrices of U, the largest over them."""
        return jnp.max(self._spectral_norms)

    def stable_rank(self) -> jax.Array:
        """The mean over the matrices of U of their stable rank, |U|_F^2 / |U|_2^2."""
        squares = jnp.concatenate([jnp.square(_norms(u)) for u, _ in self.matrices])
        return jnp.mean(_quotient(squares, jnp.square(self._spectral_norms)))

    def rotation(self) -> jax.Array:
        """The mean angle between the matrices W and W + U in radians, from 0 to pi."""
        # It is the angle of the right triangle of W + U: the length of the component of U
        # orthogonal to W, over the length of W + U along W. So a small angle is as exact as that
        # component, where the arc cosine would have an error of 3e-4 in float32.
        return jnp.mean(jnp.concatenate([_angles(u, w) for u, w in self.matrices]))

    @cached_property
    def _spectral_norms(self) -> jax.Array:
        return jnp.concatenate([spectral_norms(u) for u, _ in self.matrices])

    def _norm(self, vector: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.sqrt(_inner(vector, vector))

    def _rms(self, vector: Mapping[str, jax.Array]) -> jax.Array:
        return self._norm(vector) / max(1, sum(x.size for x in vector.values())) ** 0.5

    def _cosine(self, vector: Mapping[str, jax.Array]) -> jax.Array:
        return _quotient(_inner(self._u, vector), self._norm(self._u) * self._norm(vector))


def spectral_norms(matrices: jax.Array) -> jax.Array:
    """Estimates the largest singular values of matrices, [n, rows, columns], by power iteration.

    Example:
        >>> print(spectral_norms(jnp.diag(jnp.asarray([2.0, 1.0, 0.5]))[None]).round(4))
        [2.]
    """
    # The largest result from several random vectors, which are always the same; but for rounding
    # never too large. Where the second singular value is at most 0.9 of the first, it is exact to
    # 1e-3. Where many are nearly equal it is too small: for 240 Gaussian matrices of up to 512x512
    # by 0.1 to 0.4% in the mean, and by 1.1% at most (from one vector by 7%).
    # Scaled, because the square of the fourth power of a small number would be 0 in float32.
    size = jnp.max(jnp.abs(matrices), (1, 2), keepdims=True)
    x = _quotient(matrices, size)
    start = jax.random.normal(jax.random.key(0), (x.shape[-1], _STARTS), x.dtype)

    def lengths(columns: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(columns), -2, keepdims=True))

    def step(_: Any, v: jax.Array) -> jax.Array:
        v = product(transpose(x), product(x, v))
        return _quotient(v, lengths(v))

    first = jnp.broadcast_to(start / lengths(start), (x.shape[0], *start.shape))
    v = jax.lax.fori_loop(0, _POWER_STEPS, step, first)
    return jnp.max(size * lengths(product(x, v)), (1, 2))


def _angles(u: jax.Array, w: jax.Array) -> jax.Array:
    """Computes the angles between W and W + U, [n], of matrices [n, rows, columns]."""
    length = _norms(w)
    along = _quotient(jnp.sum(u * w, (1, 2)), length**2)
    across = _norms(u - along[:, None, None] * w)
    return jnp.where(length > 0, jnp.arctan2(across, length * (1 + along)), 0)


def _stacked(x: jax.Array, layout: Layout) -> jax.Array:
    return jnp.transpose(x, layout.order).reshape(layout.matrices)


def _norms(matrices: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(matrices), (1, 2)))


def _inner(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
    """The real inner product of two vectors; a product of matrices could compute in fewer bits."""
    return sum((jnp.sum((x * jnp.conj(b[path])).real) for path, x in a.items()), jnp.zeros(()))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
