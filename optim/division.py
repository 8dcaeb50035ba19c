"""Divides costly work on many matrices among the devices of a mesh.

Under jit, every device orthogonalizes every matrix of replicated parameters; for sharded parameters
the compiler gathers the matrices first and does the same. The matrices are independent of each
other, so each device can compute a share of them and send its results to the others. Where the
shares would be too unequal, several devices compute the rows of one matrix together.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

Cost = Callable[[tuple[int, ...]], float]

Axes = tuple[str, ...]
"""The mesh axes that split one dimension; () if it is not split."""

_SPLIT: ContextVar[Mapping[str, Sequence[Axes]] | None] = ContextVar("_SPLIT", default=None)

# If the largest share of whole matrices is at most this multiple of the mean, none is divided.
_EVEN_ENOUGH = 1.1
# The fewest rows of a matrix that a device computes. For fewer, exchanging them should take longer
# than computing them on each device; that was not measured.
_FEWEST_ROWS = 32


@contextmanager
def split_as(axes: Mapping[str, Sequence[Axes]]) -> Iterator[None]:
    """Tells the optimizers that are traced meanwhile how the parameters are split."""
    # With automatic axes, the type of a traced array does not say it. Results are the same without,
    # up to rounding, but devices may exchange more. `axes` has, by path name, the mesh axes that
    # split each dimension.
    token = _SPLIT.set(axes)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def split_of(path: str) -> Sequence[Axes] | None:
    """Returns the mesh axes that split each dimension of a parameter, None if unknown."""
    # Also None if `divide`, called here, divides nothing.
    return (_SPLIT.get() or {}).get(path) if is_divided() else None


def square_cost(shape: tuple[int, ...]) -> float:
    """Returns m * m * n for a matrix [..., m, n] with m <= n: the cost of X X^T."""
    # The cost of decompositions of square matrices grows in the same way.
    small, large = sorted(shape[-2:])
    return float(small) * small * large


def divide(
    function: Callable[..., Any],
    *batches: Sequence[jax.Array],
    cost: Cost = square_cost,
    by_rows: Callable[..., Any] | None = None,
) -> list[Any]:
    """Applies a function to the matrices of many parameters; each device computes a share of them.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh
        >>> batches = [4 * np.ones((1, 3, 3)), 9 * np.ones((2, 2, 2))]
        >>> with jax.set_mesh(Mesh(np.asarray(jax.devices()), ("data",))):
        ...     roots = jax.jit(lambda x: divide(jax.numpy.sqrt, x))(batches)
        >>> [float(x[0, 0, 0]) for x in roots]
        [2.0, 3.0]
    """
    # Without a mesh of several devices with automatic axes, every device computes all matrices.
    # `batches` are lists with an array [n, rows, columns] for each parameter, whose n may differ
    # between parameters. `function` takes an array [k, ...] of each list, and returns a pytree of
    # arrays [k, ...]; it treats each of the k matrices alone, and has no collectives. `cost` is of
    # a matrix of the first list, in any unit. `by_rows` is the same function, computed by several
    # devices together: it takes arrays of which each of them has a copy, and the `axes` of the mesh
    # along which they exchange what they compute, and returns this device's rows.
    rows = list(zip(*batches, strict=True))
    if not is_divided():
        return [function(*row) for row in rows]
    mesh = jax.sharding.get_abstract_mesh()
    # Only matrices of equal shapes and dtypes, in every one of `batches`, can be stacked.
    kinds: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        kinds.setdefault(tuple((x.shape[1:], x.dtype) for x in row), []).append(place)
    sizes = [row[0].shape[0] for row in rows]
    numbers = [sum(sizes[place] for place in places) for places in kinds.values()]
    shapes = [kind[0][0] for kind in kinds]
    costs = [cost(shape) for shape in shapes]
    shares = assign_to_devices(numbers, costs, mesh.size)
    axes: list[tuple[str, ...]] = [()] * len(kinds)
    if by_rows is not None:
        shares, axes = _choose_rows(numbers, costs, shapes, shares, mesh)
    results: list[Any] = [None] * len(rows)
    for places, share, together in zip(kinds.values(), shares, axes, strict=True):
        columns = zip(*(rows[place] for place in places), strict=True)
        stacks = [jnp.concatenate(arrays) for arrays in columns]
        whole, found = int(share.sum()), []
        if whole or not together:
            found.append(_on_shares(function, [x[:whole] for x in stacks], share, mesh))
        if by_rows is not None and together:
            found.append(_by_rows(by_rows, [x[whole:] for x in stacks], together, mesh))
        # Arrays [matrices of the kind, ...], in the order of `places`.
        joined = _concatenated(found)
        ends = np.cumsum([sizes[place] for place in places])
        for place, end in zip(places, ends.tolist(), strict=True):
            begin = end - sizes[place]
            results[place] = jax.tree.map(lambda x, a=begin, b=end: x[a:b], joined)
    return results


def _concatenated(trees: list[Any]) -> Any:
    """Concatenates the arrays of pytrees; a single tree stays as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def is_divided() -> bool:
    """Returns whether `divide`, called here, divides matrices among several devices."""
    # It does on a mesh of several devices with automatic axes; models then constrain their arrays.
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def assign_to_devices(
    numbers: Sequence[int], costs: Sequence[float], devices: int
) -> list[np.ndarray]:
    """Distributes matrices of each shape: the costliest first, each to the least loaded device.

    Example:
        >>> [share.tolist() for share in assign_to_devices([3, 4], [8.0, 2.0], 2)]
        [[2, 1], [0, 4]]
    """
    # The costliest share is at most 4/3 of the best possible (Graham, Bounds on Multiprocessing
    # Timing Anomalies, 1969), and the shares are equal where the devices divide every number.
    shares = [np.zeros(devices, int) for _ in numbers]
    # The device breaks ties: every process computes the shares, and all must find the same.
    loads = [(0.0, device) for device in range(devices)]
    for kind in sorted(range(len(numbers)), key=lambda kind: -costs[kind]):
        for _ in range(numbers[kind]):
            load, device = loads[0]
            shares[kind][device] += 1
            heapq.heapreplace(loads, (load + costs[kind], device))
    return shares


