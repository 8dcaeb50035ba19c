"""Parts that compute a direction: averages over the steps, and the polar factor."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import Updated, map_unzip, moving_average, scalar
from optim.dtypes import wide_zeros
from optim.layouts import Layout, MatrixSpec
from optim.matrices import Matrices, product, transpose
from optim.newton_schulz import Triple, orthogonalize_all, polynomials, shape_factor
from optim.parts.base import Part, at_least, check_dtype, check_option, norm


class MomentumState(NamedTuple):
    """The state of `momentum`: the mean of the gradients, shaped like the parameters."""

    momentum: optax.Params


def momentum(
    decay: float = 0.95, nesterov: bool = True, dtype: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages the updates over the steps.

    With the update G, one step is

        M <- decay * M + (1 - decay) * G
        D  = (1 - decay) * G + decay * M     (nesterov; else D = M)

    Args:
        decay: in [0, 1); a float, a traced scalar or, in a group, a schedule.
        nesterov: whether the update is averaged into the momentum a second time.
        dtype: the dtype in which the mean is stored, such as "bfloat16"; None for the parameter's
            dtype, at least float32. The direction is computed before the mean is rounded to it.

    Returns:
        The part.

    Raises:
        ValueError: the dtype is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from optim import parts
        >>> part = parts.momentum(0.5)
        >>> direction, state = part.update(jnp.ones(1), part.init(jnp.zeros(1)))
        >>> float(state.momentum[0]), float(direction[0])
        (0.5, 0.75)
    """
    check_dtype("dtype", dtype)

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(jax.tree.map(lambda p: wide_zeros(p, dtype), params))

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        def follow(g: jax.Array, m: jax.Array) -> jax.Array:
            return moving_average(m, g, decay)

        moments = jax.tree.map(follow, updates, state.momentum)
        mixed = jax.tree.map(follow, updates, moments) if nesterov else moments
        kept = jax.tree.map(lambda m, old: m.astype(old.dtype), moments, state.momentum)
        return mixed, MomentumState(kept)

    return Part(init, update, name="parts.momentum")


class MixtureState(NamedTuple):
    """The state of `momentum_mixture`."""

    means: tuple[optax.Params, ...]  # for each decay the mean of the updates


