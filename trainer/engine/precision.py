"""Says in which dtype each part of a training step is stored or computed: the roles of `precision`.

Begin with `roles_of`; the names "float32", "mixed" and "bfloat16" are short for roles.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import optim
from optim.dtypes import widen
from optim.paths import flatten
from optim.state_dtypes import named_arrays, wrong_states
from trainer.config.wording import known_names
from trainer.engine.contracts import ComponentError
from trainer.engine.mesh import batch_parts

DTYPES = ("bfloat16", "float32")
_NO_FLOAT16 = (
    " float16 has no numbers above 65,504 and none below 6e-8, and would need gradients that are"
    " scaled, which Lockstep does not do."
)


class Roles(NamedTuple):
    """The dtype of each role in a training step."""

    parameters: str = "float32"
    compute: str = "float32"  # to which parameters and batch are cast for the model
    # over the devices that split a batch; over microbatches, always float32
    reductions: str = "float32"
    # "float32" if the optimizer updates copies of bfloat16 parameters in float32, "none" if it
    # does not; None leaves it to its `low_precision`
    master: str | None = None
    states: Mapping[str, str] | None = None  # as in `optim.optimizer`; None for its own


NAMES: Mapping[str, Roles] = {
    "float32": Roles(),
    "mixed": Roles("float32", "bfloat16", "bfloat16"),
    "bfloat16": Roles("bfloat16", "bfloat16", "bfloat16"),
}
"""What the names of `precision` stand for."""


def roles_of(precision: str | Mapping[str, Any]) -> Roles:
    """Returns the roles that a name in NAMES, or a mapping of roles, stands for; raises ValueError.

    Example:
        >>> roles_of({"compute": "bfloat16"}) == roles_of("mixed")
        True
        >>> roles_of({"parameters": "bfloat16", "master": "float32"})[:4]
        ('bfloat16', 'bfloat16', 'bfloat16', 'float32')
    """
    if not isinstance(precision, Mapping):
        if precision in NAMES:
            return NAMES[precision]
        raise ValueError(
            f"precision is {precision!r}, which does not exist.{_hint(precision, NAMES)}"
        )
    for role in precision:
        if role not in Roles._fields:
            hint = known_names(str(role), Roles._fields)
            raise ValueError(f"precision has no role {role!r}. {hint}")
    given = {role: precision.get(role) for role in Roles._fields[:3]}
    for role, dtype in given.items():
        if role in precision and dtype not in DTYPES:
            raise ValueError(
                f"precision has {dtype!r} as {role}, which is not supported.{_hint(dtype, DTYPES)}"
            )
    parameters = given["parameters"] or "float32"
    compute = given["compute"] or parameters
    reductions = given["reductions"] or compute
    if (reductions, compute) == ("bfloat16", "float32"):
        raise ValueError(
            "precision computes in float32, and gradients are added over devices at least in the "
            "dtype of compute. Set reductions to float32, or leave it out."
        )
    states = precision.get("states")
    if states is not None and (wrong := wrong_states(states)) is not None:
        raise ValueError(f"precision: {wrong}")
    return Roles(parameters, compute, reductions, _master(precision, parameters), states or None)


def _master(precision: Mapping[str, Any], parameters: str) -> str | None:
    if "master" not in precision:
        return None
    master = "none" if precision["master"] is None else precision["master"]
    if master not in ("float32", "none"):
        raise ValueError(
            f"precision has {master!r} as master, which is not supported. There is: float32, none."
        )
    if master == "float32" and parameters == "float32":
        raise ValueError(
            "precision has float32 as master, but its parameters are float32, which the optimizer "
            "updates themselves: a copy would have no effect. Set parameters to bfloat16, or "
            "remove master. (For a parameter that the model itself stores in another dtype, set "
            "low_precision of optim.optimizer to master.)"
        )
    return master


def _hint(given: Any, known: Iterable[str]) -> str:
    if given == "float16":
        return f"{_NO_FLOAT16} There is: {', '.join(known)}."
    return f" {known_names(str(given), known)}"


def in_roles(optimizer: optim.Optimizer, roles: Roles) -> optim.Optimizer:
    """Returns an optimizer with the master copies and the stored states of some roles."""
    low, states = optimizer.low_precision, optimizer.states
    contrary = {"float32": "stochastic", "none": "master"}.get(roles.master or "")
    if low == contrary:
        raise ValueError(
            f"precision has {roles.master} as master, and the optimizer has low_precision={low!r}, "
            f"which {'keeps float32 copies' if low == 'master' else 'rounds without a copy'}. "
            f"Remove one of them."
        )
    if roles.master == "float32":
        low = "master"
    if roles.states is not None:
        if states is not None and states != roles.states:
            raise ValueError(
                "precision has states, and so has the optimizer. Write all of them in one place."
            )
        states = roles.states
    return optimizer._replace(low_precision=low, states=states)


def in_precision(tree: Any, precision: str | Mapping[str, Any]) -> Any:
    """Casts floats to the dtype in which the model computes; other leaves stay as they are."""
    roles = roles_of(precision)
    if roles.compute == "bfloat16":
        return to_bfloat16(tree)
    # Parameters that the model itself stores in bfloat16 stay so where all others are in float32.
    return widen(tree) if roles.parameters == "bfloat16" else tree


def to_bfloat16(tree: Any) -> Any:
    """Casts the leaves of floating dtypes, and returns the others unchanged."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def summed_apart(roles: Roles, mesh: AbstractMesh, model_state: Any) -> int:
    """Returns into how many parts a batch is split, whose gradients are added in float32."""
    # It is 1 where the sums over devices have the dtype of the role anyway.
    count = batch_parts(mesh)
    if roles.reductions == roles.compute or count == 1:
        return 1
    if jax.tree.leaves(model_state):
        raise ComponentError(
            "precision",
            "precision has float32 as reductions and bfloat16 as compute. The gradients of each "
            "device are then computed apart, but this model has a state that its whole batch "
            "determines, such as BatchNorm's. Set reductions of precision to bfloat16, the dtype "
            "in which the model computes, or take one device.",
        )
    return count


