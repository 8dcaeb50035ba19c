"""Assigns every parameter to a group, and so to an optimizer, by patterns of path names."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from optim import checks
from optim.factories import ArgumentError, Recipe, map_floats, name_of
from optim.paths import SlowPattern, fullmatch, nearest_parameters


class GroupError(ValueError):
    """Raised if a group does not fit the parameters.

    Attributes:
        group: the name of the group, or None if the error is not about a single group.
        argument: the name of the wrong argument of the group, such as "match", or else of the
            optimizer, such as "layers"; None if no argument is wrong.
    """

    def __init__(self, message: str, group: str | None = None, argument: str | None = None):
        super().__init__(message)
        self.group, self.argument = group, argument


class Group(NamedTuple):
    """A pattern of parameters and the optimizer that updates them; made by `group`.

    The attributes are the arguments of `group`. The pattern is compiled, and the learning rates of
    `optimizer` are divided by `width_scaling`.
    """

    match: re.Pattern[str]
    optimizer: Recipe
    min_ndim: int
    max_ndim: int | None
    maximize: bool = False
    width_scaling: float | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the group's optimizer is `frozen`."""
        recipe = isinstance(self.optimizer, partial) and self.optimizer.func is frozen
        return recipe or self.optimizer is _FROZEN

    def takes(self, path: str, leaf: Any) -> bool:
        """Returns whether the pattern and the bounds on the number of axes fit a parameter.

        Args:
            path: the path name of the parameter.
            leaf: the parameter, or anything with `ndim`.

        Raises:
            SlowPattern: if matching takes more than a second of processor time.
        """
        high = self.max_ndim is None or leaf.ndim <= self.max_ndim
        return high and leaf.ndim >= self.min_ndim and fullmatch(self.match, path) is not None


def group(
    match: str,
    optimizer: partial | optax.GradientTransformation,
    min_ndim: int = 0,
    max_ndim: int | None = None,
    maximize: bool = False,
    width_scaling: float | None = None,
) -> Group:
    """Selects parameters by a pattern and names the optimizer that updates them.

    Args:
        match: a regular expression that must match a parameter's whole path name, such as
            "block.*/kernel".
        optimizer: a `functools.partial` of an optimizer factory; any float argument may be a
            schedule. A finished optax transformation is accepted, too, and keeps its own schedules.
        min_ndim: the smallest number of axes that a parameter of the group may have.
        max_ndim: the largest number of axes; None for no bound.
        maximize: whether to maximize the loss, as in torch.optim: the optimizer receives the
            gradients, the value of the loss and its functions with the opposite sign. Weight decay
            still shrinks the parameters.
        width_scaling: by what the learning rate is divided, for a model that is wider than the one
            for which it was chosen: m = width / base_width for Adam and hidden kernels (muP, Yang
            et al., arXiv:2203.03466), sqrt(m) for `optim.muon` with scale="match_rms_adamw", and
            None for Muon otherwise, whose updates keep their size. Weight decay that is multiplied
            by the learning rate is divided, too.

    Returns:
        The group, for `optimizer(groups=...)`.

    Raises:
        ValueError: if the pattern is not a regular expression, `optimizer` is not an optimizer, or
            one of its arguments is missing or unknown; or if width_scaling is not positive, or
            `optimizer` has no learning rate.

    Example:
        >>> import numpy as np, optax, optim
        >>> from functools import partial
        >>> kernels = optim.group(".*/kernel", partial(optim.muon, learning_rate=0.02), min_ndim=2)
        >>> rest = optim.group(".*", partial(optax.adamw, learning_rate=1e-3))
        >>> params = {"dense": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}}
        >>> optim.optimizer({"kernels": kernels, "rest": rest}).label(params)
        {'dense': {'bias': 'rest', 'kernel': 'kernels'}}
    """
    try:
        pattern = re.compile(match)
    except re.error as error:
        raise ValueError(f"The pattern {match!r} is not a regular expression: {error}.") from None
    if not isinstance(optimizer, partial | optax.GradientTransformation):
        raise ValueError(
            f"A group's optimizer must be a functools.partial of a factory or an optax "
            f"transformation, got {optimizer!r}."
        )
    checks.check_arguments(optimizer)
    if width_scaling is not None:
        optimizer = _divide_rates(optimizer, width_scaling)
    return Group(pattern, optimizer, min_ndim, max_ndim, maximize, width_scaling)


