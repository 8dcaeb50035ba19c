"""Runs any optax optimizer with traced hyperparameters and a state of fixed shapes and dtypes.

An optimizer is given as a *recipe*: a `functools.partial` of a factory that has not been called, so
that its float arguments can be schedules or traced scalars. At every step, while the step is
traced, `update` evaluates the schedules, calls the factory with their values, and runs the
transformation that it returns. Start with `update`.

The callers widen parameters, gradients and extra arguments to at least float32, because
bfloat16(0.999) is 1.0 and Adam would divide by zero. No code here depends on which optimizer it is.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from optim import factories
from optim.dtypes import compute_dtype
from optim.factories import ArgumentError, Recipe, at_step, float_paths, name_of, separate_arrays
from optim.matrices import scatter
from optim.tracing import reads_of_leaves, require_whole


def init(recipe: Recipe, params: optax.Params) -> optax.OptState:
    """Initializes an optimizer's state for widened parameters."""
    # Every leaf is strongly typed, and no two leaves share a buffer. optax's line searches start
    # with weakly typed scalars, and the step would be compiled twice.
    first = _first_state(recipe, params)
    strong = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), first)
    return own_buffers(strong, params)


def update(
    recipe: Recipe,
    grads: Mapping[str, jax.Array],
    state: optax.OptState,
    params: Mapping[str, jax.Array],
    step: ArrayLike,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Returns the updates, to be added, and the new state; takes widened gradients."""
    # The new state has the structure and types of `state`, and its leaves share no buffers.
    _refuse_schedules_of_init(recipe, grads, state, params, extra)
    # Schedules are evaluated where they were made: they may hold arrays with explicit axes.
    now = at_step(recipe, step, compute_dtype(params))
    require_whole(lambda g: _run(now, g, state, params, extra), (grads, params), name_of(recipe))
    updates, new_state = _run(now, grads, state, params, extra)
    if not isinstance(updates, Mapping):
        raise ValueError(
            f"It returned {type(updates).__name__} as updates. They must be a tree like the "
            "gradients, with an array for each parameter."
        )
    for path, p in params.items():
        if updates.get(path) is None:
            raise ValueError(
                f"It returned no update for the parameter {path}. Return one for each parameter, "
                "zeros for one that stays as it is."
            )
        # Without the check, the sum of parameter and update would be broadcast.
        if jnp.shape(updates[path]) != p.shape:
            raise ValueError(
                f"It returned an update of shape {jnp.shape(updates[path])} for the parameter "
                f"{path} of shape {p.shape}. Put that parameter in another group."
            )
    # float64 hyperparameters may widen the state of float32 parameters beside float64 parameters.
    mixed = [jnp.float32] if compute_dtype(params) == jnp.float64 else []
    kept = match_avals(new_state, state, [*factories.declared_dtypes(recipe), *mixed])
    return updates, own_buffers(kept, (params, grads))


def _refuse_schedules_of_init(
    recipe: Recipe, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> None:
    """Raises ArgumentError if an argument whose first value the state keeps is a schedule."""
    # An example is the first step size of Rprop: init stores it in the state, and every update
    # computes the next step sizes from the stored ones.

    # Any value would do: the functions below are only traced, to see which leaves depend on it.
    value = jnp.ones((), compute_dtype(params))
    scheduled = {path: value for path, x in float_paths(recipe).items() if callable(x)}

    def given(values: Mapping[str, Any]) -> Recipe:
        return factories.map_floats(recipe, lambda path, x: values.get(path, x))

    from_init = reads_of_leaves(lambda values: _first_state(given(values), params), scheduled)
    # The usual case: init makes zeros, and the update need not be traced.
    if not any(from_init):
        return
    leaves, structure = jax.tree.flatten(state)

    def update(by_index: Mapping[str, Any]) -> Any:
        old = structure.unflatten([by_index[str(i)] for i in range(len(leaves))])
        return _run(given(scheduled), grads, old, params, extra)[1]

    read = reads_of_leaves(update, {str(i): leaf for i, leaf in enumerate(leaves)})
    # Leaves whose new value depends on their old one.
    lasting = [i for i, of_leaf in enumerate(read) if str(i) in of_leaf]
    for path in sorted(path for i in lasting for path in from_init[i]):
        raise ArgumentError(
            f"{path} is a schedule, but init stores a result of its value at step 0 in the state, "
            f"and later values do not replace it. Give {path} a number.",
            path,
        )


def _first_state(recipe: Recipe, params: Any) -> Any:
    """Runs the init of a recipe, with schedules at step 0."""
    now = at_step(recipe, 0, compute_dtype(params))
    try:
        return factories.instantiate(now, 0, compute_dtype(params)).init(params)
    except Exception:
        if explicit_mesh(params) is None:
            raise
    # Usually the types of the parameters give the state its shardings. But with explicit axes,
    # arrays with different shardings cannot be concatenated, as optax.flatten does.
    held, make = separate_arrays(now)

    def start(held: list[jax.Array], params: Any, _: Any) -> Any:
        return make(held, compute_dtype(params)).init(params)

    def place(path: Any, x: jax.Array) -> jax.Array:
        of_leaf = params.get(getattr(path[-1], "key", None)) if path else None
        return x if of_leaf is None or of_leaf.shape != x.shape else scatter(x, of_leaf)

    state = with_automatic_axes(start, (held, params), {}, like=None)
    return jax.tree_util.tree_map_with_path(place, state)


def _run(
    recipe: Recipe, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Runs the update of a recipe without schedules."""
    held, make = separate_arrays(recipe)
    functions = {name: x for name, x in extra.items() if callable(x)}
    arrays = {name: x for name, x in extra.items() if name not in functions}

    def update(
        held: list[jax.Array], grads: Any, state: Any, params: Any, arrays: Any, functions: Any
    ) -> Any:
        # The factory is called here, because a hyperparameter with explicit axes could not be
        # multiplied by a gradient with automatic axes.
        made = make(held, compute_dtype(params)).update(grads, state, params, **arrays, **functions)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(
                f"Its update returned {type(made).__name__}. An update must return (updates, "
                "state): a tuple of the updates and the new state."
            )
        return made

    return with_automatic_axes(
        update, (held, grads, state, params, arrays), functions, like=(params, state)
    )


def match_avals(
    new: optax.OptState, old: optax.OptState, narrow: Sequence[Any] = ()
) -> optax.OptState:
    """Casts a new state to the dtypes and strong types of the old; ValueError if it cannot."""
    # `narrow` lists floating dtypes to which wider values may be cast, because the optimizer's
    # arguments declare them for its state. Any other cast that would lose more than rounding does,
    # such as float32 to int32, raises.
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"It changed the structure of its state from {jax.tree.structure(old)} to "
            f"{jax.tree.structure(new)}; the structure of a state must not change."
        )

    def cast(path: Any, n: Any, o: Any) -> Any:
        name = jax.tree_util.keystr(path)
        leaf = f"Its state at {name}" if name else "Its state, which is a single array,"
        if jnp.shape(n) != jnp.shape(o):
            raise ValueError(
                f"{leaf} has the shape {jnp.shape(o)} at first and {jnp.shape(n)} after a step. "
                f"The shapes of a state must not change."
            )
        if _loses(n, o) and o.dtype not in narrow:
            raise ValueError(
                f"{leaf} is {o.dtype} at first and "
                f"{jnp.asarray(n).dtype} after a step. The dtypes of a state must not change: a "
                f"cast to {o.dtype} would truncate the value at every step. Let the optimizer's "
                f"init use {jnp.asarray(n).dtype}, or its update cast to {o.dtype}."
            )
        # Also makes it strongly typed: a state with a weak type would compile the next step again.
        return jax.lax.convert_element_type(n, o.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def _loses(new: Any, old: Any) -> bool:
    """Returns whether a cast to the dtype of `old` can lose more than rounding does."""
    # Extended dtypes are those of typed PRNG keys.
    kind = jax.typeof(new)
    if kind.dtype == old.dtype or jnp.issubdtype(kind.dtype, jax.dtypes.extended):
        return False
    for of_kind in (jnp.floating, jnp.complexfloating, jnp.integer):
        if kind.weak_type and all(jnp.issubdtype(x, of_kind) for x in (kind.dtype, old.dtype)):
            return False  # weakly typed, such as a Python number, which has no width
    return jnp.promote_types(kind.dtype, old.dtype) != old.dtype


def own_buffers(state: optax.OptState, others: optax.Params) -> optax.OptState:
    """Copies leaves of a state that are also other leaves, so that all can be donated."""
    # `others` are donated with the state, such as the parameters.

    # Several optimizers of optax, such as L-BFGS and SAM, keep parameters or gradients in their
    # state. Donating one buffer twice fails; on several devices, jaxlib 0.10.2 crashes.
    seen = {id(x) for x in jax.tree.leaves(others)}

    def distinct(x: Any) -> Any:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(distinct, state)


# On a mesh with explicit axes, which `jax.make_mesh` makes by default, the sharding of an array is
# a part of its type, and every product along a sharded axis needs the sharding of its result.
# Optimizers do not specify it. With automatic axes, the compiler chooses it.


def with_automatic_axes(
    function: Callable[..., Any],
    operands: Sequence[Any],
    functions: Mapping[str, Callable[..., Any]],
    like: tuple[Any, ...] | None,
) -> Any:
    """Calls a function with automatic axes; its results have the shardings of `like`."""
    # Raises ValueError if the function uses arrays that are not operands: they would keep their
    # explicit axes. Each of `functions`, whose first argument is a tree like `like[0]`, is called
    # with the axes of the caller, and may use the caller's arrays. Results are replicated if `like`
    # is None.
    if (mesh := explicit_mesh((operands, like))) is None:
        return function(*operands, functions)
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: jax.Array) -> NamedSharding:
        sharding = jax.typeof(x).sharding
        return whole if sharding.mesh.empty else sharding

    places: Any = whole if like is None else jax.tree.map(place, like)
    # Inside a shard_map over some axes of the mesh, those are manual and stay so.
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)

    def with_explicit_axes(given: Callable[..., Any]) -> Callable[..., Any]:
        # wraps copies __signature__, which optax's line searches read.
        @functools.wraps(given)
        def call(first: Any, *others: Any, **kwargs: Any) -> Any:
            specs = (places[0], *(PartitionSpec() for _ in others))
            explicit = jax.sharding.explicit_axes(given, axes=axes, in_sharding=specs)
            return explicit(first, *others, **kwargs)

        return call

    as_given = {name: with_explicit_axes(x) for name, x in functions.items()}
    call = jax.sharding.auto_axes(lambda *x: function(*x, as_given), axes=axes, out_sharding=places)
    try:
        return call(*operands)
    except ValueError as error:
        # jax's words for two arrays of which one has automatic and the other explicit axes.
        if "should match the aval mesh" not in str(error):
            raise
        raise ValueError(
            "On a mesh with explicit axes, it uses an array that is not one of its arguments: a "
            "function that it was given, or a finished transformation, holds that array. Give it "
            "as a float argument of a functools.partial of the factory, replace it by a Python "
            "number or a NumPy array, or make the mesh with automatic axes: "
            "jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        ) from error


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """Returns the mesh with explicit axes that an array of a pytree is on, or None."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
