"""Law 7 for the whole table, in one process with four simulated devices.

`python -m tests.laws_sharded` prints one line of JSON a row: {"row": name, "jit": "", ...}, an
empty string where the law holds; `python -m tests.laws_sharded 'optim.muon-jit'` some of it.
test_laws_sharded.py runs it once and makes tests of the lines.
"""

import json
import os

from tests import compiled_programs

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = compiled_programs.xla_flags(devices=4)

import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optim.paths import flatten, path_name
from tests.laws_harness import (
    compilations_of,
    make_optimizer,
    numbers,
    observed,
    split_close,
    step,
    to_host,
    tree_to_split,
)
from tests.laws_table import ROWS, Row, case_name
from tests.runs import is_asked

STEPS = 3


def shard(mesh: Mesh, params: Any) -> Any:
    """Splits the first axis of every parameter."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec("data") if x.ndim else PartitionSpec()), params
    )


def shard_state(mesh: Mesh, state: Any, params: Any) -> Any:
    """Gives each leaf of a state the sharding of the parameter whose path ends its own."""
    spread, shapes = flatten(shard(mesh, params)), flatten(params)

    def place(path: Any, x: Any) -> NamedSharding:
        parts = path_name(path).split("/")
        for tail in ("/".join(parts[i:]) for i in range(len(parts))):
            if tail in shapes and shapes[tail].shape == x.shape:
                return spread[tail]
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, state)


def run(row: Row, mesh: Mesh, ways: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Runs a row unsharded, and in some of the ways of `WAYS`."""
    optimizer, start = make_optimizer(row), tree_to_split(row, rows=4, columns=3)
    state = to_host(optimizer.init(start))
    host = to_host(start)

    def laws_step(carry: Any) -> Any:
        return step(optimizer, row, *carry)

    alone, carry = jax.jit(laws_step), (host, state)
    for _ in range(STEPS):
        carry = to_host(alone(carry))
    found: dict[str, Any] = {"row": row.name, "refused": False}
    for name, check in ways.items():
        try:
            refused = check(row, optimizer, laws_step, mesh, (host, state), carry)
            found[name] = ""
            found["refused"] |= bool(refused)
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
    return found


def _jit(row: Row, optimizer: Any, laws_step: Any, mesh: Mesh, start: Any, wanted: Any) -> None:
    params, state = start
    spread = shard(mesh, params), shard_state(mesh, state, params)
    own = [x for x in jax.tree.leaves(spread[1]) if x.spec == PartitionSpec("data")]
    like_params = {tuple(x.shape) for x in jax.tree.leaves(params["own"]) if x.ndim}
    shaped = [x for x in jax.tree.leaves(start[1].groups) if tuple(x.shape) in like_params]
    if shaped and not own:
        raise AssertionError("State is shaped like a parameter, and not sharded like it.")
    carry = jax.device_put(jax.tree.map(jnp.copy, start), spread)
    sharded = jax.jit(laws_step, donate_argnums=0, out_shardings=spread)
    with compilations_of("laws_step") as compiled:
        for _ in range(STEPS):
            carry = jax.block_until_ready(sharded(carry))  # bounds the steps in flight
    if len(compiled) != 1:
        raise AssertionError(f"{len(compiled)} compilations.")
    _compare(row, carry, wanted)


def _shard_map(
    row: Row, optimizer: Any, laws_step: Any, mesh: Mesh, start: Any, wanted: Any
) -> None:
    whole = PartitionSpec()
    mapped = jax.jit(
        jax.shard_map(laws_step, mesh=mesh, in_specs=(whole,), out_specs=whole),
    )
    carry = jax.device_put(start, NamedSharding(mesh, whole))
    for _ in range(STEPS):
        carry = jax.block_until_ready(mapped(carry))
    _compare(row, carry, wanted)


def _parts(row: Row, optimizer: Any, laws_step: Any, mesh: Mesh, start: Any, wanted: Any) -> bool:
    """On parts of parameters: the unsharded answer, or a refusal. Gradients are given.

    Returns:
        Whether it was refused.
    """
    params, state = start
    grads = jax.tree.map(lambda x: np.sin(3 * np.asarray(x)), params)
    if row.per_example:
        grads["own"] = jax.tree.map(lambda g: np.stack([g, g]), grads["own"])

    def update(params: Any, state: Any, grads: Any) -> Any:
        value = jnp.float32(1.0)
        nothing = dict(value_fn=_constant, obj_fn=_constant, grad_fn=lambda p, _: p)
        nothing["observations"] = observed(params["own"])
        return optimizer.update(grads, state, params, value=value, **nothing)

    specs = jax.tree.map(lambda s: s.spec, shard(mesh, params))
    state_specs = jax.tree.map(lambda s: s.spec, shard_state(mesh, state, params))
    grad_specs = specs
    if row.per_example:
        middle = jax.tree.map(lambda x: PartitionSpec(None, *x), specs["own"])
        grad_specs = {**specs, "own": middle}
    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(specs, state_specs, grad_specs), out_specs=(specs, state_specs)
    )
    try:
        found = jax.jit(mapped)(params, state, grads)
    except ValueError as refusal:
        if "nside shard_map" in str(refusal):
            return True
        raise
    _compare(row, found, jax.jit(update)(params, state, grads))
    return False


def _constant(params: Any) -> Any:
    return sum(jnp.sum(jnp.real(x)) * 0 for x in jax.tree.leaves(params)) + jnp.float32(1)


def _compare(row: Row, found: Any, wanted: Any) -> None:
    jax.tree.map(split_close(row), numbers(to_host(found[0])), numbers(to_host(wanted[0])))


# Under jit with named shardings, in shard_map, and in shard_map on parts of parameters.
WAYS = {"jit": _jit, "shard_map": _shard_map, "parts": _parts}


def main() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    for row in ROWS:
        asked = {how: check for how, check in WAYS.items() if is_asked(case_name(row, how))}
        if asked:
            print(json.dumps(run(row, mesh, asked)), flush=True)


if __name__ == "__main__":
    main()
