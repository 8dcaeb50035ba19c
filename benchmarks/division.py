"""Counts what each of several devices computes and receives in a step of a matrix optimizer.

    python -m benchmarks.division [--width=192] [--only=muon]

Compiles an update of the kernels of a transformer for eight simulated devices, which have the same
program as eight real ones, and reads two numbers from the compiled program. The first is the work
of one device, divided by an eighth of the work of a single device without division. For Muon and
Scion it counts the matrix products, by XLA's cost analysis; for SOAP and Shampoo the
decompositions, m ** 3 for a matrix of m x m, which that analysis omits. The second is the number of
bytes that a device receives in the collectives. "replicated" is the same update without the ambient
mesh that `optim.division` needs.

The last rows are of the kernels of models.gpt, split by the model's defaults over fsdp and tensor:
queries, keys and values by rows and columns, and the matrices after attention, which have the same
shape, by columns and rows. "not told" is without `optim.division.split_as`, by which a run tells
the optimizer so.

XLA counts both branches of a condition; where the number of matrices does not divide by that of the
devices, "dealt" is the costliest share over the mean, without the slots that stay empty.
"""

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

# Before jax is imported and looks for devices: neither is read again.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.division import assign_to_devices, square_cost
from optim.newton_schulz import flops
from trainer import models
from trainer.engine import mesh as meshes
from trainer.engine import sharding
from trainer.engine.collectives import find_collectives

