"""What an optimizer of matrices asks: whole, real matrices, and exact products of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optim.declarations import declare
from optim.layouts import Layout, MatrixSpec, layouts, rules


class Matrices:
    """The matrices that an optimizer works on: the one way from parameters to them and back.

    Args:
        spec: the optimizer's argument `matrices`; see `optim.layouts`. None takes the last two axes
            of every parameter, [inputs, outputs], and every axis before as batch.
        optimizer: the optimizer's name in errors, such as "optim.muon".

    Raises:
        ValueError: the spec is not one.
    """

    def __init__(self, spec: MatrixSpec, optimizer: str):
        self._rules = rules(spec)
        self._optimizer = optimizer

    def declare(self, params: Any, doubts: Sequence[str] = ()) -> None:
        """Checks the parameters at init, and tells the plan what is worked on.

        Args:
            params: a pytree of arrays.
            doubts: what else seems wrong with the optimizer's arguments, a sentence each.

        Raises:
            ValueError: a parameter is not a real matrix, does not fit the spec, or a pattern of the
                spec matches none.
        """
        declare(params, self._rules, self._optimizer, doubts)

    def layouts(self, params: Any) -> list[Layout]:
        """Tells how each parameter is a batch of matrices, in the order of the leaves."""
        return list(layouts(params, self._rules, self._optimizer).values())

    def map(
        self,
        function: Callable[..., tuple[Any, ...]],
        parts: int,
        trees: Sequence[Any],
        kept: Sequence[Any] = (),
    ) -> list[Any]:
        """Applies a function to the matrices of every parameter.

        Args:
            function: takes, for one parameter, an array [n, rows, columns] of each of `trees`, then
                what each of `kept` has there, its arrays [n, ...]. It returns as many arrays
                [n, rows, columns] as there are trees, and then any pytrees of arrays [n, ...]. The
                n matrices are independent of each other.
            parts: the number of what it returns.
            trees: pytrees with the structure and the shapes of the parameters.
            kept: pytrees that begin with that structure, whose arrays have, in place of n, the
                batch axes of the parameter.

        Returns:
            For each part that the function returns a pytree with the structure of the parameters:
            first those with their shapes and shardings, then those like `kept`.

        Raises:
            ValueError: see `declare`; or inside shard_map an array differs from device to device,
                so that it may be a part of a matrix, and its norm a part of the norm.
        """
        leaves, structure = jax.tree.flatten(trees[0])
        columns = [structure.flatten_up_to(tree) for tree in (*trees, *kept)]
        rows = []
        for layout, like, *row in zip(self.layouts(trees[0]), leaves, *columns, strict=True):
            whole = [self._matrices(x, layout) for x in row[: len(trees)]]
            stacked = jax.tree.map(lambda x, at=layout: self._stack(x, at), row[len(trees) :])
            made = function(*whole, *stacked)
            back = [_parameter(x, layout, like) for x in made[: len(trees)]]
            rest = jax.tree.map(lambda x, at=layout: _unstack(x, at), list(made[len(trees) :]))
            rows.append([*back, *rest])
        return [structure.unflatten([row[i] for row in rows]) for i in range(parts)]

    def _matrices(self, x: jax.Array, layout: Layout) -> jax.Array:
        self._refuse_parts(x)
        return _merge(jnp.transpose(x, layout.order), len(layout.batch), layout.matrices)

    def _stack(self, x: jax.Array, layout: Layout) -> jax.Array:
        self._refuse_parts(x)
        batch = len(layout.batch)
        return _merge(x, batch, (layout.matrices[0], *x.shape[batch:]))

    def _refuse_parts(self, x: jax.Array) -> None:
        varying = jax.typeof(x).manual_axis_type.varying
        if varying:
            axes = ", ".join(sorted(map(str, varying)))
            raise ValueError(
                f"Inside shard_map, {self._optimizer} got a gradient or a parameter that differs"
                f" along the mesh axis {axes}, and cannot know whether it is a whole matrix:"
                " average the gradient over that axis (jax.lax.pmean) and keep the parameter"
                " replicated, or leave shard_map and use jit with named shardings."
            )


def _merge(x: jax.Array, batch: int, shape: tuple[int, ...]) -> jax.Array:
    """Makes the batch axes one, and gathers what is sharded of all others.

    Under jit with automatic axes the compiler gathers what it must. With explicit axes, where the
    sharding is part of the type, it asks for our word; the first batch axis stays sharded.
    """
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        first = tuple(sharding.spec)[: min(batch, 1)]
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*first)))
    return jnp.reshape(x, shape)


def _unstack(x: jax.Array, layout: Layout) -> jax.Array:
    return jnp.reshape(x, (*(layout.shape[axis] for axis in layout.batch), *x.shape[1:]))


def _parameter(x: jax.Array, layout: Layout, like: jax.Array) -> jax.Array:
    """Undoes `Matrices._matrices`, with the sharding of another array."""
    x = jnp.reshape(x, [layout.shape[axis] for axis in layout.order])
    back = [layout.order.index(axis) for axis in range(len(layout.order))]
    return scatter(jnp.transpose(x, back), like)


def scatter(x: jax.Array, like: jax.Array) -> jax.Array:
    """Shards an array as another is, where the sharding is part of their type."""
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def everywhere(x: jax.Array) -> jax.Array:
    """Replicates matrices whose sharding is part of their type: QR refuses even sharded batches."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if explicit else x


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies matrices, exact to their dtype: a GPU's TensorFloat-32 is too coarse for roots."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -2, -1)