def momentum_mixture(
    decays: list[float] | tuple[float, ...],
    weights: list[float] | tuple[float, ...],
    share: float = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """Averages the updates over the steps by several means of different lengths.

    With the update G, one step is

        M_k <- decays[k] * M_k + (1 - decays[k]) * G
        D    = (1 - share) * G + share * (weights[0] * M_0 + weights[1] * M_1 + ...)

    A mean has a memory of about 1 / (1 - decay) steps. Weights that change over the steps make the
    memory of the mixture longer or shorter without new means.

    Args:
        decays: each in [0, 1); floats, traced scalars or, in a group, schedules.
        weights: one for each decay, likewise; usually their sum is 1.
        share: the share of the means in the direction, likewise; the gradient has the rest. With
            one mean whose decay is `share`, the mixture is `momentum`.

    Returns:
        The part.

    Raises:
        ValueError: there are not as many weights as decays, or none.

    Example:
        >>> import jax.numpy as jnp
        >>> from optim import parts
        >>> part = parts.momentum_mixture([0.5, 0.75], [0.5, 0.5], share=1.0)
        >>> direction, state = part.update(jnp.ones(1), part.init(jnp.zeros(1)))
        >>> [float(mean[0]) for mean in state.means], float(direction[0])
        ([0.5, 0.25], 0.375)

    Reference: pull requests 340, 357 and 359 of KellerJordan/modded-nanogpt ("K-Maxwell momentum")
    """
    if not decays or len(decays) != len(weights):
        raise ValueError(
            f"decays and weights must be lists of one length, got {len(decays)} decays and"
            f" {len(weights)} weights."
        )

    def init(params: optax.Params) -> MixtureState:
        return MixtureState(tuple(jax.tree.map(wide_zeros, params) for _ in decays))

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        means = tuple(
            jax.tree.map(lambda g, m, b=decay: moving_average(m, g, b), updates, mean)
            for decay, mean in zip(decays, state.means, strict=True)
        )

        def mix(g: jax.Array, *of_decays: jax.Array) -> jax.Array:
            pairs = zip(weights, of_decays, strict=True)
            mixture = sum((scalar(weight, g) * mean for weight, mean in pairs), jnp.zeros_like(g))
            return moving_average(mixture, g, share)

        return jax.tree.map(mix, updates, *means), MixtureState(means)

    return Part(init, update, name="parts.momentum_mixture")


def polar(
    polynomial: str | Sequence[Any] = "jordan",
    steps: int = 5,
    norm: str = "frobenius",
    scale: str = "original",
    eps: float = 1e-7,
    dtype: str | None = None,
    matrices: MatrixSpec = None,
    contra: float | None = None,
    balance: int | None = None,
    balance_power: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces each matrix by an approximation of its polar factor, by Newton-Schulz steps.

    Args:
        polynomial: the coefficients of the steps, as `ns_coefficients` of `optim.muon`: a name, a
            triple (a, b, c) for all steps, or a triple for each step, the last of which is
            repeated.
        steps: the number of steps.
        norm: by which a matrix X is divided first: "frobenius", or "gram", the square root of the
            Frobenius norm of X X^T, which is smaller and still at least the largest singular value.
        scale: the factor for the shape of the matrix, as in `optim.muon`.
        eps: the smallest norm by which a matrix is divided.
        dtype: the dtype of the steps, such as "bfloat16"; None for that of the updates.
        matrices: which axes are the matrices; None for the last two.
        contra: how much of the matrix, divided by its spectral norm, is subtracted from its polar
            factor (Contra-Muon); the difference gets the Frobenius norm of the factor. The spectral
            norm is that of five power iterations. None subtracts nothing.
        balance: how many polar factors are computed, at least 1, to make the rows along the longer
            side of the last one about equally long (Aurora). Before the first, each row of the
            matrix is divided by its length; before each further one, it is also multiplied by
            (wanted / found)^balance_power, the squared lengths of the row that is wanted and of
            that of the factor before. Square matrices are left out. None balances nothing.
        balance_power: the power in it; None for 0.5.

    Returns:
        The part.

    Raises:
        ValueError: an argument is unknown, `balance` is not positive, or there is a power and no
            balance; at init, a parameter is not a real matrix.

    References: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/;
        Contra-Muon, https://github.com/nilin/contra-muon; Aurora, arXiv:2606.27715
    """
    if balance is None and balance_power is not None or balance is not None and balance < 1:
        raise ValueError(
            "optim.parts.polar needs balance to be at least 1, or None without a balance_power, but"
            f" got balance={balance} and balance_power={balance_power}."
        )
    check_dtype("dtype", dtype)
    over = Matrices(matrices, "optim.parts.polar")
    triples = polynomials(polynomial, steps, ("polynomial", "steps"))
    power = 0.5 if balance_power is None else balance_power
    balanced = None if balance is None else (balance, power)
    return polar_of(over, triples, scale, eps, dtype, norm, contra=contra, balance=balanced)


def polar_of(
    over: Matrices,
    triples: Sequence[Triple],
    scale: str,
    eps: ArrayLike,
    dtype: str | None,
    norm: str = "frobenius",
    add_eps: bool = False,
    contra: ArrayLike | None = None,
    balance: tuple[int, ArrayLike] | None = None,
) -> Part:
    """Makes `polar` of matrices that are named already, and of its steps' coefficients."""
    check_option("norm", norm, ("frobenius", "gram"))
    shape_factor(scale, 1, 1)  # raises on an unknown name here, and not at the first update

    def init(params: optax.Params) -> optax.EmptyState:
        over.declare(params, length=length)
        return optax.EmptyState()

    def length(layout: Layout) -> float:
        count, rows, columns = layout.matrices
        return (count * min(rows, columns)) ** 0.5 * shape_factor(scale, rows, columns)

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        splits = over.splits(updates)

        def orthogonal(batches: list[jax.Array]) -> list[list[jax.Array]]:
            # Each array is [matrices, inputs, outputs].
            def factors(of: Mapping[int, jax.Array]) -> list[jax.Array]:
                own = [splits[index] for index in of]
                return orthogonalize_all([*of.values()], triples, eps, dtype, norm, add_eps, own)

            given = dict(enumerate(batches))
            found = factors(given) if balance is None else _balanced(factors, given, *balance)
            if contra is not None:
                found = [_subtract(p, x, contra) for p, x in zip(found, batches, strict=True)]
            return [[shape_factor(scale, *x.shape[-2:]) * x for x in found]]

        return over.map(orthogonal, [updates])[0], state

    return Part(init, update, name="parts.polar", length="ignores", once=True)


def _balanced(
    factors: Callable[[Mapping[int, jax.Array]], list[jax.Array]],
    given: Mapping[int, jax.Array],
    count: int,
    power: ArrayLike,
) -> list[jax.Array]:
    """Computes polar factors whose rows along the longer side have about one length (Aurora)."""
    # `factors` computes those of some of the arrays [matrices, inputs, outputs], by their places.

    def squares(x: jax.Array) -> jax.Array:
        along = -1 if x.shape[-2] > x.shape[-1] else -2  # the elements of a row
        return at_least(jnp.sum(x * x, axis=along, keepdims=True), 1e-14)

    long = {i: x for i, x in given.items() if x.shape[-2] != x.shape[-1]}
    wanted = {i: min(x.shape[-2:]) / max(x.shape[-2:]) for i, x in long.items()}
    scales = {i: 1 / jnp.sqrt(squares(x)) for i, x in long.items()}
    found = factors({**given, **{i: scales[i] * x for i, x in long.items()}})
    for _ in range(count - 1) if long else ():
        ratios = {i: wanted[i] / squares(found[i]) for i in long}
        scales = {i: scales[i] * x ** scalar(power, x) for i, x in ratios.items()}
        again = factors({i: scales[i] * x for i, x in long.items()})
        for i, x in zip(long, again, strict=True):
            found[i] = x
    return found


def _subtract(polar: jax.Array, x: jax.Array, share: ArrayLike) -> jax.Array:
    """Subtracts a share of matrices, divided by their spectral norms; keeps the Frobenius norm."""

    def length(of: jax.Array) -> jax.Array:
        return at_least(norm(of), 1e-10)  # as in the program of its author

    v = jnp.ones_like(x[..., :1])
    for _ in range(5):
        u = product(transpose(x), v)
        v = product(x, u / length(u))
        v = v / length(v)
    rest = polar - scalar(share, x) * x / length(product(transpose(x), v))
    return rest * norm(polar) / length(rest)


class NormalizeState(NamedTuple):
    """The state of `normalize`: the mean squares, [batch axes..., outputs] for each parameter."""

    variance: optax.Params


def normalize(
    b2: float = 0.95, eps: float = 1e-10, matrices: MatrixSpec = None
) -> optax.GradientTransformationExtraArgs:
    """Divides each output's updates by the root of their mean square over the steps (NorMuon).

    With the update U of a matrix [inputs, outputs] and the mean V over the inputs, one step is

        V <- b2 * V + (1 - b2) * mean over inputs of U^2
        D  = U / (sqrt(V) + eps)
        D <- D * norm(U) / norm(D)

    so that the length of the update stays what it was. It stands after `polar`, whose outputs
    have updates of different lengths if the matrix is not square.

    Args:
        b2: the decay of the mean squares; a float, a traced scalar or, in a group, a schedule.
        eps: added to the root of the mean squares.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix.

    Reference: Li et al., NorMuon, https://arxiv.org/abs/2510.05491
    """
    over = Matrices(matrices, "optim.parts.normalize")

    def init(params: optax.Params) -> NormalizeState:
        over.declare(params, again=False)
        zeros = jax.tree.map(wide_zeros, params)
        _, variance = over.map(lambda arrays: (arrays, list(map(_mean_square, arrays))), [zeros])
        return NormalizeState(variance)

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        def one(x: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array]:
            variance = moving_average(variance, _mean_square(x), b2)
            divided = x / (jnp.sqrt(variance) + scalar(eps, x))[:, None, :]
            return divided * (norm(x) / at_least(norm(divided), eps)), variance

        moves, variance = over.map(partial(map_unzip, one, 2), [updates], [state.variance])
        return moves, NormalizeState(variance)

    return Part(init, update, name="parts.normalize", once=True)


def _mean_square(x: jax.Array) -> jax.Array:
    """Returns the mean square of each output, [n, outputs]; 0 for one without inputs."""
    return jnp.sum(jnp.square(x), axis=-2) / max(x.shape[-2], 1)
