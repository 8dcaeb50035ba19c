"""Parts that work in the eigenbases of Shampoo's preconditioners: SOAP and its relatives.

All of them use the bases that earlier gradients made: a gradient enters the Gram matrices after the
direction of its step was computed, and the bases follow.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim import eigen
from optim.descent import Updated, bias_correction, moving_average, scalar
from optim.division import one_by_one
from optim.eigen import Sides, first_bases, first_sides, of_sides, turn, turn_back
from optim.factories import with_known_extras
from optim.layouts import MatrixSpec
from optim.matrices import Matrices, product, transpose
from optim.parts.base import Length, Part, at_least, check_count, check_option, dot, norm, passed


class SoapState(NamedTuple):
    """The state of `soap`, and of `optim.soap`."""

    count: jax.Array  # number of updates so far, int32
    # of the updates, in the eigenbases, shaped like the parameters; an empty tuple without `b1`
    mean: Any
    variance: optax.Params  # the mean of the squares, likewise
    # mean of G G^T, [batch axes..., rows, rows]; an empty tuple for a side that is not rotated
    left: optax.Params
    right: optax.Params  # mean of G^T G, [batch axes..., columns, columns]; likewise
    left_basis: optax.Params  # eigenvectors of `left`, as columns
    right_basis: optax.Params


def soap(
    b2: float = 0.9,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    every: int = 1,
    squares: Literal["update", "gradient"] = "update",
    first: Literal["pass", "rotate", "skip"] = "pass",
    sort: bool = True,
    length: Literal["gram", "frobenius", "free"] = "gram",
    sides: Literal["both", "shorter"] = "both",
    max_precond_dim: int = 10_000,
    matrices: MatrixSpec = None,
    b1: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Divides updates by the root of their mean squares in Shampoo's eigenbases (SOAP).

    With the update U, the gradient G of the chain and the bases Q_L and Q_R, one step is

        P <- Q_L^T U Q_R
        V <- b2 * V + (1 - b2) * P^2                  (squares="gradient": of Q_L^T G Q_R)
        D  = Q_L (P / (sqrt(V) + eps)) Q_R^T
        L <- shampoo_beta * L + (1 - shampoo_beta) * G G^T,   R likewise of G^T G
        Q_L, Q_R <- one power iteration and a QR decomposition of L Q_L and R Q_R

    It stands after `momentum`, and before `polar` it is SOAP-Muon. There is no bias correction: a
    part after it usually sets the length. With `b1`, there is one, and in D, P is replaced by its
    mean, which is kept in the eigenbases: `{b1: 0.95, b2: 0.95, every: 10, first: skip, length:
    free}`, without `momentum`, is `optim.soap`. With the defaults it is the part of record 46 of
    modded-nanogpt's optimizer track; `{squares: gradient, first: rotate, sort: false, length:
    free}` after `{momentum: {nesterov: false}}`, with `match_norm` and `pin_radius`, is SOAP-H.

    Where the gradients so far span no directions, bases are completed, and elements that are zero
    up to rounding do not contribute, as in `optim.soap`. Those programs divide noise by noise
    there. They also bound the root of V by eps where it is added here.

    Args:
        b2: the decay of the means of squares; a float, a traced scalar or, in a group, a schedule.
        shampoo_beta: the decay of the means of G G^T and G^T G; None for `b2`.
        eps: added to the root of the mean squares, and the smallest length by which is divided.
        every: the number of updates from one change of the bases to the next.
        squares: whether V averages the squares of the update or those of the gradient.
        first: what the first update does, whose gradient makes the first bases: "pass" returns the
            update as it is, "skip" returns zero, and "rotate" computes the bases before the
            direction.
        sort: whether columns are sorted by their eigenvalues before each QR decomposition, and V
            with them.
        length: whether the direction of each matrix gets the norm of its update, "frobenius" or
            "gram" (see `polar`), or is left "free".
        sides: whether "both" sides of a matrix are rotated or only the "shorter" one, both if it is
            square.
        max_precond_dim: the longest side that is rotated.
        matrices: which axes are the matrices; None for the last two.
        b1: the decay of the mean of P, as that of the squares; None for P itself, and no bias
            correction.

    Returns:
        The part.

    Raises:
        ValueError: an option is unknown, or `every` is not positive; at init, a parameter is not a
            real matrix; at the update, outside of `optim.chain`.

    Reference: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam,
      https://arxiv.org/abs/2409.11321
    """
    check_option("squares", squares, ("update", "gradient"))
    check_option("first", first, ("pass", "rotate", "skip"))
    check_option("length", length, ("gram", "frobenius", "free"))
    check_option("sides", sides, ("both", "shorter"))
    check_count("every", every)
    over = Matrices(matrices, "optim.parts.soap")
    keep = b2 if shampoo_beta is None else shampoo_beta
    grams_of = partial(eigen.grams_of_sides, max_size=max_precond_dim, sides=sides)

    def init(params: optax.Params) -> SoapState:
        over.declare(params)
        zeros, *fields = first_sides(over, params, grams_of)
        mean = () if b1 is None else jax.tree.map(jnp.zeros_like, zeros)
        return SoapState(jnp.zeros((), jnp.int32), mean, zeros, *fields)

    def observe(g: jax.Array, *_: Any) -> tuple[Sides, Any]:
        return grams_of(g), ()

    direction = _adam_direction(b1, b2, eps, squares, first, length)
    rotates_first = first == "rotate"
    update = _update_of("parts.soap", over, direction, observe, keep, every, rotates_first, sort)
    kept: Length = "ignores" if length == "free" else "keeps"
    return Part(init, update, name="parts.soap", length=kept, once=True)