def _divide_rates(recipe: Recipe, divisor: float) -> Recipe:
    """Divides the learning rates of a recipe and of those inside it."""
    # A traced divisor was checked as a number before.
    if isinstance(divisor, float | int) and not 0 < divisor < math.inf:
        raise ValueError(
            f"width_scaling must be positive, such as width / base_width, got {divisor}."
        )
    found = []

    def divide(path: str, rate: Any) -> Any:
        if rate is None or path.split(".")[-1] != "learning_rate":
            return rate
        found.append(path)
        schedule: Any = rate
        return (lambda step: schedule(step) / divisor) if callable(rate) else rate / divisor

    divided = map_floats(recipe, divide)
    if not found:
        raise ValueError(
            f"width_scaling divides the argument learning_rate, and {name_of(recipe)} has none."
            " Give the group a recipe that has one, or remove width_scaling."
        )
    return divided


def frozen() -> optax.GradientTransformation:
    """Leaves parameters unchanged: they have no state and no gradient and count in no norm.

    Example:
        >>> import numpy as np, optax, optim
        >>> from functools import partial
        >>> optimizer = optim.optimizer({
        ...     "embedding": optim.group("embed/.*", optim.frozen()),
        ...     "rest": optim.group(".*", partial(optax.sgd, learning_rate=0.1)),
        ... })
        >>> list(optimizer.trainable({"embed": {"kernel": np.zeros(3)}, "head": np.zeros(2)}))
        ['head']
    """
    return _FROZEN


_FROZEN = optax.set_to_zero()  # a single object, so that `is_frozen` can compare by identity


def assign(groups: Mapping[str, Group], by_path: Mapping[str, Any]) -> dict[str, str]:
    """Returns path name -> group name of every parameter; raises GroupError if it cannot."""
    # The first group that takes a parameter has it.
    labels = {path: _first(groups, path, x) for path, x in by_path.items()}
    for name, group in groups.items():
        if name not in labels.values():
            raise _dead_group(name, group, by_path, labels)
    return labels


def _first(groups: Mapping[str, Group], path: str, leaf: Any) -> str:
    """Returns the first group that takes a parameter; raises GroupError if none does."""
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
    name: str, group: Group, by_path: Mapping[str, Any], labels: Mapping[str, str]
) -> GroupError:
    matching = [path for path in by_path if fullmatch(group.match, path)]
    if taken := [path for path in matching if group.takes(path, by_path[path])]:
        why = (
            f"Every parameter that it matches belongs to an earlier group, as {taken[0]} to"
            f" {labels[taken[0]]!r}. Put it before them, or remove it."
        )
    elif matching:
        axes = by_path[matching[0]].ndim
        why = (
            f"It matches {matching[0]}, but its bounds exclude parameters of {axes} axes. Change"
            f" min_ndim or max_ndim."
        )
    else:
        why = nearest_parameters(group.match, by_path, "group")
    return GroupError(
        f"The group {name!r} takes no parameter: its pattern is {group.match.pattern!r}. {why}",
        name,
        "match",
    )


@contextmanager
def group_error_context(name: str, group: Group, params: Mapping[str, Any]) -> Iterator[None]:
    """Raises an optimizer's errors again as GroupErrors that name the group."""
    try:
        yield
    # A GroupError names its group already; the other one is about a device, such as its memory.
    except (GroupError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever a user's optimizer raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        argument = f".{error.argument}" if isinstance(error, ArgumentError) else ""
        empty = next((path for path, x in params.items() if not x.size), None)
        hint = (
            f" (The parameter {empty} has no elements: if that is the cause, put it in a group with"
            f" optim.frozen().)"
            if empty is not None
            else ""
        )
        raise GroupError(
            f"{name_of(group.optimizer)} cannot update the group {name!r}. {kind}{error}{hint}",
            name,
            f"optimizer{argument}",
        ) from error
