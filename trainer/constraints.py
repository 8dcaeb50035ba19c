"""How models divide their arrays among devices: by the roles of the axes.

A mesh may have the axes "data", "fsdp" and "tensor". Batches lie over the first two. Kernels lie
over the last two, and are gathered over "fsdp" where they are used, so that a device multiplies the
examples of its part of the batch by the heads, hidden units or tokens of its part of the kernels.
The compiler would have to guess that, and often gathers activations instead.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import PartitionSpec

from optim.division import is_divided

ROLES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "heads": ("tensor",),
    "hidden": ("tensor",),
    "vocabulary": ("tensor",),
}
"""The roles that an axis of an array may have, and the axes of the mesh over which it then lies."""

_DEVICE: ContextVar[Any] = ContextVar("_DEVICE", default=None)


@contextmanager
def computed_by(device: Any) -> Iterator[None]:
    """Tells what is traced meanwhile which kind of device will compute it."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def is_told() -> bool:
    """Returns whether what is traced was told which kind of device will compute it."""
    return _DEVICE.get() is not None


def device() -> Any:
    """Returns a device of those that compute what is traced; by default the first of jax."""
    # `explain --target` traces for devices that are not here.
    return jax.devices()[0] if (found := _DEVICE.get()) is None else found


APART = "devices apart"
"""The name of an axis of `jax.vmap` over which the mesh splits a batch.

In what is mapped over it, as in the gradients that a step computes apart for each device, a batch
has the examples of one device: its axis "batch" lies over no axis of the mesh.
"""


def constrain(x: jax.Array, *roles: str | None) -> jax.Array:
    """Constrains how an array is divided among devices, while a model is traced.

    It reads the mesh that `jax.sharding.get_abstract_mesh` returns. Without one, the result is `x`
    itself. So it is where the caller decides: inside `jax.shard_map`, and on a mesh with explicit
    axes, where the sharding of an array is a part of its type.

    `x` is an activation; or a kernel that is about to be used, which is gathered over "fsdp". Each
    axis has a role, a key of ROLES, or None if it is not divided; one that the devices do not
    divide evenly is left to the compiler.

    Example:
        >>> x = jax.numpy.ones((2, 3))
        >>> constrain(x, "batch", None) is x
        True
    """
    if not is_divided():
        return x
    places = [_place(size, role) for size, role in zip(x.shape, roles, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*places))


def parts(role: str) -> int:
    """Returns into how many parts `constrain` divides an axis with a role, if they are equal.

    Example:
        >>> parts("heads")
        1
    """
    if not is_divided():
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in _axes(role))


def _place(size: int, role: str | None) -> object:
    """Returns the entry of a PartitionSpec for an axis."""
    if role is None:
        return None
    return PartitionSpec.UNCONSTRAINED if size % parts(role) else _axes(role) or None


def _axes(role: str) -> tuple[str, ...]:
    """Returns the axes of the mesh over which an axis with a role lies."""
    if role == "batch":
        with suppress(NameError):  # no such axis is mapped over
            jax.lax.axis_size(APART)
            return ()
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in ROLES[role] if name in sizes)
