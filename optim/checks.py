"""Checks the arguments and the parameters of a group before the first step."""

import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optim import factories
from optim.chain import chain
from optim.dtypes import LowPrecision
from optim.factories import Recipe, bound, floats, kind_of, name_of, recipes_within
from optim.matrices import Matrices
from optim.muon import muon
from optim.newton_schulz import polynomials, range_of_results
from optim.parts.adam import adam
from optim.parts.base import Part, norm
from optim.parts.directions import polar
from optim.parts.lengths import floor
from optim.parts.shampoo import shampoo as shampoo_part
from optim.paths import did_you_mean
from optim.scion import scion
from optim.shampoo import shampoo

# Decays of averages: with a decay of 1 an average never changes.
_DECAYS = (
    *("b1", "b2", "b3", "beta", "betas", "beta3", "adam_b1", "adam_b2", "shampoo_beta"),
    *("decay", "decays", "momentum", "rho"),
)
# Bounds of the loss, the factor of optax.scale, and coefficients of Newton-Schulz.
_ANY_SIGN = ("f_min", "lower_bound", "step_size", "ns_coeffs", "ns_coefficients")
# The arguments of a lookahead and a readout that are of another range than those of an optimizer.
_STEP_AHEAD, _HORIZON, _BLEND = "lookahead.step_size", "readout.horizon", "readout.blend"

# Exceptions that may be 1: with b2=1 the averages of Shampoo and parts.adam are sums, and Scion's
# momentum is the weight of the new gradient.
_MAY_BE_ONE = (*((each, "b2") for each in (adam, shampoo, shampoo_part)), (scion, "momentum"))


# Lengths relative to those of the weights, which a learning rate multiplies.
_AT_MOST_ONE = ((floor, "ratio"),)

# The functions whose Newton-Schulz steps a user may choose: coefficients and number of steps.
_POLYNOMIALS = {polar: ("polynomial", "steps"), muon: ("ns_coefficients", "ns_steps")}
# The published steps map singular values in [0, 1] to between 0 and 1.3, and the largest of them to
# at least 0.7, also if there is one step only.
_MOST, _LEAST, _NEGATIVE = 3.0, 0.1, -0.1

# The optimizers that optax tests with complex parameters.
_COMPLEX = (
    *(optax.adabelief, optax.adafactor, optax.adagrad, optax.adam, optax.adamax, optax.adamaxw),
    *(optax.adamw, optax.amsgrad, optax.lamb, optax.lars, optax.lbfgs, optax.nadam, optax.nadamw),
    *(optax.novograd, optax.optimistic_adam_v2, optax.radam, optax.rmsprop, optax.sgd, optax.yogi),
    optax.contrib.split_real_and_imaginary,
)

# These compare the gradients of consecutive steps, which must be of the same examples.
FULL_BATCH = (optax.lbfgs, optax.scale_by_lbfgs, optax.rprop, optax.scale_by_rprop)

# These clip the gradient of each example: their gradients have a leading axis of examples.
EXAMPLES = (optax.contrib.dpsgd, optax.contrib.differentially_private_aggregate)


def check_arguments(recipe: Recipe) -> None:
    """Raises ValueError for an unknown or missing argument of a recipe or of those inside it."""
    for inner in recipes_within(recipe):
        parameters = inspect.signature(inner.func).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if unknown := [name for name in inner.keywords if name not in parameters and not takes_any]:
            hint = did_you_mean(unknown[0], parameters)
            raise ValueError(
                f"{name_of(inner)} has no argument {unknown[0]!r}.{hint} It has: "
                f"{', '.join(parameters)}."
            )
        given = bound(inner).arguments
        lacking = [
            name
            for name, p in parameters.items()
            if p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            and (name not in given or given[name] is None and kind_of(inner.func, name) == "float")
        ]
        if lacking:
            raise ValueError(f"{name_of(inner)} needs {' and '.join(lacking)}. Give it a value.")


