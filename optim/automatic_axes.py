"""Calls functions with automatic axes on meshes with explicit axes.

On a mesh with explicit axes, which `jax.make_mesh` makes by default, the sharding of an array is a
part of its type, and every product along a sharded axis needs the sharding of its result.
Optimizers do not specify it. With automatic axes, the compiler chooses it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


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
    mesh = explicit_mesh((operands, like))
    if mesh is None:
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

    def of_operands(*operands: Any) -> Any:
        return function(*operands, as_given)

    try:
        return jax.sharding.auto_axes(of_operands, axes=axes, out_sharding=places)(*operands)
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
