"""Reads recipes: optimizer factories with arguments that have not been called.

A recipe is a `functools.partial` of an optimizer factory. Its float arguments may be schedules or
traced scalars, and its optimizer arguments may be recipes; `instantiate` turns a recipe
into an optax transformation for one step, while the train step is traced. `standardize` adapts the
transformations of optax to one interface: extra arguments, one tree of parameters.
"""

import collections.abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optim.descent import Updated

Recipe = partial | optax.GradientTransformation


class ArgumentError(ValueError):
    """Raised if an argument of a recipe is not allowed."""

    # Its `argument` is the path below the recipe, such as "base_optimizer.learning_rate".

    def __init__(self, message: str, argument: str):
        super().__init__(message)
        self.argument = argument


def recipes_within(recipe: object) -> Iterator[partial]:
    """Yields a recipe and the recipes inside it, outermost first; nothing for other objects."""
    return (inner for _, inner in recipes_with_paths(recipe))


def recipes_with_paths(recipe: object, path: str = "") -> Iterator[tuple[str, partial]]:
    """Yields a recipe and those inside it, outermost first, each after its path."""
    # A path is such as "" or "inner.base_optimizer". Containers of recipes are searched, and other
    # objects yield nothing. Only recursive calls pass `path`.
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(recipe, partial):
        yield path, recipe
        inside = [x for x in bound(recipe).arguments.items() if takes_recipe(recipe.func, x[0])]
    elif isinstance(recipe, Mapping):
        inside = recipe.items()
    elif isinstance(recipe, list | tuple) and not isinstance(recipe, optax.GradientTransformation):
        inside = enumerate(recipe)
    for key, value in inside:
        yield from recipes_with_paths(value, f"{path}.{key}".lstrip("."))


def name_of(recipe: Recipe) -> str:
    """Returns the name of a factory as in a config, such as "optax.adamw"."""
    # It is the shortest one, if the packages around its module have it, too. A finished
    # transformation has no name and is called "an optax transformation".
    if not isinstance(recipe, partial):
        return "an optax transformation"
    for package in (optax, optax.contrib):  # optax.nadam is itself a partial, without a __name__
        for name, thing in vars(package).items():
            if thing is recipe.func and not name.startswith("_"):
                return f"{package.__name__}.{name}"
    name, modules = recipe.func.__name__, recipe.func.__module__.split(".")
    outer = (".".join(modules[:length]) for length in range(1, len(modules)))
    has = (each for each in outer if getattr(sys.modules.get(each), name, None) is recipe.func)
    return f"{next(has, recipe.func.__module__)}.{name}"


def named_floats(recipe: Recipe) -> Iterator[tuple[str, partial, str, Any, Any]]:
    """Yields the float arguments of a recipe and of those inside it, each with a unique name."""
    # Each is the unique name, the recipe with the argument, the argument's name, its value, its
    # default. Values are floats, traced scalars or schedules, defaults included, without those that
    # are None. Items of a tuple are called "betas[0]". If several recipes have an argument of one
    # name, the outermost has the name and the others have their path,
    # "base_optimizer.learning_rate".
    found: set[str] = set()
    for path, inner in recipes_with_paths(recipe):
        for name, value, default in floats(inner):
            key = f"{path}.{name}" if name in found else name
            found.add(key)
            yield key, inner, name, value, default


def floats(recipe: partial) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of a recipe's own float arguments that are not None."""
    given = bound(recipe)
    given.apply_defaults()
    for name, value in given.arguments.items():
        default = parameters(recipe.func)[name].default
        if (kind := kind_of(recipe.func, name)) == "float" and value is not None:
            yield name, value, default
        elif kind == "floats" and isinstance(value, list | tuple):
            for i, x in enumerate(value):
                # optax.contrib.muon's ns_coeffs may be a name, a triple or a tuple of triples.
                if not isinstance(x, str | list | tuple | None):
                    known = isinstance(default, tuple) and i < len(default)
                    yield f"{name}[{i}]", x, default[i] if known else None


