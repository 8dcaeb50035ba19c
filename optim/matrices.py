"""Turns parameters into whole, real matrices and back, and computes exact products of them.

Start with `Matrices.map`, through which the optimizers of matrices run.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optim.declarations import declare
from optim.division import Axes, split_of
from optim.layouts import Layout, MatrixSpec, layouts, rules


class Matrices:
    """Converts parameters to batches of matrices and back; ValueError for an invalid spec."""

    # The spec is the optimizer's argument `matrices`; None uses the last two axes of every
    # parameter, [inputs, outputs], and every axis before them as batch.

    # Matrices in place of a spec keep their name: `optim.soap` is named where `parts.soap` is run.

    def __init__(self, spec: "MatrixSpec | Matrices", optimizer: str):
        if isinstance(spec, Matrices):
            self._rules, self._optimizer = spec._rules, spec._optimizer
        else:
            self._rules, self._optimizer = rules(spec), optimizer

    def declare(
        self,
        params: optax.Params,
        doubts: Sequence[str] = (),
        length: Callable[[Layout], float] | None = None,
        again: bool = True,
    ) -> None:
        """Checks the parameters at init and reports their layouts to `declarations`."""
        # For the arguments, see `declarations.declare`.
        declare(params, self._rules, self._optimizer, doubts, length, again)

    def layouts(self, params: optax.Params) -> list[Layout]:
        """Finds every parameter's layout, in the order of the leaves; raises as `declare` does."""
        return list(layouts(params, self._rules, self._optimizer).values())

    def splits(self, params: optax.Params) -> list[tuple[Axes, Axes]]:
        """Finds the mesh axes that split rows and columns of every parameter's matrices."""
        # They are () where `division.split_as` does not say; raises as `declare` does.

        def of_path(path: str, layout: Layout) -> tuple[Axes, Axes]:
            of = split_of(path) or [()] * len(layout.shape)
            sides = layout.rows, layout.columns
            rows, columns = (tuple(name for axis in axes for name in of[axis]) for axes in sides)
            return rows, columns

        found = layouts(params, self._rules, self._optimizer)
        return [of_path(path, layout) for path, layout in found.items()]

    def map(
        self, function: Callable[..., Sequence[Any]], trees: Sequence[Any], kept: Sequence[Any] = ()
    ) -> list[Any]:
        """Applies a function to lists of all parameters' matrices, [n, rows, columns]."""
        # It takes a list of each of `trees`, then of each of `kept` ([n, ...], with the batch axes
        # in place of n outside), and returns lists in that order.
        leaves, structure = jax.tree.flatten(trees[0])
        # Each item of `kept` has a tree of arrays for a parameter, or () where there is no matrix.
        columns = [structure.flatten_up_to(tree) for tree in (*trees, *kept)]
        found = self.layouts(trees[0])
        whole = [list(map(self._matrices, column, found)) for column in columns[: len(trees)]]
        stacked = [list(map(self._stack, column, found)) for column in columns[len(trees) :]]
        made = function(*whole, *stacked)
        # Results come in the order of the arguments: those like parameters, then those like `kept`.
        back = [list(map(_parameter, column, found, leaves)) for column in made[: len(trees)]]
        rest = [list(map(_unstack, column, found)) for column in made[len(trees) :]]
        if kept:
            places = columns[len(trees) :]
            rest = [jax.tree.map(scatter, *pair) for pair in zip(rest, places, strict=False)]
        return [structure.unflatten(column) for column in (*back, *rest)]

    def each(self, function: Callable[..., jax.Array], *trees: Any) -> Any:
        """Returns what a function makes of each parameter's matrices, [n, rows, columns]."""
        return self.map(lambda *lists: [list(map(function, *lists))], trees)[0]

    def _matrices(self, x: jax.Array, layout: Layout) -> jax.Array:
        self._require_whole(x)
        x = replicate(jnp.transpose(x, layout.order), len(layout.batch))
        return jnp.reshape(x, layout.matrices)

    def _stack(self, tree: Any, layout: Layout) -> Any:
        batch = len(layout.batch)

        def one(x: jax.Array) -> jax.Array:
            self._require_whole(x)
            return jnp.reshape(replicate(x, batch), (layout.matrices[0], *x.shape[batch:]))

        return jax.tree.map(one, tree)

    def _require_whole(self, x: jax.Array) -> None:
        # The mesh axes of a surrounding shard_map along which the array differs, if there is one.
        if varying := jax.typeof(x).manual_axis_type.varying:
            axes = ", ".join(sorted(map(str, varying)))
            raise ValueError(
                f"Inside shard_map, {self._optimizer} got a gradient or a parameter that differs"
                f" along the mesh axis {axes}, so it may be a shard of a matrix:"
                " average the gradient over that axis (jax.lax.pmean) and keep the parameter"
                " replicated, or leave shard_map and use jit with named shardings."
            )


