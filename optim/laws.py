"""Keeps every optimizer lawful, whatever optax does inside.

An optimizer arrives as a *recipe*: a `functools.partial` of a factory that has not been called, so
that its float arguments can still be schedules or traced scalars. At every step, while the step is
traced, `update` evaluates the schedules, calls the factory with their values, and runs the
transformation it returns between two borders:

- on the way in, parameters, gradients and extra arguments become at least float32, because
  bfloat16(0.999) is 1.0 and Adam then divides by zero;
- on the way out, the state gets the dtypes and strong types it came with, and buffers of its own.

Nothing here knows an optimizer by its name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optim.parts import refuse_parts
from optim.recipes import (
    ArgumentError,
    Recipe,
    declared_dtypes,
    float_paths,
    instantiate,
    map_floats,
    name_of,
)
from optim.tracing import reads_of_leaves


def init(recipe: Recipe, params: Any) -> Any:
    """Makes an optimizer's state for some parameters.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        params: a pytree of arrays, widened (see `widen`).

    Returns:
        The state; every leaf is strongly typed and has a buffer of its own.
    """
    state = instantiate(recipe, 0, compute_dtype(params)).init(params)
    return own_buffers(jax.tree.map(_strong, state), params)


def update(
    recipe: Recipe, grads: Any, state: Any, params: Any, step: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Runs one step of an optimizer.

    Args:
        recipe: what `init` was given.
        grads: a dict like `params`, widened.
        state: what `init` or the last `update` returned.
        params: the parameters before the step, widened.
        step: the schedules' position, an int32 scalar.
        extra: extra arguments for whoever takes them; see `extras.extra_arguments`.

    Returns:
        The updates, to be added to the parameters; and the new state, whose structure, shapes,
        dtypes and strong types are those of `state`.

    Raises:
        ValueError: the optimizer changed the structure of its state, or the shape of a leaf; or
            inside shard_map it needs whole parameters and got parts of them; or a schedule stands
            for an argument that makes the first state (an ArgumentError).
    """
    _refuse_schedules_of_init(recipe, grads, state, params, extra)
    tx = instantiate(recipe, step, compute_dtype(params))
    refuse_parts(lambda g: tx.update(g, state, params, **extra), (grads, params), name_of(recipe))
    updates: Any
    updates, new_state = _unsharded(tx, grads, state, params, extra)
    for path, p in params.items():
        if jnp.shape(updates[path]) != p.shape:
            raise ValueError(
                f"It moves the parameter {path} of shape {p.shape} by an update of shape "
                f"{jnp.shape(updates[path])}. Give that parameter to another group."
            )
    # What float64 parameters need, hyperparameters and all, float32 ones beside them do not.
    mixed = [jnp.float32] if compute_dtype(params) == jnp.float64 else []
    kept = match_avals(new_state, state, [*declared_dtypes(recipe), *mixed])
    return updates, own_buffers(kept, (params, grads))