def wrong_float(name: str, value: Any, default: Any = None) -> str | None:
    """Says what is wrong with a float argument's value or its schedule's values, or None."""
    # The end of a sentence that begins with the argument. Traced values and the default pass.
    if isinstance(value, Tracer) or callable(value):
        return None
    # A PRNG key: optax annotates it as it does a float, and NumPy cannot hold it.
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    values, path, name = np.asarray(value), name, name.split("[")[0].split(".")[-1]
    if values.dtype.kind not in "iuf":
        return None
    # np.min of values with a NaN is NaN.
    least, most = (float(f(values)) for f in (np.min, np.max))
    if math.isnan(least):
        return "is not a number (NaN)."
    if math.isinf(most) and name == "learning_rate":
        return "is infinite."
    if least <= 0 and name == "clip_norm":
        return f"must be positive, got {least:g}. Set it to None to disable clipping."
    if path == _HORIZON and least < 1:
        return f"must be at least 1, as a number of steps, got {least:g}."
    if path == _BLEND and not (least >= 0 and most <= 1):
        return f"must be in [0, 1], got {least if least < 0 else most:g}."
    if path == _STEP_AHEAD and most >= 1:
        return (
            f"must be in [0, 1), got {most:g}: at 1 the average of past changes does not decay, and"
            " above 1 it grows by itself."
        )
    # A factory's own default is in the range, even below 0.
    bound = float(default) if isinstance(default, int | float) else 0.0
    if least < min(0.0, bound) and (name not in _ANY_SIGN or path == _STEP_AHEAD):
        climb = name == "learning_rate"
        hint = " To move up the gradient, give the group maximize=True." if climb else ""
        return f"must not be negative, got {least:g}.{hint}"
    limit = default if isinstance(default, float) and default >= 1 else None
    if name in _DECAYS and (most >= 1 if limit is None else most > limit):
        allowed = "[0, 1)" if limit is None else f"[0, {limit:g}]"
        return f"must be in {allowed}, as the decay of an average, got {most:g}."
    return None


def wrong_option(
    groups: Mapping[str, Any],
    clip_norm: optax.ScalarOrSchedule | None,
    layer_decay: Any,
    low_precision: Any,
) -> str | None:
    """Describes the first wrong argument of `optimizer` other than its groups, or None."""
    # Traced values and schedules pass; `wrong_float` checks a schedule's values.
    if not callable(clip_norm) and (why := wrong_float("clip_norm", clip_norm)) is not None:
        return f"clip_norm {why}"
    if clip_norm is not None and (found := groups_needing(groups, EXAMPLES)):
        group, name = next(iter(found.items()))
        return (
            f"clip_norm scales the gradient of the whole batch, but in group {group!r} {name} "
            f"clips the gradient of every example. Remove clip_norm."
        )
    # NaN fails every comparison, so that anything but a number is refused, too.
    scale = layer_decay if isinstance(layer_decay, int | float) else math.nan
    is_known = layer_decay is not None and not isinstance(layer_decay, Tracer)
    if is_known and not 0 < scale <= 1:
        return f"layer_decay must be a factor in (0, 1], got {layer_decay!r}."
    known = get_args(LowPrecision)
    if low_precision not in known:
        return f"low_precision must be one of {', '.join(known)}, got {low_precision!r}."
    return None


def wrong_argument(recipe: Recipe) -> tuple[str, str] | None:
    """Finds a float argument outside its range, in a recipe or in the recipes inside it."""
    # Returns its path below the recipe, such as "base_optimizer.b1", and a whole sentence, or None.
    # Of a schedule, meant for any number of steps, only step 0 is checked. Traced values pass.
    for path, inner in factories.recipes_with_paths(recipe):
        for name, value, default in floats(inner):
            what = f"{name} of {name_of(inner)}"
            if callable(value):
                value = factories.evaluate(value, 0, name)
                what = f"the schedule of {what} goes wrong at step 0: it"
            if (why := _wrong_value(inner.func, name, value, default)) is not None:
                return f"{path}.{name}".lstrip("."), f"{what} {why}"
        for wrong in (_wrong_polynomial, _wrong_decay, _whole_optimizer):
            for name, why in wrong(inner):
                return f"{path}.{name}".lstrip("."), why
    return None