def declared_dtypes(recipe: Recipe) -> list[Any]:
    """Returns the dtypes in arguments such as `mu_dtype`, inner recipes included."""
    given = [item for inner in recipes_within(recipe) for item in bound(inner).arguments.items()]
    return [jnp.dtype(x) for name, x in given if "dtype" in name and x is not None]


def learning_rate_of(recipe: Recipe) -> Any:
    """Returns the outermost argument `learning_rate`: a number, traced scalar or schedule."""
    # Raises ValueError if there is none, or if there are several and none is the outermost.
    found = {
        path: value
        for path, inner in recipes_with_paths(recipe)
        for name, value, _ in floats(inner)
        if name == "learning_rate"
    }
    if not found:
        raise ValueError(f"{name_of(recipe)} has no learning_rate to multiply weight_decay by.")
    # An outer recipe has a shorter path than those inside it; "" is the recipe itself.
    outer = min(found, key=len)
    others = [path for path in found if path != outer and not f".{path}".startswith(f".{outer}.")]
    if outer and others:
        names = " and ".join(f"{path}.learning_rate" for path in sorted([outer, *others]))
        raise ValueError(
            f"{name_of(recipe)} has several learning rates, {names}, and weight_decay is "
            f"multiplied by one. Give the weight decay to the optimizers inside."
        )
    return found[outer]


