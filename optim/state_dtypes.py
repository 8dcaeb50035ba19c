"""Stores arrays of optimizer states in bfloat16 between the steps; they compute in float32.

A rule of `optim.optimizer(states=...)` names them by the field of the state that has them, such as
"mu" of Adam, or by group and field, "matrices/momentum".
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optim.dtypes import stochastic_round
from optim.groups import GroupError
from optim.paths import SlowPattern, did_you_mean, fullmatch, occurs
from optim.tracing import require_whole

STORED = ("float32", "bfloat16", "bfloat16 stochastic")
"""How an array may be stored: unchanged, rounded to the nearest number, or at random, unbiased."""

# Folded into the key of a step, so that states and parameters are rounded by other noise.
_NOISE = 0x57A7E


class Leaf(NamedTuple):
    """An array of a group's state that may be stored in another dtype."""

    index: int  # its place among the leaves of the group's state
    name: str  # the field that has it, such as "mu"; "state" without a field
    stored: str  # an element of STORED


def wrong_states(states: Any) -> str | None:
    """Describes what is wrong with the argument `states` of `optimizer`, or returns None."""
    if not isinstance(states, Mapping):
        return (
            f"states maps names of arrays to dtypes, such as {{'mu': 'bfloat16'}}; got {states!r}."
        )
    for pattern, stored in states.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            return f"In states, {pattern!r} is not a regular expression: {error}."
        if stored not in STORED:
            hint = did_you_mean(stored, STORED)
            if stored == "float16":
                hint = " Its smallest number is 6e-8: squares of gradients below it would be 0."
            return (
                f"In states, {pattern!r} has the value {stored!r}, which is not supported.{hint}"
                f" There is: {', '.join(map(repr, STORED))}."
            )
    return None


def find_leaves(
    states: Mapping[str, str], templates: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, list[Leaf]]:
    """Returns each group's float32 arrays, stored as the first rule that matches them says."""
    # `states` is pattern -> element of STORED; a pattern must match a whole name, or the name of a
    # group, a slash and a name. Where none does, it is "float32". `templates` has the shapes of the
    # state that each optimizer itself has. Path names of `params` are no part of a name.
    compiled = {re.compile(pattern): stored for pattern, stored in states.items()}

    def stored(group: str, name: str) -> str:
        for pattern, value in compiled.items():
            if fullmatch(pattern, name) or fullmatch(pattern, f"{group}/{name}"):
                return value
        return "float32"

    return {
        group: [
            Leaf(index, name, stored(group, name))
            for index, name, x in named_arrays(state, params)
            if x.dtype == jnp.float32
        ]
        for group, state in templates.items()
    }


def check_rules(states: Mapping[str, str], found: Mapping[str, Sequence[Leaf]]) -> None:
    """Raises GroupError for a rule that is the first to match no array."""
    names = list(dict.fromkeys(f"{group}/{x.name}" for group, own in found.items() for x in own))
    left = list(names)
    for text in states:
        pattern = re.compile(text)
        try:
            taken = [x for x in left if _matches(pattern, x)]
        except SlowPattern as error:
            raise GroupError(f"In states: {error}", argument="states") from None
        left = [x for x in left if x not in taken]
        if taken:
            continue
        if any(_matches(pattern, x) for x in names):
            raise GroupError(
                f"In states, earlier patterns match everything that {text!r} matches. Put it before"
                f" them, or remove it.",
                argument="states",
            )
        hint = did_you_mean(text, [*[x.rpartition("/")[2] for x in names], *names])
        if not hint and any(occurs(pattern, x) for x in names):
            hint = " A pattern matches a whole name: add .* where other text may follow or precede."
        raise GroupError(
            f"In states, {text!r} matches no array of a state.{hint} The arrays are"
            f" {', '.join(names) or 'none: no state of these optimizers has an array in float32'}.",
            argument="states",
        )


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    """Compares a pattern with "GROUP/NAME" and with NAME."""
    return any(fullmatch(pattern, each) for each in (name, name.rpartition("/")[2]))


def named_arrays(state: Any, params: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yields index, name and value of each leaf with an axis, in the order of the leaves."""
    for index, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        if x.ndim == 0:
            continue
        keys = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        # The innermost field: without positions in tuples, and without the path of the parameter.
        named = [key for key in keys if isinstance(key, str) and key not in params]
        yield index, named[-1] if named else "state", x


def widen_leaves(state: Any, leaves: Sequence[Leaf]) -> Any:
    """Casts the arrays of a group's state that are stored in bfloat16 to float32."""
    flat, structure = jax.tree.flatten(state)
    for leaf in leaves:
        if leaf.stored != "float32":
            flat[leaf.index] = flat[leaf.index].astype(jnp.float32)
    return structure.unflatten(flat)


def store_leaves(state: Any, leaves: Sequence[Leaf], step: ArrayLike, key: jax.Array) -> Any:
    """Rounds arrays of a group's state to the dtypes in which they are stored."""
    # The noise of "bfloat16 stochastic" depends on the step and the PRNG key.
    flat, structure = jax.tree.flatten(state)
    noise = jax.random.fold_in(jax.random.fold_in(key, _NOISE), step)
    for leaf in leaves:
        x = flat[leaf.index]
        if leaf.stored == "bfloat16 stochastic":
            # Inside shard_map, all shards would get the same noise.
            require_whole(None, ({"": x}, ()), 'states with "bfloat16 stochastic"')
            x = stochastic_round(x, jax.random.fold_in(noise, leaf.index), jnp.bfloat16)
        elif leaf.stored == "bfloat16":
            x = x.astype(jnp.bfloat16)
        flat[leaf.index] = x
    return structure.unflatten(flat)
