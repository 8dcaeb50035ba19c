"""Says which parameters move, by which optimizer: patterns -> labels."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import optax

from optim import checks
from optim.patterns import SlowPattern, fullmatch, occurs
from optim.recipes import ArgumentError, Recipe, name_of


class GroupError(ValueError):
    """A group that does not fit the parameters.

    Attributes:
        group: the name of the group, or None where a parameter has no group.
        argument: the group's argument that is at fault ("match", ...), or None.
    """

    def __init__(self, message: str, group: str | None = None, argument: str | None = None):
        super().__init__(message)
        self.group = group
        self.argument = argument


class Group(NamedTuple):
    """Some parameters and the optimizer that moves them; see `group`."""

    match: re.Pattern[str]
    optimizer: Recipe
    min_ndim: int
    max_ndim: int | None
    maximize: bool = False

    @property
    def is_frozen(self) -> bool:
        recipe = isinstance(self.optimizer, partial) and self.optimizer.func is frozen
        return recipe or self.optimizer is _FROZEN

    def takes(self, path: str, leaf: Any) -> bool:
        high = self.max_ndim is None or leaf.ndim <= self.max_ndim
        return high and leaf.ndim >= self.min_ndim and fullmatch(self.match, path) is not None


def group(
    match: str,
    optimizer: partial | optax.GradientTransformation,
    min_ndim: int = 0,
    max_ndim: int | None = None,
    maximize: bool = False,
) -> Group:
    """Names some parameters and the optimizer that moves them.

    Args:
        match: a regular expression over whole path names, such as "blocks/.*/kernel".
        optimizer: a `functools.partial` of an optimizer factory; any float argument may be a
            schedule. A finished optax transformation does as well, with its own schedules.
        min_ndim: takes only parameters with at least so many axes.
        max_ndim: takes only parameters with at most so many axes; None for no bound.
        maximize: moves the parameters up the gradient, as in torch.optim: the optimizer gets the
            gradients, and what else it evaluates of the loss, with the opposite sign. Weight decay
            still shrinks the parameters.

    Returns:
        The group, for `optimizer(groups=...)`.

    Raises:
        ValueError: the pattern is not a regular expression, the optimizer is not an optimizer, or
            one of its arguments is missing or unknown.
    """
    try:
        pattern = re.compile(match)
    except re.error as error:
        raise ValueError(f"The pattern {match!r} is not a regular expression: {error}.") from None
    if not isinstance(optimizer, partial | optax.GradientTransformation):
        raise ValueError(
            f"A group's optimizer is a functools.partial of a factory or an optax transformation, "
            f"and not {optimizer!r}."
        )
    if (wrong := checks.missing_arguments(optimizer)) is not None:
        raise ValueError(wrong)
    return Group(pattern, optimizer, min_ndim, max_ndim, maximize)


def wrong_groups(groups: Mapping[str, Any]) -> str | None:
    """Says what is wrong with the groups of an optimizer, or None where nothing is."""
    if not groups:
        return "An optimizer needs at least one group; give groups={'all': group('.*', ...)}."
    for name, one in groups.items():
        if not isinstance(one, Group):
            return f"The group {name!r} is what optim.group(match, optimizer) makes, not {one!r}."
    return None


def frozen() -> optax.GradientTransformation:
    """Keeps its parameters as they are: no state, no gradient, no part in any norm."""
    return _FROZEN


_FROZEN = optax.set_to_zero()  # one, so that a group knows it again


def assign(groups: Mapping[str, Group], named: Mapping[str, Any]) -> dict[str, str]:
    """Finds the group of every parameter.

    Args:
        groups: group name -> group, in the order of precedence.
        named: path name -> array, or anything with a shape.

    Returns:
        Path name -> group name.

    Raises:
        GroupError: a parameter that no group takes, a group that takes none, or a pattern that
            takes too long.
    """
    labels = {path: first(groups, path, x) for path, x in named.items()}
    for name, group in groups.items():
        if name not in labels.values():
            raise _dead_group(name, group, named, labels)
    return labels


def first(groups: Mapping[str, Group], path: str, leaf: Any) -> str:
    """Names the first group that takes a parameter; raises GroupError where none does."""
    for name, group in groups.items():
        try:
            if group.takes(path, leaf):
                return name
        except SlowPattern as error:
            raise GroupError(f"In group {name!r}: {error}", name, "match") from None
    patterns = ", ".join(f"{name}: {group.match.pattern!r}" for name, group in groups.items())
    raise GroupError(
        f"No group takes the parameter {path} of shape {tuple(leaf.shape)}. The groups' patterns, "
        f"which must match a whole path, are {patterns}. Widen one, or add a last "
        f"group with match '.*'."
    )


def _dead_group(
    name: str, group: Group, named: Mapping[str, Any], labels: Mapping[str, str]
) -> GroupError:
    matching = [path for path in named if fullmatch(group.match, path)]
    taken = [path for path in matching if group.takes(path, named[path])]
    if taken:
        why = (
            f"All it matches is taken by earlier groups: {taken[0]} belongs to {labels[taken[0]]!r}"
        )
        advice = "Put it before them, or remove it."
    elif matching:
        why = f"It matches {matching[0]}, whose {named[matching[0]].ndim} axes its bounds exclude"
        advice = "Change min_ndim or max_ndim."
    else:
        partly = [path for path in named if occurs(group.match, path)]
        near = difflib.get_close_matches(group.match.pattern, named, n=3, cutoff=0.0)
        why = f"The nearest parameters are {', '.join(partly[:3] or near)}"
        advice = (
            "A pattern matches a whole path: add .* where more may stand."
            if partly
            else ("Correct the pattern, or remove the group.")
        )
    return GroupError(
        f"The group {name!r} takes no parameter: its pattern is {group.match.pattern!r}. "
        f"{why}. {advice}",
        name,
        "match",
    )


@contextmanager
def told_with_the_group(name: str, group: Group) -> Iterator[None]:
    """Adds the group and its optimizer to whatever an optimizer raises."""
    try:
        yield
    except GroupError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        argument = f".{error.argument}" if isinstance(error, ArgumentError) else ""
        raise GroupError(
            f"The group {name!r} cannot be moved by {name_of(group.optimizer)}. {kind}{error}",
            name,
            f"optimizer{argument}",
        ) from error