def map_floats(recipe: object, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Changes the float arguments of a recipe and of those inside it, defaults included."""
    # `change` takes an argument's path, such as "base_optimizer.b1" or "betas[0]", and its value (a
    # number, a traced scalar, a schedule or None), and returns what to put in its place. Containers
    # of recipes are searched, and other objects are returned. Only recursive calls pass `path`.

    def below(key: Any) -> str:
        return f"{path}.{key}".lstrip(".")

    if isinstance(recipe, Mapping):
        return {key: map_floats(value, change, below(key)) for key, value in recipe.items()}
    if isinstance(recipe, list | tuple) and not isinstance(recipe, optax.GradientTransformation):
        return type(recipe)(map_floats(x, change, below(i)) for i, x in enumerate(recipe))
    if not isinstance(recipe, partial):
        return recipe
    given = bound(recipe)
    for name, parameter in parameters(recipe.func).items():
        if name not in given.arguments:
            default = parameter.default
            # Only what changes is bound: `bound` lists the arguments that a recipe was given.
            value = change(below(name), default) if isinstance(default, float) else default
            if value is not default:
                given.arguments[name] = value
            continue
        value, kind = given.arguments[name], kind_of(recipe.func, name)
        if kind in ("recipe", "partial"):
            value = map_floats(value, change, below(name))
        elif kind == "float":
            value = change(below(name), value)
        elif kind == "floats" and isinstance(value, list | tuple):
            value = type(value)(change(below(f"{name}[{i}]"), x) for i, x in enumerate(value))
        given.arguments[name] = value
    return partial(recipe.func, *given.args, **given.kwargs)


def map_arrays(recipe: Any, change: Callable[[jax.Array], Any]) -> Any:
    """Changes the arrays, also traced ones, in a recipe and in those inside it."""
    # The arrays are visited in the same order at every call.
    if isinstance(recipe, jax.Array):
        return change(recipe)
    if isinstance(recipe, partial):
        args, keywords = map_arrays((recipe.args, recipe.keywords), change)
        return partial(recipe.func, *args, **keywords)
    if type(recipe) is dict:
        return {key: map_arrays(value, change) for key, value in recipe.items()}
    # Not tuples with names, such as a finished transformation.
    if type(recipe) in (list, tuple):
        return type(recipe)(map_arrays(value, change) for value in recipe)
    return recipe


def float_paths(recipe: object) -> dict[str, Any]:
    """Returns the float arguments of a recipe and of those inside it by their paths."""
    # For paths and values, see `map_floats`.
    found: dict[str, Any] = {}
    # setdefault returns the value, so that nothing changes.
    map_floats(recipe, lambda path, value: found.setdefault(path, value))
    return found


# Which arguments of a factory are floats, and which are optimizers.

# Arguments of these names are floats, with any annotation or none.
FLOATS = ("learning_rate", "weight_decay")


def takes_recipe(function: Callable[..., Any], name: str) -> bool:
    """Returns whether an argument of a factory is an optimizer, or a container of optimizers."""
    return kind_of(function, name) in ("recipe", "partial")


@cache
def kind_of(
    function: Callable[..., Any], name: str
) -> Literal["float", "floats", "recipe", "partial"] | None:
    """Returns what an argument of an optimizer factory is, None for one of another kind."""
    # A "float" may be a schedule. It has a float default, or is annotated as a float, alone or in a
    # union; `learning_rate` and `weight_decay` are floats with any annotation. Integers, booleans,
    # masks, dtypes, functions and the like are none. "floats" are a tuple of them, such as `betas`.
    # A "partial" is a recipe that the factory itself calls, as `cautious` does, and is passed on as
    # it is; any other "recipe" is replaced by its transformation.
    if (parameter := parameters(function).get(name)) is not None and name in FLOATS:
        return "float"
    # An integer default is a count or a flag, whatever the annotation says: for ns_steps of optax,
    # it is a union with float.
    if parameter is None or isinstance(parameter.default, bool | int):
        return None
    if isinstance(parameter.default, float):
        return "float"
    if (annotation := parameter.annotation) is inspect.Parameter.empty:
        return None
    text = annotation if isinstance(annotation, str) else str(annotation)
    if "partial" in text:
        return "partial"
    if "GradientTransformation" in text:
        return "recipe"
    members = _members(annotation)
    if any(typing.get_origin(m) in (collections.abc.Mapping, dict) for m in members):
        return None  # a tree of parameters, such as a mask
    if float in members:
        return "float"
    tuples = [m for m in members if typing.get_origin(m) in (tuple, list)]
    inside = {x for m in tuples for one in typing.get_args(m) for x in _members(one)}
    return "floats" if float in inside else None


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns a factory's parameters by name, with annotations evaluated if possible."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # a string annotation with a name that its module does not import
        return inspect.signature(function).parameters


def _members(annotation: Any) -> set[Any]:
    """Returns the members of a union; none if one of them is Any, which excludes nothing."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = set(typing.get_args(annotation)) if union else {annotation}
    return set() if Any in members else members


def bound(recipe: partial) -> inspect.BoundArguments:
    """Returns the arguments of a recipe by name, without the defaults."""
    return inspect.signature(recipe.func).bind_partial(*recipe.args, **recipe.keywords)


# Calling a recipe while a step is traced, so that values of schedules are traced scalars.


def at_step(recipe: Recipe, step: ArrayLike, dtype: DTypeLike) -> Any:
    """Replaces each schedule of a recipe, and of those inside it, by its value at a step."""
    # For `dtype`, that of the values, see `dtypes.compute_dtype`.

    def number(path: str, value: Any) -> Any:
        value = evaluate(value, step, path.split(".")[-1].split("[")[0])
        # A Python number stays one: a factory may compare it with 0, as `descend` does.
        inexact = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)
        return jnp.asarray(value, dtype) if inexact else value

    return map_floats(recipe, number)