def _adam_direction(
    b1: ArrayLike | None,
    b2: ArrayLike,
    eps: ArrayLike,
    squares: str,
    first: str,
    length: str,
    corrected: bool = True,
) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
    """Makes the `direction` of `soap` and of `kl_soap` for `_update_of`."""

    def direction(
        u: jax.Array, g: jax.Array, moments: Any, bases: Sides, _: Any, count: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:

        def average(old: jax.Array, new: jax.Array, decay: Any) -> jax.Array:
            new = moving_average(old, new, decay)
            if first == "rotate":
                return new
            # Before the first bases there is nothing to average: it begins with the second update.
            # `old` is 0 as well, but XLA fuses the two differently, and a run must keep its bits.
            return jnp.where(count == 0, old if b1 is None else 0, new)

        turned = turn(u, bases)
        square = turned if squares == "update" else turn(g, bases)
        variance = average(moments[-1], square**2, b2)
        mean = [average(old, turned, b1) for old in moments[:-1]]
        # As in the authors' program, eps is added to a root without bias correction.
        divided = (mean[0] if mean else turned) / (jnp.sqrt(variance) + scalar(eps, u))
        if jax.tree.leaves(bases):
            divided = jnp.where(eigen.is_noise(variance), 0, divided)
        found = turn_back(divided, bases)
        if b1 is not None and corrected:
            terms = count + 1 if first == "rotate" else count
            found = jnp.sqrt(bias_correction(b2, terms, u)) / bias_correction(b1, terms, u) * found
        if length != "free":
            size = norm if length == "frobenius" else _gram_norm
            found = found * (size(u) / at_least(size(found), eps))
        if first != "rotate":
            found = jnp.where(count == 0, u if first == "pass" else 0, found)
        return found, [*mean, variance]

    return direction


class KlState(NamedTuple):
    """The state of `kl_soap` and `kl_shampoo`; for the other fields, see `SoapState`."""

    # `left` and `right` are the Gram matrices of gradients that the other side has whitened.

    count: jax.Array  # the number of updates so far, int32
    mean: Any  # of the updates, in the eigenbases; () without `b1`
    variance: Any  # in the eigenbases; () for `kl_shampoo`
    left: optax.Params
    right: optax.Params
    left_basis: optax.Params
    right_basis: optax.Params
    left_values: optax.Params  # estimates of the eigenvalues of `left`, [batch axes..., rows]
    right_values: optax.Params  # those of `right`, [batch axes..., columns]


def kl_soap(
    b2: float = 0.98,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    every: int = 10,
    first_value: float = 0.1,
    largest_root: float = 4000.0,
    matrices: MatrixSpec = None,
    b1: float | None = None,
    first_gram: Literal["average", "copy"] = "average",
    bounded_by: Literal["side", "root"] = "side",
) -> optax.GradientTransformationExtraArgs:
    """Works as `soap` in eigenbases that minimize a Kullback-Leibler divergence (KL-SOAP).

    With the gradient G, [m, n], and the estimates l_L and l_R of the eigenvalues of L and R, the
    preconditioners follow gradients that the other side has whitened:

        L <- shampoo_beta * L + (1 - shampoo_beta) * G Q_R diag(1 / l_R) Q_R^T G^T / n
        R <- shampoo_beta * R + (1 - shampoo_beta) * G^T Q_L diag(1 / l_L) Q_L^T G / m

    and l_L and l_R are means of the diagonals of the same products in the bases. The direction is

        D = Q_L (P / (sqrt(V) + eps)) Q_R^T,  P = Q_L^T U Q_R,  V a mean of (Q_L^T G Q_R)^2

    without bias correction. The first update computes the first bases and returns zero. It stands
    after `momentum` with nesterov=False. With `b1`, it stands alone, and P is replaced in D by its
    mean, which begins with the second gradient, as in the authors' program. KL-SOAP-H of
    modded-nanogpt's optimizer track is `{b2: 0.9, every: 1, b1: 0.95, first_gram: copy, bounded_by:
    root}`, with `match_norm` and `pin_radius`.

    Args:
        b2: the decay of the means of squares; a float, a traced scalar or, in a group, a schedule.
        shampoo_beta: the decay of L, R, l_L and l_R; None for `b2`.
        eps: added to the root of the mean squares.
        every: the number of updates from one change of the bases to the next.
        first_value: the first estimate of every eigenvalue.
        largest_root: the largest 1 / sqrt(eigenvalue).
        matrices: which axes are the matrices; None for the last two.
        b1: the decay of the mean of P; a float, a traced scalar or, in a group, a schedule. None
            for P itself.
        first_gram: whether the first Gram matrices are averaged into L and R, which begin at zero
            ("average", as the authors do), or are the first L and R ("copy").
        bounded_by: whether 1 / sqrt(eigenvalue) is also at most the "side" of the matrix, or 10 for
            sides below 10, as the authors have it, or at most the largest "root" only.

    Returns:
        The part.

    Raises:
        ValueError: an option is unknown, or `every` is not positive; at init, a parameter is not a
            real matrix; at the update, outside of `optim.chain`.

    Reference: Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler
      Minimization, https://arxiv.org/abs/2509.03378
    """
    check_option("first_gram", first_gram, ("average", "copy"))
    check_option("bounded_by", bounded_by, ("side", "root"))
    direction = _adam_direction(b1, b2, eps, "gradient", "skip", "free", corrected=False)
    keep = b2 if shampoo_beta is None else shampoo_beta
    bounded = partial(_bounded, largest_root=largest_root, by_side=bounded_by == "side")
    means = (b1 is not None, True)
    return _kl_part(
        "kl_soap", direction, means, keep, every, first_value, bounded, matrices, first_gram
    )


def kl_shampoo(
    shampoo_beta: float = 0.98,
    eps: float = 1e-8,
    every: int = 10,
    first_value: float = 0.1,
    largest_root: float = 4000.0,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Whitens updates by both preconditioners of `kl_soap` (KL-Shampoo).

    With the notation of `kl_soap`, the direction is

        D = Q_L (P / (sqrt(l_L l_R^T) + eps)) Q_R^T

    so that no mean of squares is kept.

    Args:
        shampoo_beta: the decay of all means; a float, a traced scalar or, in a group, a schedule.
        eps: added to the roots.
        every: the number of updates from one change of the bases to the next.
        first_value: the first estimate of every eigenvalue.
        largest_root: the largest 1 / sqrt(eigenvalue); no larger than the side of the matrix, or 10
            for sides below 10.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: see `kl_soap`.

    Reference: Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler
      Minimization, https://arxiv.org/abs/2509.03378
    """

    def direction(
        u: jax.Array, _: Any, moments: Any, bases: Sides, values: Sides, count: jax.Array
    ) -> tuple[jax.Array, Any]:
        if not u.size:  # grams_of_sides gives such matrices no sides
            return u, moments
        roots = jnp.sqrt(values.left[:, :, None] * values.right[:, None, :])
        found = turn_back(turn(u, bases) / (roots + scalar(eps, u)), bases)
        return jnp.where(count == 0, 0, found), moments

    bounded = partial(_bounded, largest_root=largest_root)
    means = (False, False)
    return _kl_part(
        "kl_shampoo", direction, means, shampoo_beta, every, first_value, bounded, matrices
    )


def trust_gate(
    around: optax.GradientTransformation,
    floor: float = 0.0,
    cap: float = 1.0,
    min_agreement: float = 0.2,
    eps: float = 1e-8,
    matrices: MatrixSpec = None,
) -> optax.GradientTransformationExtraArgs:
    """Blends what a part makes of updates with the updates, by how far the two agree.

    With the update U, what the inner part makes of it S, and the gradient G, the share of S is, for
    each matrix,

        agreement = clip((cos(S, U) - min_agreement) / (1 - min_agreement), 0, 1)
        share     = clip(agreement * clip(cos(S, G) / cos(U, G), 0, 1), floor, cap)

    and U + share * (S - U) is given the norm of U, by the Gram norm (see `polar`). An inner part
    such as `soap`, whose bases may be old, is thus followed where it still points to where the
    momentum and the gradient do.

    Args:
        around: the inner part.
        floor: the smallest share; a float, a traced scalar or, in a group, a schedule.
        cap: the largest share; likewise.
        min_agreement: the cosine of S and U at and below which S has only the smallest share.
        eps: the smallest norm and cosine by which is divided.
        matrices: which axes are the matrices; None for the last two.

    Returns:
        The part.

    Raises:
        ValueError: at init, a parameter is not a real matrix; at the update, outside of
            `optim.chain`.

    Reference: record 46 of the optimizer track of KellerJordan/modded-nanogpt
    """
    inner = with_known_extras(around)
    over = Matrices(matrices, "optim.parts.trust_gate")

    def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(x, y) / at_least(norm(x) * norm(y), eps)

    def blend(u: jax.Array, s: jax.Array, g: jax.Array) -> jax.Array:
        least = scalar(min_agreement, u)
        agreement = jnp.clip((cosine(s, u) - least) / (1 - least), 0, 1)
        aligned = jnp.clip(cosine(s, g) / at_least(cosine(u, g), eps), 0, 1)
        share = jnp.clip(agreement * aligned, scalar(floor, u), scalar(cap, u))
        mixed = u + share * (s - u)
        return mixed * (at_least(_gram_norm(u), eps) / at_least(_gram_norm(mixed), eps))

    def init(params: optax.Params) -> Any:
        state = inner.init(params)
        over.declare(params, again=False)
        return state

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        found, state = inner.update(updates, state, params, **extra)
        return over.each(blend, updates, found, passed(extra, "grad", "parts.trust_gate")), state

    return Part(init, update, name="parts.trust_gate", around=around)


def _kl_part(
    name: str,
    direction: Callable[..., tuple[jax.Array, Any]],
    means: tuple[bool, bool],
    keep: float,
    every: int,
    first_value: float,
    bounded: Callable[[jax.Array], jax.Array],
    matrices: MatrixSpec,
    first_gram: str = "average",
) -> Part:
    """Makes `kl_soap` or `kl_shampoo`, whose direction is a function of one parameter's arrays."""
    # `means` says whether there are means of the updates and of the squares.
    check_count("every", every)
    over = Matrices(matrices, f"optim.parts.{name}")

    def init(params: optax.Params) -> KlState:
        over.declare(params)
        zeros, *sides = first_sides(over, params, eigen.grams_of_sides)
        mean, variance = (
            jax.tree.map(jnp.zeros_like, zeros) if is_kept else () for is_kept in means
        )
        bases = sides[2:]
        values = jax.tree.map(lambda x: jnp.zeros_like(x[..., 0]) + scalar(first_value, x), bases)
        return KlState(jnp.zeros((), jnp.int32), mean, variance, *sides, *values)

    def observe(g: jax.Array, bases: Sides, values: Sides, count: jax.Array) -> tuple[Sides, Sides]:
        start = count == 0
        grams, diagonals = _whitened(g, bases, values, start)
        averages = jax.tree.map(lambda x, new: moving_average(x, new, keep), values, diagonals)
        return grams, jax.tree.map(
            lambda old, new: jnp.where(start, old, bounded(new)), values, averages
        )

    copies = first_gram == "copy"
    update = _update_of(f"parts.{name}", over, direction, observe, keep, every, copies_first=copies)
    return Part(init, update, name=f"parts.{name}", length="ignores", once=True)


def _whitened(g: jax.Array, bases: Sides, values: Sides, start: jax.Array) -> tuple[Sides, Sides]:
    """Computes the Gram matrices of gradients that the other side has whitened."""
    # Returns them, divided by the length of the other side, and the diagonals that they have in the
    # bases. At the start, nothing is whitened.
    rows, columns = g.shape[-2:]
    if not g.size:
        return Sides((), ()), Sides((), ())
    inverse = Sides(*(jnp.where(start, 1, 1 / x) for x in values))
    by_right = product(g, bases.right) * jnp.sqrt(inverse.right)[:, None, :]
    by_left = jnp.sqrt(inverse.left)[:, :, None] * product(transpose(bases.left), g)
    left = product(by_right, transpose(by_right)) / columns
    right = product(transpose(by_left), by_left) / rows
    square = turn(g, bases) ** 2
    of_left = jnp.sum(square * inverse.right[:, None, :], axis=-1) / columns
    of_right = jnp.sum(square * inverse.left[:, :, None], axis=-2) / rows
    return Sides(left, right), Sides(of_left, of_right)


def _bounded(values: jax.Array, largest_root: float, by_side: bool = True) -> jax.Array:
    """Bounds eigenvalues, [n, side], so that their inverse roots are not too large."""
    largest = scalar(largest_root, values)
    if by_side:
        largest = jnp.maximum(jnp.clip(largest, max=values.shape[-1]), 10)
    return jnp.maximum(values, 1 / largest**2)


# What the parts share.


def _update_of(
    name: str,
    over: Matrices,
    direction: Callable[..., tuple[jax.Array, Sequence[jax.Array]]],
    observe: Callable[..., tuple[Sides, Any]],
    keep: ArrayLike,
    every: int,
    rotates_first: bool = False,
    sorts: bool = False,
    copies_first: bool = False,
) -> Callable[..., Updated]:
    """Makes the update of a part, whose state is a `SoapState` or a `KlState`."""
    # For one parameter's arrays, [n, rows, columns], `direction` is (U, G, moments, bases, values,
    # count) -> direction, new moments (the mean of updates, then the last mean of squares, as far
    # as it has them), and `observe` is (G, bases, values, count) -> that of which the Gram matrices
    # are the means with the decay `keep`, new values of the sides. `rotates_first` is whether the
    # first bases are computed before the first direction, and `copies_first` whether the first Gram
    # matrices are copied into the means.

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        count, at = state.count, state._fields.index("left")
        present = [x for x in state[1:at] if jax.tree.leaves(x)]
        number = 2 + len(present)
        due = jnp.where(count % every == 0, 1, 0)
        branch = due if rotates_first else jnp.where(count == 0, 2, due)

        def move(*lists: list[Any]) -> Sequence[list[Any]]:
            moves, grads, *means = lists[:number]
            sides = [list(map(Sides, *lists[i : i + 2])) for i in range(number, len(lists), 2)]
            grams, bases, values = [*sides, [()] * len(moves)][:3]
            moments = [[mean[i] for mean in means] for i in range(len(moves))]

            found = [observe(*row, count) for row in zip(grads, bases, values, strict=True)]
            news = [new for new, _ in found]
            if rotates_first:
                bases = jax.lax.cond(count == 0, lambda: first_bases(news), lambda: bases)
            columns = zip(moves, grads, moments, bases, values, strict=True)
            rows = [direction(*row, count) for row in columns]
            decay = jnp.where(count == 0, 0, keep) if copies_first else keep
            grams = jax.tree.map(lambda x, new: moving_average(x, new, decay), grams, news)
            moments, bases = _follow(branch, [x for _, x in rows], grams, bases, sorts)
            means = [[x[i] for x in moments] for i in range(len(means))]
            sides = [grams, bases, [value for _, value in found]][: len(sides)]
            return [x for x, _ in rows], grads, *means, *(y for x in sides for y in of_sides(x))

        trees = [updates, passed(extra, "grad", name), *present]
        moves, _, *fields = over.map(one_by_one(move), trees, state[at:])
        absent = state[1 : at - len(present)]
        return moves, type(state)(jnp.asarray(optax.safe_increment(count)), *absent, *fields)

    return update


def _follow(
    branch: jax.Array, moments: list[Any], grams: list[Sides], bases: list[Sides], sorts: bool
) -> tuple[list[Any], list[Sides]]:
    """Keeps the bases (0), rotates them by power iteration (1) or computes first ones (2)."""
    # The moments of each parameter follow: a mean is rotated to the new bases. Mean squares cannot
    # be rotated: they are sorted with the columns to which they belong.

    def rotate() -> tuple[list[Any], list[Sides]]:
        news, orders = eigen.next_bases(grams, bases, sorts)

        def one(own: Any, old: Sides, new: Sides, order: Sides) -> list[jax.Array]:
            means = [turn(turn_back(mean, old), new) for mean in own[:-1]]
            return means + [eigen.sort_elements(square, order) for square in own[-1:]]

        return list(map(one, moments, bases, news, orders)), news

    branches = [lambda: (moments, bases), rotate, lambda: (moments, first_bases(grams))]
    return jax.lax.switch(branch, branches)


def _gram_norm(x: jax.Array) -> jax.Array:
    """Returns the root of the Frobenius norm of X X^T, [n, 1, 1], for X [n, rows, columns]."""
    flat = transpose(x) if x.shape[-2] > x.shape[-1] else x
    return jnp.sqrt(norm(product(flat, transpose(flat))))