def describe_precision(
    roles: Roles, optimizer: optim.Optimizer, state: Any, mesh: Mesh | AbstractMesh
) -> list[str]:
    """Returns lines about the dtype of each role, with bytes; none if all of them are float32."""
    # `state` is a `State` of shapes, dtypes and shardings; the bytes are those of all devices
    # together, but for gradients before their sum.
    bound = optimizer.bind(state.params)
    master = state.opt_state.master.values()
    if roles[:3] == NAMES["float32"][:3] and not master and optimizer.states is None:
        return []
    copies = _dtypes(master) if master else "none"
    if not master and any(x.dtype == jnp.bfloat16 for x in bound.trainable().values()):
        at_random = optimizer.low_precision == "stochastic"
        copies += f", updates are rounded {'at random' if at_random else 'to the nearest number'}"
    parts = batch_parts(mesh)
    over_devices = f", over {parts} devices {roles.reductions}" if parts > 1 else ""
    lines = [
        f"precision: parameters {_dtypes(jax.tree.leaves(state.params))}; compute {roles.compute}; "
        f"sums of gradients over microbatches float32{over_devices}; master {copies}"
    ]
    if roles.reductions != roles.compute and mesh.shape.get("fsdp", 1) > 1:
        size = sum(_before_sum(x) for x in bound.trainable().values())
        lines.append(
            f"gradients before their sum over {parts} devices: up to {size:,} bytes on each, whole "
            "along fsdp"
        )
    stored = bound.stored_leaves()
    for group, own in bound.template().groups.items():
        noisy = {leaf.index for leaf in stored[group] if leaf.stored == "bfloat16 stochastic"}
        by_name: dict[str, list[Any]] = {}
        for index, name, x in named_arrays(own, flatten(state.params)):
            by_name.setdefault(name + " (rounded at random)" * (index in noisy), []).append(x)
        if by_name:
            text = ", ".join(f"{name} {_dtypes(arrays)}" for name, arrays in by_name.items())
            lines.append(f"states of group {group!r}: {text}")
    return lines


def _before_sum(x: Any) -> int:
    """Returns the bytes of a gradient, float32, on a device; only "tensor" splits it."""
    kept = ["tensor" if "tensor" in (axes or ()) else None for axes in x.sharding.spec]
    return 4 * math.prod(NamedSharding(x.sharding.mesh, PartitionSpec(*kept)).shard_shape(x.shape))


def _dtypes(arrays: Iterable[Any]) -> str:
    """Returns "bfloat16 1,024 bytes", for several dtypes joined by "and"."""
    sizes: dict[str, int] = {}
    for x in arrays:
        sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.size * x.dtype.itemsize
    return " and ".join(f"{name} {size:,} bytes" for name, size in sizes.items())
