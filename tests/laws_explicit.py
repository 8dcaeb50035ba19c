"""Laws 4 and 7 together for the whole table, in one process with eight simulated devices.

Every float of a row is on a schedule or an input of the step, on meshes with explicit axes, in
jitted and, for the rows of `EAGER`, in eager updates; laws_sharded.py has automatic axes.
`python -m tests.laws_explicit` prints one line of JSON a row: {"row": name, "4x2, jit": "", ...},
an empty string where the laws hold; `python -m tests.laws_explicit 'optim.muon-8, jit'` some of it.
test_explicit_axes.py runs it once, and makes tests of them.
"""

import json
import os

from tests import compiled_programs

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = compiled_programs.xla_flags(devices=8)

import itertools
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optim
from tests.laws_harness import (
    NEIGHBOUR,
    Reference,
    compilations_of,
    drift,
    grad_fn,
    gradients,
    loss,
    observed,
    rate,
    split_close,
    to_host,
    tree_to_split,
    with_floats,
    wrappers,
)
from tests.laws_table import EAGER, ROWS, Row, case_name
from tests.runs import is_asked

# Otherwise the operations of an eager update are in flight together, and deadlock on few cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)

STEPS = {"jit": 3, "eager": 2}
MESHES = {"8": {"data": 8}, "4x2": {"data": 4, "model": 2}}
# Eager updates take most of the time, because they compile every operation.
COLUMNS = [("8", "jit"), ("4x2", "jit"), ("4x2", "eager")]


def with_rates(recipe: partial, fixed: tuple[str, ...], step: Any, parity: int) -> partial:
    """Makes every other float of a recipe an array, and the rest schedules that hold an array.

    Args:
        recipe: the recipe, with numbers.
        fixed: floats that stay numbers.
        step: the step; the arrays are computed from it, and traced where it is.
        parity: 0 or 1, which half of the floats is on schedules.

    Returns:
        A recipe whose floats have the values of `rate` and `drift` at the step.
    """
    number = itertools.count(parity)

    def change(name: str, x: float) -> Any:
        if name in fixed:
            return x
        factor = rate if name == "learning_rate" else drift
        held = jnp.asarray(x) + 0 * step
        return held * factor(step) if next(number) % 2 else lambda t: held * factor(t)

    return with_floats(recipe, change, call=False)


def optimizer_of(row: Row, step: Any, parity: int) -> optim.Optimizer:
    """Puts the row in the first of three groups."""
    return optim.optimizer(
        {
            "own": optim.group("own/.*", with_rates(row.recipe, row.fixed, step, parity)),
            "frozen": optim.group("frozen/.*", partial(optim.frozen)),
            "other": optim.group(".*", with_rates(NEIGHBOUR, (), step, parity)),
        },
        **wrappers(row, lambda _, x: lambda t: (jnp.asarray(x) + 0 * step) * drift(t)),
    )


def laws_step(row: Row, parity: int, params: Any, state: Any, step: Any, batch: Any) -> Any:
    """Updates the parameters once; the functions of the loss hold an array that is sharded."""
    value, grads = gradients(params, row.per_example)
    functions = {
        "value_fn": lambda p: loss(p) * jnp.mean(batch),
        "obj_fn": lambda p: loss(p) * jnp.mean(batch),
        "grad_fn": lambda p, i: jax.tree.map(lambda g: g * jnp.mean(batch), grad_fn(p, i)),
    }
    functions["observations"] = observed(params["own"])
    return optimizer_of(row, step, parity).update(grads, state, params, value=value, **functions)


def trajectory(row: Row, mesh: Mesh, start: Any, how: str, parity: int) -> list[Any]:
    """Returns the parameters before and after every step, and checks shardings and compilations."""
    jitted = how == "jit"
    whole = NamedSharding(mesh, PartitionSpec())

    def split(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*mesh.axis_names[: x.ndim]))

    # partial has no name, by which the compilations are counted.
    def laws_update(*arguments: Any) -> Any:
        return laws_step(row, parity, *arguments)

    batch = np.ones(8, "float32")  # whose mean is exactly 1
    params, batch = jax.device_put((start, batch), jax.tree.map(split, (start, batch)))
    init: Callable[..., Any] = optimizer_of(row, 0, parity).init
    state = (jax.jit(init) if jitted else init)(params)
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    update: Callable[..., Any] = laws_update
    if jitted:  # without out_shardings: the types alone must keep the shardings
        update = jax.jit(update, donate_argnums=(0, 1))
    visited = [start]
    with compilations_of("laws_update") as compiled:
        for t in range(STEPS[how]):
            carry = update(params, state, jax.device_put(np.int32(t), whole), batch)
            params, state = jax.block_until_ready(carry)  # bounds the steps in flight
            visited.append(to_host(params))
    if len(compiled) != jitted:
        raise AssertionError(f"{len(compiled)} compilations of the step.")
    for x, before in zip(jax.tree.leaves((params, state)), jax.tree.leaves(places), strict=True):
        if not before.is_equivalent_to(x.sharding, x.ndim):
            raise AssertionError(f"A sharding changed from {before} to {x.sharding}.")
    return visited


def run(row: Row, name: str, how: str) -> None:
    """Raises an error unless a row on a mesh does what plain optax does on one device."""
    axes = MESHES[name]
    # The halves of the floats change places from one mesh to the next.
    parity = list(MESHES).index(name) % 2
    kinds = (AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    start = to_host(tree_to_split(row, rows=8, columns=4))
    with jax.set_mesh(mesh):
        visited = trajectory(row, mesh, start, how, parity)
    reference, close = Reference(row, start), split_close(row)
    for t, (before, after) in enumerate(itertools.pairwise(visited)):
        wanted = to_host(reference.step(before, t))
        for part in ("own", "other"):
            jax.tree.map(close, after[part], wanted[part])
        jax.tree.map(np.testing.assert_array_equal, after["frozen"], start["frozen"])


def main() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
    for row in ROWS:
        found = {}
        for mesh, how in COLUMNS:
            asked = is_asked(case_name(row, f"{mesh}, {how}"))
            if not asked or (how == "eager" and row not in EAGER):
                continue
            try:
                run(row, mesh, how)
                found[f"{mesh}, {how}"] = ""
            except Exception:
                found[f"{mesh}, {how}"] = traceback.format_exc()[-1500:]
        if found:
            print(json.dumps({"row": row.name, **found}), flush=True)


if __name__ == "__main__":
    main()