DEVICES = 8
TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = ({"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4})
RECIPES: dict[str, Callable[..., Any]] = {
    "muon": partial(optim.muon, 0.02),
    "scion": partial(optim.scion, 0.01),
    "soap": partial(optim.soap, 3e-3, precondition_frequency=1),
    "shampoo": partial(optim.shampoo, 1e-3, every=1),
}
TARGET = 1.05

_GPT = models.gpt(vocab_size=2, width=8, depth=1, num_heads=2)  # for its defaults of `sharding`

_DECOMPOSITIONS = r"syevd|geqrf"


class Measured(NamedTuple):
    """What one device computes and receives in a compiled update.

    Attributes:
        work: the work of one of eight devices, over an eighth of the work of a single device.
        received: megabytes of the results of collectives, by the name of the collective.
    """

    work: float
    received: dict[str, float]


def kernels(layers: int, width: int, stacked: bool, seed: int = 0) -> dict[str, Any]:
    """Draws the kernels of a transformer: query, key and value, out, and two of the perceptron.

    Args:
        layers: the number of layers.
        width: the size of a token.
        stacked: whether the layers are one array with a leading axis, or each has its own arrays.
        seed: the seed of the numbers.
    """
    draw = np.random.default_rng(seed)

    def block(*lead: int) -> dict[str, Any]:
        shapes = {
            "qkv": (3, width, width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        return {
            name: jnp.asarray(draw.normal(size=(*lead, *shape)), jnp.float32)
            for name, shape in shapes.items()
        }

    return {"blocks": block(layers)} if stacked else {f"block_{i}": block() for i in range(layers)}


def gpt_kernels(layers: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Draws the stacked kernels of the layers of models.gpt; the arguments are as in `kernels`."""
    names = {"qkv": "attn/qkv", "out": "attn/out", "up": "mlp/up", "down": "mlp/down"}
    drawn = kernels(layers, width, stacked=True, seed=seed)["blocks"]
    return {f"blocks/{names[name]}/kernel": x for name, x in drawn.items()}


def compile_update(
    recipe: Callable[..., Any],
    params: optax.Params,
    axes: dict[str, int],
    divided: bool,
    told: bool = True,
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Compiles an update of sharded parameters, as in a run.

    Args:
        recipe: a function without arguments that returns an optax transformation.
        params: a pytree of arrays.
        axes: the names and sizes of the mesh's axes.
        divided: whether the mesh is set while the update is traced, which `optim.division` needs.
        told: whether the optimizer is then told how the parameters are split.

    Returns:
        The compiled update, and its arguments: gradients, state and parameters.
    """
    tx = recipe()
    mesh = meshes.make_mesh(axes)
    rules = sharding.ShardingRules(mesh, model=_GPT)
    spread = sharding.state_shardings(rules, params, params)
    state = tx.init(params)
    spread_state = sharding.state_shardings(rules, state, params)
    params, state = jax.device_put((params, state), (spread, spread_state))
    update = jax.jit(tx.update, out_shardings=(spread, spread_state))
    arguments = (params, state, params)
    if not divided:
        return update.lower(*arguments).compile(), arguments
    with meshes.ambient(mesh, rules.axes_of(params) if told else None):
        return update.lower(*arguments).compile(), arguments


def work_of(compiled: Any) -> tuple[float, float]:
    """Reads the work from a compiled program.

    Args:
        compiled: the program.

    Returns:
        The number of operations of its matrix products; and the sum of m ** 3 over the matrices of
        m x m that it decomposes.
    """
    text, decomposed, repeats = compiled.as_text(), 0.0, 1
    # A loop over the matrices of a batch: its body is a computation of its own.
    loop = r'body=%([\w.-]+).*"known_trip_count":{"n":"(\d+)"}'
    trips = {body: int(n) for body, n in re.findall(loop, text)}
    called = rf'= \(?f32\[([\d,]+)\].*custom_call_target="\w*(?:{_DECOMPOSITIONS})'
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            repeats = trips.get(header[1], 1)
        # f32[..., m, m]: leading axes are a batch of matrices.
        elif found := re.search(called, line):
            *lead, _, size = (int(n) for n in found[1].split(","))
            decomposed += repeats * float(np.prod(lead)) * size**3
    return compiled.cost_analysis()["flops"], decomposed


def received_by(compiled: Any) -> dict[str, float]:
    """Reads the traffic from a compiled program.

    Args:
        compiled: the program.

    Returns:
        Megabytes of the results of its collectives, by the name of the collective.
    """
    sums: dict[str, float] = {}
    for each in find_collectives(compiled.as_text()):
        sums[each.kind] = sums.get(each.kind, 0.0) + each.times * each.size / 1e6
    return sums


def measure(
    name: str, params: optax.Params, axes: dict[str, int], divided: bool, told: bool = True
) -> Measured:
    """Compiles an update for eight devices and for one, and compares the two programs.

    Args:
        name: a key of RECIPES.
        params: a pytree of arrays.
        axes: the names and sizes of the mesh's axes.
        divided: whether the eight devices divide the matrices among them.
        told: as in `compile_update`.
    """
    at = 0 if name in ("muon", "scion") else 1
    several, _ = compile_update(RECIPES[name], params, axes, divided, told)
    alone, _ = compile_update(RECIPES[name], params, {"data": 1}, divided=False)
    ideal = work_of(alone)[at] / DEVICES
    return Measured(work_of(several)[at] / ideal, received_by(several))


def dealt(name: str, layers: int, width: int) -> float:
    """Computes the cost of the largest share of the matrices over the mean share.

    Args:
        name: a key of RECIPES.
        layers: the number of layers.
        width: the size of a token.
    """
    if name in ("muon", "scion"):
        # A layer has four matrices [width, width], three of them in qkv, and two [width, 4 width].
        numbers = [4 * layers, 2 * layers]
        costs = [flops(width, width, 5, 4), flops(width, 4 * width, 5, 4)]
    else:
        # Each matrix has two sides: up and down have one of width and one of 4 width.
        numbers = [4 * 2 * layers + 2 * layers, 2 * layers]
        costs = [square_cost((width, width)), square_cost((4 * width, 4 * width))]
    shares = assign_to_devices(numbers, costs, DEVICES)
    loads = sum(cost * share for cost, share in zip(costs, shares, strict=True))
    return float(np.max(loads) / np.mean(loads))


def main() -> None:
    """Prints the work and the traffic of each optimizer, replicated and divided, on each mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, help="of the model: 192, or 32 for decompositions")
    parser.add_argument("--only", choices=RECIPES, help="one optimizer")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else RECIPES:
        width = arguments.width or (192 if name in ("muon", "scion") else 32)
        for layers, stacked in ((12, True), (12, False), (6, False)):
            params = kernels(layers, width, stacked)
            megabytes = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
            print(
                f"{name}, {layers} {'stacked' if stacked else 'separate'} layers of width {width},"
                f" {megabytes:.1f} MB of parameters; dealt {dealt(name, layers, width):.2f}"
                f" (target {TARGET})"
            )
            for axes in MESHES:
                for divided in (False, True):
                    found = measure(name, params, axes, divided)
                    say("divided" if divided else "replicated", axes, found)
        if name in ("muon", "scion"):
            for layers in (8, 12):
                params = gpt_kernels(layers, width)
                megabytes = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
                print(f"{name}, {layers} layers of models.gpt, {megabytes:.1f} MB of parameters")
                for told in (False, True):
                    found = measure(name, params, TENSOR, divided=True, told=told)
                    say("told" if told else "not told", TENSOR, found)


def say(how: str, axes: dict[str, int], found: Measured) -> None:
    """Prints a line about one compiled update."""
    told = ", ".join(f"{k} {mb:.1f} MB" for k, mb in found.received.items())
    print(
        f"  {how:10} over {' x '.join(f'{k} {n}' for k, n in axes.items()):15} work"
        f" {found.work:.2f}; {told or 'no collectives'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