def _wrong_value(factory: Callable[..., Any], name: str, value: Any, default: Any) -> str | None:
    """Returns what `wrong_float` does, for an argument whose range depends on its factory."""
    why = wrong_float(name, value, 1.0 if (factory, name) in _MAY_BE_ONE else default)
    if why or (factory, name) not in _AT_MOST_ONE or isinstance(value, Tracer):
        return why
    # NumPy's own maximum: that of a jax array would be traced where this is called in a trace.
    if (most := float(np.max(np.asarray(value)))) <= 1:
        return None
    return (
        f"must be at most 1, got {most:g}: times the learning rate, it is the"
        " smallest length of a step relative to that of the weights."
    )


def _wrong_polynomial(recipe: partial) -> Iterator[tuple[str, str]]:
    """Yields the argument with the coefficients of steps that diverge, and a sentence."""
    if recipe.func not in _POLYNOMIALS:
        return
    names = _POLYNOMIALS[recipe.func]
    given = bound(recipe)
    given.apply_defaults()
    coefficients, steps = (given.arguments[name] for name in names)
    if any(isinstance(x, Tracer) or callable(x) for x in jax.tree.leaves(coefficients)):
        return
    if not isinstance(coefficients, str):
        coefficients = jax.tree.map(lambda x: float(np.asarray(x)), coefficients)
    try:
        triples = polynomials(coefficients, steps, names)
    except factories.ArgumentError as error:
        yield error.argument, f"The {name_of(recipe)} cannot be computed: {error}"
        return
    least, most = range_of_results(triples)
    if most > _MOST:
        how = "diverges"
        where = f"to {most:.3g}" if math.isfinite(most) else "beyond all numbers"
    elif least < _NEGATIVE:
        how, where = "turns updates around", f"to {least:.3g}"
    elif most < _LEAST:
        how, where = "makes updates vanish", f"to at most {most:.3g}"
    else:
        return
    yield (
        names[0],
        f"{names[0]} of {name_of(recipe)} {how}: {steps} steps map a singular value between 0 and 1"
        f" {where}, and they should map it to about 1.",
    )


def _wrong_decay(recipe: partial) -> Iterator[tuple[str, str]]:
    """Yields the weight decay before the learning rate of a chain that keeps norms, and why not."""
    if recipe.func is not chain:
        return
    given = bound(recipe).arguments
    pins = [
        part
        for pin in recipes_within(given.get("after", ()))
        if (part := _part(pin)) is not None
        and part.keeps_norm
        and not part.lets_decay
        and part.around is None
    ]
    before = given.get("before", ()) if pins else ()
    for path, inner in factories.recipes_with_paths(before, "before"):
        for name, value, _ in floats(inner):
            # A traced value was checked as a number before.
            known = not isinstance(value, Tracer)
            if name == "weight_decay" and known and (callable(value) or np.any(np.asarray(value))):
                yield (
                    f"{path}.{name}",
                    f"weight_decay of {name_of(inner)} makes weights smaller, and {pins[0].name} in"
                    " `after` restores their norm. Remove it; parts.cautious_decay in `after`,"
                    f" around {pins[0].name}, decays some weights of a matrix more than others.",
                )


def _whole_optimizer(recipe: partial) -> Iterator[tuple[str, str]]:
    """Yields the learning rate of a part of a chain that is an optimizer by itself, and why not."""
    if recipe.func is not chain:
        return
    given = bound(recipe).arguments
    for side in ("before", "after"):
        for path, inner in factories.recipes_with_paths(given.get(side, ()), side):
            if "learning_rate" not in factories.parameters(inner.func):
                continue
            name = name_of(inner)
            direction = f"optax.scale_by_{name.removeprefix('optax.')}"
            known = hasattr(optax, direction.removeprefix("optax."))
            yield (
                path,
                f"{name} in `{side}` of a chain multiplies by minus its own learning rate, and the"
                " chain by minus that of the chain, so that the weights would move up the loss."
                " Name what computes its direction, without a learning rate"
                + (f": {direction}." if known else ", or use it in place of the chain."),
            )