def _refuse_schedules_of_init(
    recipe: Recipe, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> None:
    """Refuses a schedule of an argument whose first value lasts in the state.

    Such as the first size of Rprop's steps: init puts it into a leaf of the state, from which every
    update makes the next.
    """
    dtype = compute_dtype(params)
    scheduled = {
        path: jnp.ones((), dtype) for path, value in float_paths(recipe).items() if callable(value)
    }

    def made(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        return instantiate(map_floats(recipe, lambda path, x: values.get(path, x)), 0, dtype)

    from_init = reads_of_leaves(lambda values: made(values).init(params), scheduled)
    if not any(from_init):
        return
    leaves, structure = jax.tree.flatten(state)

    def update(named: Mapping[str, Any]) -> Any:
        old = structure.unflatten([named[str(i)] for i in range(len(leaves))])
        return _unsharded(made(scheduled), grads, old, params, extra)[1]

    read = reads_of_leaves(update, {str(i): leaf for i, leaf in enumerate(leaves)})
    lasting = [i for i, of_leaf in enumerate(read) if str(i) in of_leaf]
    for path in sorted(path for i in lasting for path in from_init[i]):
        raise ArgumentError(
            f"A schedule stands for {path}, but the state keeps what init made of the value at "
            f"step 0, and later values do not replace it. Give {path} a number.",
            path,
        )


def _unsharded(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Runs an update as if nothing were sharded: the compiler spreads the work.

    On a mesh with explicit axes every product along a sharded axis wants to be told where its
    result goes, which no optax transformation does. There the update runs with automatic axes, and
    its results go where the parameters and the old state are.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves((params, grads))]
    mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    if mesh is None:
        return tx.update(grads, state, params, **extra)

    def place(x: Any) -> NamedSharding:
        sharding = jax.typeof(x).sharding
        return NamedSharding(mesh, PartitionSpec()) if sharding.mesh.empty else sharding

    functions = {name: x for name, x in extra.items() if callable(x)}
    arrays = {name: x for name, x in extra.items() if name not in functions}
    places = jax.tree.map(place, (params, state))

    def update(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
        return tx.update(grads, state, params, **arrays, **functions)

    run: Any = jax.sharding.auto_axes(update, out_sharding=places)
    return run(grads, state, params, arrays)


def compute_dtype(params: Any) -> Any:
    """Tells the dtype of hyperparameters: float64 if a parameter has it, else float32."""
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in jax.tree.leaves(params) if _inexact(x))
    return jnp.float64 if wide else jnp.float32


def widen(tree: Any) -> Any:
    """Casts bfloat16 and float16 leaves to float32 and leaves the others as they are."""

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
        return x.astype(jnp.float32) if low else x

    return jax.tree.map(cast, tree)


def match_avals(new: Any, old: Any, narrow: Sequence[Any] = ()) -> Any:
    """Gives every leaf of a new state the dtype and the strong type of the old one.

    Args:
        new: the state after a step.
        old: the state before it.
        narrow: floating dtypes that wider values are cast to all the same, because the optimizer
            was told to keep its state in them.

    Returns:
        The new state, with the avals of the old.

    Raises:
        ValueError: another structure, another shape of a leaf, or a dtype that does not fit into
            the old one, such as float32 into int32.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"It changed the structure of its state from {jax.tree.structure(old)} to "
            f"{jax.tree.structure(new)}; a state keeps its structure from step to step."
        )

    def cast(path: Any, n: Any, o: Any) -> Any:
        if jnp.shape(n) != jnp.shape(o):
            raise ValueError(
                f"It changed the shape of its state at {jax.tree_util.keystr(path)} from "
                f"{jnp.shape(o)} to {jnp.shape(n)}; a state keeps its shapes from step to step."
            )
        if _loses(n, o) and o.dtype not in narrow:
            raise ValueError(
                f"Its state at {jax.tree_util.keystr(path)} is {o.dtype} at first and "
                f"{jnp.asarray(n).dtype} after a step, and a state keeps its dtypes: a cast back "
                f"to {o.dtype} would truncate the value at every step. Let the optimizer's init "
                f"give it {jnp.asarray(n).dtype}, or its update cast it to {o.dtype}."
            )
        return jax.lax.convert_element_type(n, o.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def _loses(new: Any, old: Any) -> bool:
    """Tells whether a cast to the dtype of `old` can lose what a number is, beyond rounding."""
    kind = jax.typeof(new)
    if kind.dtype == old.dtype or jnp.issubdtype(kind.dtype, jax.dtypes.extended):
        return False
    for of_kind in (jnp.floating, jnp.complexfloating, jnp.integer):
        if kind.weak_type and all(jnp.issubdtype(x, of_kind) for x in (kind.dtype, old.dtype)):
            return False  # a Python number, which has no width of its own
    return jnp.promote_types(kind.dtype, old.dtype) != old.dtype


def _strong(x: Any) -> Any:
    return jax.lax.convert_element_type(x, jnp.asarray(x).dtype)


def own_buffers(state: Any, others: Any) -> Any:
    """Copies each leaf of a state that is also another leaf, so that all of them can be donated."""
    seen = {id(x) for x in jax.tree.leaves(others)}

    def distinct(x: Any) -> Any:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(distinct, state)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
