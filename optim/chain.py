"""Composes an optimizer from parts around one learning rate."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.declarations import doubt
from optim.descent import Updated, scalar
from optim.dtypes import widen
from optim.factories import ArgumentError, with_known_extras
from optim.parts.base import Length, Need, Part


class PartNeeded(ArgumentError):
    """Raised by `chain` if a part lacks another one that it needs; see `optim.parts.base.Need`."""

    # `part` is the name of the one that needs `need`, such as "parts.floor".

    def __init__(self, message: str, argument: str, part: str, need: Need):
        super().__init__(message, argument)
        self.part, self.need = part, need


class ChainState(NamedTuple):
    """The state of `chain`."""

    count: ArrayLike | tuple[()]  # the number of updates so far, int32; () if no schedule needs it
    before: tuple[optax.OptState, ...]  # the states of the parts before the learning rate
    after: tuple[optax.OptState, ...]  # the states of the parts after it


def chain(
    learning_rate: optax.ScalarOrSchedule,
    before: Sequence[optax.GradientTransformation],
    after: Sequence[optax.GradientTransformation] = (),
) -> optax.GradientTransformationExtraArgs:
    """Composes an optimizer from parts that stand before and after the learning rate.

    With the gradient G and the parameters W, one update is

        D = before[-1](... before[0](G))      a direction of ascent
        S = after[-1](... after[0](-learning_rate * D))
        W <- W + S

    A part is one of `optim.parts` or any transformation of optax that computes a direction, such as
    optax.scale_by_adam; it must not multiply by a learning rate. Each part's update receives the
    parameters and, if its signature has them, `grad`, the gradient that the chain was given, and
    `learning_rate`, its value at this step. All of it is at least float32.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        before: the parts that turn the gradient into a direction, in their order.
        after: the parts that change the step, which is what is added to the parameters.

    Returns:
        The optimizer; its updates have the parameters' dtypes.

    Raises:
        ValueError: a part of `optim.parts` stands on the wrong side of the learning rate, or where
            a later part undoes what it does or does it again, or it needs another part that is
            missing or stands on its other side; there is no part at all; at the update, if it is
            called without parameters.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, optim
        >>> from optim import parts
        >>> tx = optim.chain(
        ...     learning_rate=0.02,
        ...     before=[parts.momentum(0.95), parts.polar(), parts.match_norm()],
        ...     after=[parts.pin_radius()],
        ... )  # MuonH
        >>> params = {"kernel": jnp.eye(2)}
        >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
        >>> kernel = optax.apply_updates(params, updates)["kernel"]
        >>> print(np.asarray(kernel).round(3), round(float(jnp.linalg.norm(kernel)), 3))
        [[ 1.    -0.014]
         [-0.014  1.   ]] 1.414
    """
    if not before and not after:
        raise ArgumentError("The chain has no part: use optax.sgd, or name one.", "before")
    _check_sides("before", before)
    _check_sides("after", after)
    _check_lengths(before)
    _check_once("before", before)
    _check_once("after", after)
    _check_pins(after)
    _check_needs(before, after)
    decays = _two_decays(before, after)
    firsts, lasts = ([with_known_extras(part) for part in parts] for parts in (before, after))
    # In a group, `adapter` has replaced schedules by their values, and there is no count to keep.
    scheduled = callable(learning_rate)

    def init(params: optax.Params) -> ChainState:
        if decays:
            doubt("optim.chain", decays)
        wide = widen(params)
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        first, last = (tuple(part.init(wide) for part in parts) for parts in (firsts, lasts))
        return ChainState(count, first, last)

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("A chain needs parameters: call update(updates, state, params).")
        grads, wide = widen(updates), widen(params)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        given = {**extra, "grad": grads, "learning_rate": rate}

        def run(parts: Sequence[Any], moves: Any, states: Any) -> tuple[Any, tuple[Any, ...]]:
            news = []
            for part, old in zip(parts, states, strict=True):
                moves, new = part.update(moves, old, wide, **given)
                news.append(new)
            return moves, tuple(news)

        moves, first = run(firsts, grads, state.before)
        steps = jax.tree.map(lambda x: -scalar(rate, x) * x, moves)
        steps, last = run(lasts, steps, state.after)
        steps = jax.tree.map(lambda x, like: x.astype(like.dtype), steps, params)
        count = optax.safe_increment(state.count) if scheduled else ()
        return steps, ChainState(count, first, last)

    return optax.GradientTransformationExtraArgs(init, update)


# The next functions raise ArgumentError for parts that cannot do their work where they stand.
# Transformations that are not of `optim.parts` may stand anywhere.

Parts = Sequence[optax.GradientTransformation]


def _check_sides(side: str, parts: Parts) -> None:
    """Raises ArgumentError for a part that belongs on the other side of the learning rate."""
    for at, outer in enumerate(parts):
        for path, part in _nested(f"{side}.{at}", outer):
            if part.place != side:
                what = {"before": "a direction", "after": "the step"}[part.place]
                raise ArgumentError(
                    f"{part.name} changes {what}, and belongs in `{part.place}`; it stands in"
                    f" `{side}`.",
                    path,
                )


# Transformations of optax whose directions do not depend on the lengths of those that they get.
_SCALE_FREE: dict[str, Length] = {
    "scale_by_sign": "ignores",
    "scale_by_trust_ratio": "replaces",
    "normalize_by_update_norm": "replaces",
}


def _check_lengths(before: Parts) -> None:
    """Raises ArgumentError for a part that sets lengths which a later one does not keep."""
    lengthened = replacing = None
    for path, name, length in _lengths(before):
        if length == "ignores" and lengthened is not None:
            raise ArgumentError(
                f"{lengthened} sets the lengths of directions, and {name} after it ignores them."
                f" Put {lengthened} after {name}, or remove one of them.",
                path,
            )
        if length == "replaces" and replacing is not None:
            raise ArgumentError(
                f"{replacing} sets the lengths of directions, and {name} after it replaces them."
                " Remove one of them.",
                path,
            )
        lengthened = name if length in ("sets", "replaces") else lengthened
        replacing = name if length == "replaces" else replacing


def _lengths(before: Parts) -> Iterator[tuple[str, str, Length]]:
    """Yields the path and the name of what is known, and what it does with lengths, in order."""
    for at, part in enumerate(before):
        for path, each in _nested(f"before.{at}", part):
            yield path, each.name, each.length
        if (name := getattr(part.update, "__qualname__", "").split(".")[0]) in _SCALE_FREE:
            yield f"before.{at}", f"optax.{name}", _SCALE_FREE[name]


def _check_once(side: str, parts: Parts) -> None:
    """Raises ArgumentError for a part that does again what an equal one did."""
    names = [part.name if isinstance(part, Part) and part.once else "" for part in parts]
    for at, name in enumerate(names):
        if name and name in names[:at]:
            raise ArgumentError(f"{name} stands twice in `{side}`. Remove one.", f"{side}.{at}")


def _check_pins(after: Parts) -> None:
    """Raises ArgumentError for a second part that keeps norms, or a decay that it undoes."""
    pins = [(i, x) for i, x in enumerate(after) if isinstance(x, Part) and x.keeps_norm]
    if len(pins) > 1:
        raise ArgumentError(
            "Two parts of `after` keep the norms of the weights, and the last one alone decides."
            " Remove one.",
            f"after.{pins[1][0]}",
        )
    for at, pin in pins:
        for i, part in enumerate(after[: 0 if pin.lets_decay else at]):
            if isinstance(part, Part) and part.decays:
                raise ArgumentError(
                    f"{part.name} makes weights smaller, and {pin.name} after it restores their"
                    f" norm. Put {part.name} after it, give parts.cautious_decay the other part as"
                    " its argument `around`, or remove it.",
                    f"after.{i}",
                )


def _two_decays(before: Parts, after: Parts) -> str:
    """Returns a sentence if different parts make weights smaller, else an empty one."""
    found = []
    for side, parts in (("before", before), ("after", after)):
        for at, part in enumerate(parts):
            found += [f"{x.name} ({path})" for path, x in _nested(f"{side}.{at}", part) if x.decays]
            if getattr(part.update, "__qualname__", "").startswith("add_decayed_weights."):
                found.append(f"optax.add_decayed_weights ({side}.{at})")
    if len(found) < 2:
        return ""
    return (
        f"{' and '.join(found)} of a chain decay the same weights, each at its own rate."
        " Remove one, unless both are meant."
    )


def _check_needs(before: Parts, after: Parts) -> None:
    """Raises PartNeeded for a part without another one that it needs, or on its wrong side."""
    rows = [
        row
        for side, parts in (("before", before), ("after", after))
        for i, part in enumerate(parts)
        for row in reversed(list(_nested(f"{side}.{i}", part)))  # the innermost works first
    ]
    for at, (path, part) in enumerate(rows):
        for need in part.needs:
            right, wrong, other_side = rows[:at], rows[at + 1 :], "after"
            if need.where == "after":
                right, wrong, other_side = wrong, right, "before"
            if any(need.is_met_by(other) for _, other in right):
                continue
            found = next((other.name for _, other in wrong if need.is_met_by(other)), None)
            how = (
                f"{found} stands {other_side} it" if found else "no part there says that it is one"
            )
            raise PartNeeded(
                f"{part.name} needs, {need.where} it, {need.words}; {how}. {need.why}",
                path,
                part.name,
                need,
            )


def _nested(path: str, part: optax.GradientTransformation | None) -> Iterator[tuple[str, Part]]:
    """Yields a part of `optim.parts`, and those inside of it, the outermost first."""
    while isinstance(part, Part):
        yield path, part
        path, part = f"{path}.around", part.around