def _part(recipe: partial) -> Part | None:
    """Returns what a recipe makes at step 0, if it is a part of a chain."""
    made = factories.instantiate(recipe, 0, jnp.float32)
    return made if isinstance(made, Part) else None


def _keeps_zeros(recipe: partial) -> bool:
    part = _part(recipe)
    return part is not None and part.keeps_zeros


def kept_norms(recipe: Recipe, by_path: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns path -> the smallest norm of a parameter's matrices, where they are kept."""
    found: dict[str, jax.Array] = {}
    for inner in recipes_within(recipe):
        if _keeps_zeros(inner):
            over = Matrices(bound(inner).arguments.get("matrices"), name_of(inner))
            _, norms = over.map(lambda xs: (xs, [norm(x)[:, 0, 0] for x in xs]), [dict(by_path)])
            found |= {
                path: jnp.min(norms[path]) if x.size else jnp.ones(())
                for path, x in by_path.items()
            }
    return found


def zero_matrix(recipe: Recipe, norms: Mapping[str, Any]) -> str | None:
    """Describes a matrix of zeros whose norm an optimizer keeps, or returns None."""
    # `norms` are what `kept_norms` returned, as known numbers.
    path = next((path for path, norm in norms.items() if not norm), None)
    if path is None:
        return None
    inner = next(filter(_keeps_zeros, recipes_within(recipe)))
    return (
        f"The parameter {path} has a matrix of zeros at the first step, and {name_of(inner)} makes"
        " a step or a matrix as long as the matrix was before: it would stay zero. Let the model"
        f" draw it at random, or put it in a group without {name_of(inner)}."
    )


def wrong_schedule(recipe: Recipe, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Finds a schedule with values outside the range of its argument, or returns None."""
    # `values` are arrays by argument, named as by `factories.named_floats`. Returns the name of
    # the argument, and the end of a sentence that begins with the schedule.
    for key, inner, name, _, default in factories.named_floats(recipe):
        if key in values and (why := _wrong_value(inner.func, name, values[key], default)):
            return key, why
    return None


def wrong_parameter(recipe: Recipe, by_path: Mapping[str, Any]) -> str | None:
    """Describes a parameter whose dtype the optimizer cannot update, or returns None."""
    for path, x in by_path.items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return (
                f"The parameter {path} has dtype {x.dtype}, which no optimizer can update. Put it "
                f"in a group with optim.frozen()."
            )
        if jnp.issubdtype(x.dtype, jnp.complexfloating) and not _right_for_complex(recipe):
            return (
                f"The parameter {path} has dtype {x.dtype}, and {name_of(recipe)} is not known to "
                f"support complex numbers. Wrap it in optax.contrib.split_real_and_imaginary, "
                f"which updates real and imaginary parts as two real parameters."
            )
    return None


def _right_for_complex(recipe: Recipe) -> bool:
    """Returns whether an optimizer supports complex parameters; True if it is finished."""
    if not isinstance(recipe, partial):
        return True
    # A state in a real dtype would lose the imaginary parts, as Adafactor's momentum does.
    drops = recipe.func is optax.adafactor and bound(recipe).arguments.get("momentum") is not None
    dtypes = factories.declared_dtypes(recipe) or ([jnp.float32] if drops else [])
    return recipe.func in _COMPLEX and all(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)


def needs(recipe: Recipe, what: Container[Any]) -> str | None:
    """Names an optimizer in a recipe that needs `FULL_BATCH` or `EXAMPLES`; None if none does."""
    return next((name_of(inner) for inner in recipes_within(recipe) if inner.func in what), None)


def groups_needing(groups: Mapping[str, Any], what: Container[Any]) -> dict[str, str]:
    """Finds the groups with such a need: group name -> optimizer name."""
    found = {name: needs(group.optimizer, what) for name, group in groups.items()}
    return {name: optimizer for name, optimizer in found.items() if optimizer is not None}


def observations_read(groups: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns observation of the model -> a group and the part of its optimizer that reads it."""
    return {
        observation: (name, part.name)
        for name, group in groups.items()
        for recipe in recipes_within(group.optimizer)
        if (part := _part(recipe)) is not None
        for observation in part.reads
    }