def _choose_rows(
    numbers: Sequence[int],
    costs: Sequence[float],
    shapes: Sequence[tuple[int, ...]],
    shares: Sequence[np.ndarray],
    mesh: AbstractMesh,
) -> tuple[Sequence[np.ndarray], list[tuple[str, ...]]]:
    """Chooses the mesh axes over which the rows of single matrices are divided."""
    # They are the last axes of the mesh: the fewest that make the work even enough, or else the
    # most even. Returns for each shape how many whole matrices each device computes, int [devices],
    # and the axes for the others: () where rows do not divide or are too few, or nothing is gained.
    mean = sum(number * one for number, one in zip(numbers, costs, strict=True)) / mesh.size

    def largest(shares: Sequence[np.ndarray]) -> float:
        return float(np.max(sum(one * share for one, share in zip(costs, shares, strict=True))))

    best = largest(shares)
    chosen: list[tuple[str, ...]] = [()] * len(numbers)
    for first in range(len(mesh.axis_names) - 1, -1, -1):
        if best <= _EVEN_ENOUGH * mean:
            break
        axes = mesh.axis_names[first:]
        devices = math.prod(mesh.shape[name] for name in axes)
        groups = mesh.size // devices
        fits = [not rows % devices and rows >= _FEWEST_ROWS * devices for rows, _ in shapes]
        if devices == 1 or not any(fits):
            continue
        alone = [0 if fit else number for fit, number in zip(fits, numbers, strict=True)]
        dealt = assign_to_devices(alone, costs, mesh.size)
        equal = [
            np.full(mesh.size, number // mesh.size) if fit else share
            for fit, number, share in zip(fits, numbers, dealt, strict=True)
        ]
        others = [number % mesh.size * fit for fit, number in zip(fits, numbers, strict=True)]
        # Every group of devices has as many of the other matrices as the one that has the most.
        pairs = zip(costs, others, strict=True)
        load = largest(equal) + sum(one * -(-other // groups) / devices for one, other in pairs)
        if load < best:
            best, shares, chosen = load, equal, [axes if other else () for other in others]
    return shares, chosen


def _by_rows(
    function: Callable[..., Any],
    stacks: Sequence[jax.Array],
    axes: tuple[str, ...],
    mesh: AbstractMesh,
) -> Any:
    """Applies a function to stacks [n, ...]; devices along `axes` compute a matrix together."""
    # `function` takes the axes, too, and returns this device's rows of the results.
    others = tuple(name for name in mesh.axis_names if name not in axes)
    groups, count = math.prod(mesh.shape[name] for name in others), stacks[0].shape[0]
    # Every group has as many slots as the fullest one; a slot too many repeats a matrix.
    at = np.minimum(np.arange(-(-count // groups) * groups), count - 1)
    dealt = [jnp.take(_split_first_axis(x, ()), at, axis=0) for x in stacks]
    run = jax.shard_map(
        partial(function, axes=axes),
        mesh=mesh,
        in_specs=PartitionSpec(others or None),
        out_specs=PartitionSpec(others or None, axes),
        check_vma=False,
    )
    return jax.tree.map(lambda x: _split_first_axis(x, ())[:count], run(*dealt))


def _on_shares(
    function: Callable[..., Any], stacks: Sequence[jax.Array], share: np.ndarray, mesh: AbstractMesh
) -> Any:
    """Applies a function to stacks [n, ...]; each device computes its share."""
    # Every device runs the same program, so each has as many slots as the largest share. The slots
    # that all devices fill form one batch. Each other slot is computed under a condition.
    slots, filled = int(share.max()), int(share.min())
    if slots == 0:
        return function(*stacks)
    ends = np.cumsum(share)
    # The index of the matrix in each slot, [devices, slots]; empty slots hold matrix 0.
    inside = np.arange(slots) < share[:, None]
    matrix_at = np.where(inside, (ends - share)[:, None] + np.arange(slots), 0)
    # The first axis of the mesh changes fastest, so that results can be gathered over it first.
    axes = mesh.axis_names[::-1]

    def compute(*mine: jax.Array) -> Any:
        results = [function(*(x[:filled] for x in mine))] if filled else []
        taken = jnp.asarray(share)[jax.lax.axis_index(axes)]
        for slot in range(filled, slots):
            one = [x[slot : slot + 1] for x in mine]
            shapes = jax.eval_shape(function, *one)
            # Empty slots return zeros, which are dropped below.
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            results.append(jax.lax.cond(slot < taken, function, lambda *_, z=zeros: z, *one))
        return _concatenated(results)

    even = slots == filled
    whole = [_split_first_axis(x, ()) for x in stacks]
    dealt = whole if even else [jnp.take(x, matrix_at.ravel(), axis=0) for x in whole]
    # One axis at a time: XLA replicates an array if it cannot reshard it in a single step.
    for end in range(1, len(axes)):
        dealt = [_split_first_axis(x, axes[:end]) for x in dealt]
    spec = PartitionSpec(axes)
    # Without check_vma, because the branches of a condition differ in what they vary over.
    run = jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = run(*dealt)
    for end in range(len(axes) - 1, -1, -1):  # back in the same way
        found = jax.tree.map(lambda x, kept=axes[:end]: _split_first_axis(x, kept), found)
    if even:
        return found
    slot_of = np.flatnonzero(inside.ravel())
    return jax.tree.map(lambda x: jnp.take(x, slot_of, axis=0), found)


def _split_first_axis(x: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
    """Shards the first axis over some mesh axes and leaves the other axes to the compiler."""
    unconstrained = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(mesh_axes or None, *unconstrained))


def one_by_one(function: Callable[..., Sequence[list[Any]]]) -> Callable[..., Sequence[list[Any]]]:
    """Makes a function of lists over the parameters treat one parameter after the other."""
    # That needs the temporary memory of one. If `divide` shares matrices among devices, the
    # function gets all parameters at once, so that the devices get equal shares.

    def each(*lists: list[Any]) -> Sequence[list[Any]]:
        if is_divided() or not lists[0]:
            return function(*lists)
        made = [function(*([x] for x in row)) for row in zip(*lists, strict=True)]
        return [[x for of_one in column for x in of_one] for column in zip(*made, strict=True)]

    return each