def instantiate(
    recipe: Recipe, step: ArrayLike, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe, with each schedule replaced by its value at a step."""
    return _called(at_step(recipe, step, dtype))


def separate_arrays(
    recipe: Recipe,
) -> tuple[list[jax.Array], Callable[..., optax.GradientTransformationExtraArgs]]:
    """Returns the arrays among a recipe's arguments, and a function that calls the recipe."""
    # The function takes arrays to put in their place, and the dtype of `instantiate`.
    held: list[jax.Array] = []
    map_arrays(recipe, held.append)

    def make(arrays: Sequence[jax.Array], dtype: DTypeLike) -> Any:
        rest = iter(arrays)
        return instantiate(map_arrays(recipe, lambda _: next(rest)), 0, dtype)

    return held, make


def _called(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe without schedules, the factories inside it first."""

    def optimizers(value: Any) -> Any:
        if isinstance(value, partial | optax.GradientTransformation):
            return _called(value)
        if isinstance(value, Mapping):
            return {key: optimizers(x) for key, x in value.items()}
        return type(value)(map(optimizers, value)) if isinstance(value, list | tuple) else value

    made: Any = recipe
    if isinstance(recipe, partial):
        given = bound(recipe)
        for name, value in given.arguments.items():
            # `cautious` calls its base itself, with other weight decays.
            if kind_of(recipe.func, name) == "recipe":
                given.arguments[name] = optimizers(value)
        try:
            made = recipe.func(*given.args, **given.kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise ValueError(
                f"{name_of(recipe)} branches in Python on the value of one of its arguments "
                f"({', '.join(n for n, v in given.arguments.items() if isinstance(v, jax.Array))}),"
                f" which must be a number, not a schedule or a traced value."
            ) from error
    return standardize(made, name_of(recipe))


def evaluate(
    schedule: optax.ScalarOrSchedule | Callable[..., object], step: ArrayLike, name: str
) -> Any:
    """Evaluates a schedule at a step, which it receives as an array; returns other values."""
    # Raises ValueError if the schedule fails or does not return a scalar.
    if not callable(schedule):
        return schedule
    must = (
        f"The schedule of {name} must be a function of the step, a traced int32 scalar, that "
        "returns a scalar. It"
    )
    try:
        value = schedule(step if isinstance(step, jax.Array) else jnp.asarray(step, jnp.int32))
        shape = () if isinstance(value, int | float) else jnp.shape(jnp.asarray(value))
    except Exception as error:  # whatever a user's function raises
        raise ValueError(
            f"{must} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if shape == ():
        return value
    raise ValueError(f"{must} returned an array of shape {shape}.")


def standardize(made: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """Adapts what an optimizer factory returns to optax's interface, or raises ValueError."""
    # It may be a transformation, `optax.MultiSteps`, or a lookahead, whose slow parameters are
    # moved to its state (see `SlowParams`). Unknown extra arguments are ignored.
    if isinstance(made, optax.MultiSteps):
        made = made.gradient_transformation()
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{name} returned an object of class {type(made).__name__}, but the optimizer of a "
            f"group must be an optax transformation. Groups cannot be nested."
        )
    # In this order: with_extra_args_support wraps `update`, and the annotation of the argument
    # `params`, by which a lookahead is recognized, would be lost.
    return with_known_extras(_with_slow_params(made))


def with_known_extras(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Drops extra arguments that a transformation does not know, and keeps its class."""
    # `optax.with_extra_args_support` does so for transformations that take none; `contrib.sam`
    # takes one, and raises at any other.
    given, tx = tx, optax.with_extra_args_support(tx)
    if tx is not given:  # a new function, whose name tells `optim.chain` what it wraps
        tx.update.__qualname__ = getattr(given.update, "__qualname__", "")  # type: ignore[attr-defined]
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tx

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        known = {name: value for name, value in extra.items() if name in parameters}
        return tx.update(updates, state, params, **known)

    return tx._replace(update=update)


class SlowParams(NamedTuple):
    """The state of an optimizer that trains fast parameters and evaluates slow ones."""

    slow: Any
    state: Any


def nodes_of(state: optax.OptState, kinds: type | tuple[type, ...]) -> list[Any]:
    """Returns the nodes of a state that are objects of some classes, such as `SlowParams`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def _with_slow_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Moves the slow parameters of a lookahead to its state."""
    # The update of a lookahead takes and returns a pair of parameters, `optax.LookaheadParams`. It
    # is recognized by the annotation of its argument `params`.
    params_of = inspect.signature(tx.update).parameters.get("params")
    if params_of is None or params_of.annotation is not optax.LookaheadParams:
        return tx

    def init(params: optax.Params) -> SlowParams:
        pair: Any = optax.LookaheadParams(fast=params, slow=params)
        return SlowParams(params, tx.init(pair))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        pair: Any = optax.LookaheadParams(fast=params, slow=state.slow)
        moves: Any
        moves, inner = tx.update(updates, state.state, pair)
        # The caller applies the first result; the slow parameters are in the state.
        return moves.fast, SlowParams(optax.apply_updates(state.slow, moves.slow), inner)

    return optax.GradientTransformation(init, update)