def _unstack(tree: Any, layout: Layout) -> Any:
    batch = [layout.shape[axis] for axis in layout.batch]
    return jax.tree.map(lambda x: jnp.reshape(x, (*batch, *x.shape[1:])), tree)


def _parameter(x: jax.Array, layout: Layout, like: jax.Array) -> jax.Array:
    """Inverts `Matrices._matrices`, with the sharding of another array."""
    x = jnp.reshape(x, [layout.shape[axis] for axis in layout.order])
    # The inverse of the permutation `order`.
    back = [layout.order.index(axis) for axis in range(len(layout.order))]
    return scatter(jnp.transpose(x, back), like)


def scatter(x: jax.Array, like: jax.Array) -> jax.Array:
    """Gives an array the sharding of another of its shape, on meshes with explicit axes."""
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def replicate(x: jax.Array, batch: int = 0) -> jax.Array:
    """Gathers all axes but the first of so many batch axes, on meshes with explicit axes."""
    # Under jit with automatic axes the compiler gathers where necessary. With explicit axes, where
    # the sharding belongs to the type, a reshape cannot merge split axes, and QR does not support
    # sharded batches.
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    first = tuple(sharding.spec)[: min(batch, 1)]
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*first)))


def eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds eigenvalues, rising, [..., m], and eigenvectors, the columns of [..., m, m]."""
    return _decompose(lambda x: tuple(jnp.linalg.eigh(x)), x)


def qr(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decomposes [..., m, n] into Q, [..., m, k], and R, [..., k, n], where k is min(m, n)."""
    return _decompose(lambda x: tuple(jnp.linalg.qr(x)), x)


def solve_triangular(upper: jax.Array, x: jax.Array, side: str) -> jax.Array:
    """Returns R^-T X for side "left", and X R^-1 for "right"."""
    # R is an upper triangular matrix, [..., m, m]; X is [..., m, n], or [..., n, m].
    left = side == "left"

    def solve(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.linalg.triangular_solve(a, b, left_side=left, transpose_a=left)

    return _decompose(solve, upper, x)


def _decompose(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Decomposes a batch at once, but one matrix after the other on a CPU, under vmap, too."""
    # jaxlib's LAPACK kernels distribute a batch to the threads that compute the program, and wait
    # for them. If as many such kernels run at once as there are threads, this is a deadlock: two on
    # two cores, or one on each of eight simulated devices.
    one = jax.custom_batching.sequential_vmap(function)
    sharded = jax.sharding.get_abstract_mesh().size > 1

    def each(*arrays: jax.Array) -> Any:
        leading = arrays[0].shape[:-2]
        if math.prod(leading) < 2:
            return one(*arrays)
        batches = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
        if sharded:
            found = [one(*(x[i : i + 1] for x in batches)) for i in range(len(batches[0]))]
            stacked = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *found)
        else:
            stacked = jax.lax.map(lambda xs: one(*xs), batches)
        return jax.tree.map(lambda y: y.reshape(*leading, *y.shape[1:]), stacked)

    return jax.lax.platform_dependent(*arrays, cpu=each, default=function)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies matrices, exact to their dtype: TensorFloat-32 on GPUs is too coarse for roots."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes of an array [..., m, n]."""
    return jnp.swapaxes(x, -2, -1)
