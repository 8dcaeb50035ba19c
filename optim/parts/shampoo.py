"""Shampoo: preconditions matrices by inverse roots of the covariances of gradients."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim import eigen
from optim.descent import Updated, average_or_add, bias_correction, correction, moving_average
from optim.division import one_by_one
from optim.factories import with_known_extras
from optim.layouts import MatrixSpec
from optim.matrices import Matrices
from optim.parts.base import Part, check_count, check_direction, check_option, passed


class ShampooState(NamedTuple):
    """The state of `shampoo`, and of `optim.shampoo`."""

    # The statistics and roots of a side that is not preconditioned are empty tuples.

    count: jax.Array  # number of updates so far, int32
    mean: Any  # of the updates, shaped like the parameters; an empty tuple without `b1`
    left: optax.Params  # mean or sum of G G^T, [batch axes..., rows, rows]
    right: optax.Params  # that of G^T G, [batch axes..., columns, columns]
    left_root: optax.Params  # last computed inverse root of `left`
    right_root: optax.Params
    graft: optax.OptState  # the state of the argument `graft`


def shampoo(
    b2: float = 0.95,
    eps: float | None = 1e-12,
    exponent: float | None = None,
    every: int = 1,
    start: int | None = None,
    sides: Literal["both", "shorter"] = "both",
    tolerance: float | None = None,
    max_precond_dim: int = 8192,
    matrices: MatrixSpec = None,
    b1: float | None = None,
    graft: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by inverse roots of the covariances of gradients (Shampoo).

    With the update U, the gradient G of the chain and the number of the update t, one step is

        L <- b2 * L + (1 - b2) * G G^T,   R likewise of G^T G
        D  = (L / (1 - b2^t) + eps I)^(-exponent) U (R / (1 - b2^t) + eps I)^(-exponent)

    With b2 = 1, L and R are sums, which are not corrected: with `every` at its default and nothing
    else in the chain, this is the Shampoo of Gupta et al. With eps = None, the powers are those of
    pseudo-inverses: eigenvalues of zero stay zero. Before update `start`, D = U.

    With `b1`, U is first replaced by its mean, corrected for its bias. With `graft`, which makes A
    of U, D is multiplied by norm(A) / norm(D) for each matrix, and D = A before `start` and for
    matrices of which no side is preconditioned. Without decay, `{b1: 0.9, b2: 0.999, every: 10,
    graft: !parts.adam {b1: null, squares: gradient}}` is `optim.shampoo`.

    After `optax.ema`, the bias-corrected momentum, and before the part `graft`, whose Adam averages
    the gradient once more, it is Distributed Shampoo as well, as in results 21 and 35 of
    modded-nanogpt's optimizer track, both with the exponent 1/4 on both sides. One-sided Shampoo is
    {sides: shorter}.

    Differences from the program of those results: if the smallest eigenvalue is below eps, it adds
    to all eigenvalues what it lacks; here, eigenvalues below the rounding errors of the largest are
    raised to these before eps is added. Its pseudo-inverse is {eps: null, tolerance: 0}.

    Args:
        b2: the decay of L and R; a float, a traced scalar or, in a group, a schedule.
        eps: added to the eigenvalues; None for pseudo-inverses.
        exponent: the power of each inverse root; None for 1/4 if both sides are preconditioned, and
            1/2 if one is.
        every: the number of updates from one computation of the roots to the next.
        start: the first update, counted from 1, that is preconditioned; None for `every`.
        sides: whether "both" sides of a matrix are preconditioned or only the "shorter" one, both
            if it is square.
        tolerance: in pseudo-inverses, eigenvalues up to this many times the largest count as zero;
            None for the rounding error of the dtype times the side of the matrix.
        max_precond_dim: the longest side that is preconditioned.
        matrices: which axes are the matrices; None for the last two.
        b1: the decay of the mean of U, as that of the covariances; None for U itself.
        graft: a part or a transformation of optax without a learning rate, such as `parts.adam`;
            None for the D above.

    Returns:
        The part.

    Raises:
        ValueError: `sides` is unknown, a number of updates is not positive, there is a tolerance
            without pseudo-inverses, or `graft` is a part that stands after the learning rate; at
            init, a parameter is not a real matrix; at the update, outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, optim
        >>> from optim import parts
        >>> tx = optim.chain(
        ...     learning_rate=0.1,
        ...     before=[optax.ema(0.9), parts.shampoo(0.95), parts.graft(parts.adam(0.9, 0.95))],
        ...     after=[parts.decay(0.1)],
        ... )
        >>> params = {"kernel": jnp.eye(2)}
        >>> grads = {"kernel": jnp.array([[1.0, 2.0], [3.0, 5.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[ 0.078 -0.11 ]
         [-0.11  -0.098]]

    References: Gupta et al., Shampoo, https://arxiv.org/abs/1802.09568; Shi et al., A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer,
      https://arxiv.org/abs/2309.06497; https://github.com/KellerJordan/modded-nanogpt,
      records/track_3_optimization
    """
    begin = every if start is None else start
    check_option("sides", sides, ("both", "shorter"))
    check_count("every", every)
    check_count("start", begin)
    check_direction("parts.shampoo", "graft", graft)
    if tolerance is not None and eps is not None:
        raise ValueError("tolerance is that of pseudo-inverses: set eps to None, or remove it.")
    over = Matrices(matrices, "optim.parts.shampoo")
    grams_of = partial(eigen.grams_of_sides, max_size=max_precond_dim, sides=sides)
    onto = with_known_extras(graft or optax.identity())

    def init(params: optax.Params) -> ShampooState:
        over.declare(params)
        zeros, *fields = eigen.first_sides(over, params, grams_of)
        mean = () if b1 is None else zeros
        return ShampooState(jnp.zeros((), jnp.int32), mean, *fields, graft=onto.init(params))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        count = jnp.asarray(optax.safe_increment(state.count))
        grads, mean = passed(extra, "grad", "parts.shampoo"), ()
        if (keep := b1) is not None:
            mean = jax.tree.map(lambda m, u: moving_average(m, u, keep), state.mean, updates)
            updates = jax.tree.map(lambda m: m / bias_correction(keep, count, m), mean)
        others, kept = onto.update(updates, state.graft, params, **extra)
        direct = partial(_direction, None if graft is None else count < begin)
        due = (count == begin) | ((count > begin) & (count % every == 0))

        def corrected(gram: jax.Array) -> jax.Array:
            return gram / correction(b2, count, gram)

        def move(moves: Any, others: Any, grads: Any, *factors: Any) -> Sequence[list[Any]]:
            news = eigen.of_sides(list(map(grams_of, grads)))
            grams = jax.tree.map(lambda old, new: average_or_add(old, new, b2), factors[:2], news)
            roots = jax.lax.cond(
                due,
                lambda: eigen.inverse_roots(grams, corrected, eps, exponent, tolerance),
                lambda: factors[2:],
            )
            return list(map(direct, moves, others, *roots)), others, grads, *grams, *roots

        moves, _, _, *fields = over.map(one_by_one(move), [updates, others, grads], state[2:6])
        return moves, ShampooState(count, mean, *fields, graft=kept)

    length = "ignores" if graft is None else "replaces"
    return Part(init, update, name="parts.shampoo", length=length, once=True)


def _direction(is_early: jax.Array | None, u: jax.Array, a: jax.Array, *roots: Any) -> jax.Array:
    """Preconditions U and grafts it onto A, which is returned early; None is for no grafting."""
    if is_early is None:
        return eigen.precondition(u, *roots)
    if not jax.tree.leaves(roots):
        return a
    return jnp.where(is_early, a, eigen.rescale(eigen.precondition(u, *roots), a))
