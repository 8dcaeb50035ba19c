"""The programs that `benchmarks.targets` compares: ours, and the same by hand.

No program is run on a target. The sides are first compared on a CPU, with small shapes.
"""

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import optim
from benchmarks import gpu, jax_gpt
from benchmarks.by_hand import make_step
from benchmarks.gpt_sides import make_program
from benchmarks.targets import Case
from benchmarks.workload import Workload, make_gpt_workload
from trainer.engine import mesh as meshes
from trainer.engine.collectives import executed_lines, find_traffic
from trainer.engine.flops import count_flops
from trainer.engine.memory import compiled_memory
from trainer.engine.program import Program


class Figures(NamedTuple):
    """What a compiler says of a step, for each device.

    Args:
        temporary: bytes besides state and batch.
        flops: floating-point operations, over all devices, by `flops.count_flops`.
        cycles: the sum of what a TPU's compiler estimates for each operation; None for GPUs.
        accessed: bytes that operations read and write together, on the chip or not, the body of a
            loop counted once; None for GPUs.
        kernels: how many fusions are executed.
        calls: how many calls of libraries and hand-written kernels are executed.
        exchanged: bytes of the results of collectives.
    """

    temporary: int
    flops: int
    cycles: int | None
    accessed: float | None
    kernels: int
    calls: int
    exchanged: int


def make_workload(case: Case, attention: str, small: bool) -> Workload:
    """Returns the model and the batch of a case; a GPT has the same attention on both sides."""
    if case.model == "vit":
        return gpu.make_vit_workload(small)
    shape = gpu.SMALL_GPT._replace(batch_size=8) if small else gpu.GPT
    return make_gpt_workload(shape, True, attention, attention)


def make_sides(
    case: Case, attention: str, small: bool = False, devices: Sequence[Any] | None = None
) -> tuple[Program, Any, Workload]:
    """Returns our program, the jitted step by hand and what both compute.

    Args:
        case: the case.
        attention: how a GPT computes attention: "plain", "xla" or "cudnn".
        small: whether the shapes are those that a CPU can run.
        devices: those of a target; None for those that jax finds.
    """
    workload = make_workload(case, attention, small)
    program = make_program(
        *(workload.model, workload.batch, case.optimizer, True, devices), **case.settings
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        # The ViT by hand is our model, which asks what computes it.
        with meshes.ambient(program.mesh, divided=False):
            return workload.loss(params, batch)

    if program.mesh.size > 1:  # each device has a part of the batch, as one would write it
        loss = jax.shard_map(
            lambda params, batch: jax.lax.pmean(workload.loss(params, batch), "data"),
            mesh=program.mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
    tx = jax_gpt.make_optimizer(case.optimizer, "bfloat16")
    _, places = arguments_by_hand(program, tx)
    step = make_step(
        loss,
        tx,
        case.settings.get("microbatches", 1),
        case.settings.get("on_nonfinite") == "skip",
        places if program.mesh.size > 1 else None,
    )
    return program, step, workload


def arguments_by_hand(program: Program, tx: optax.GradientTransformation) -> tuple[Any, Any]:
    """Returns the shapes of a step by hand, and where its results lie, as ours do.

    Args:
        program: ours, whose parameters and moments are divided in the same way.
        tx: the optimizer by hand.
    """
    whole = meshes.replicated(program.mesh)
    params = program.abstract_state().params
    by_shape = {x.shape: x.sharding for x in jax.tree.leaves(params)}
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_shape.get(x.shape, whole)),
        jax.eval_shape(tx.init, params),
    )
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    return (params, state), (*places, whole, whole)


def compile_sides(
    case: Case, attention: str, small: bool = False, devices: Sequence[Any] | None = None
) -> dict[str, Figures]:
    """Compiles both sides, and returns what the compiler says of them; see `make_sides`."""
    program, step, workload = make_sides(case, attention, small, devices)
    tx = jax_gpt.make_optimizer(case.optimizer, "bfloat16")
    given, _ = arguments_by_hand(program, tx)
    batch = program.feed.abstract_batch()
    batch = {name: batch[name] for name in workload.batch}
    sides = {
        "ours": program.trace(program.abstract_state()),
        "by hand": step.trace(*given, batch),
    }
    return {name: measure(side, program) for name, side in sides.items()}


def measure(traced: jax.stages.Traced, program: Program) -> Figures:
    """Compiles a step, and reads its figures."""
    compiled = traced.lower().compile()
    text = compiled.as_text() or ""
    try:
        costs = compiled.cost_analysis() or {}
    except jax.errors.JaxRuntimeError:  # a GPU's compiler does not tell without a GPU
        costs = {}
    memory = compiled_memory(compiled)
    assert memory is not None
    lines = list(executed_lines(text))
    estimated = [(re.search(r'"estimated_cycles":"(\d+)"', line), times) for line, times in lines]
    return Figures(
        memory.temporary,
        count_flops(traced.jaxpr),
        sum(int(found[1]) * times for found, times in estimated if found) or None,
        costs.get("bytes accessed"),
        sum(times for line, times in lines if " fusion(" in line),
        sum(times for line, times in lines if " custom-call(" in line),
        sum(each.size for each in find_traffic(text, program.mesh.shape)),
    )


def check_same(case: Case, steps: int = 3) -> None:
    """Asserts that both sides compute the same steps, by small shapes on this machine's CPU."""
    one = case._replace(settings={k: x for k, x in case.settings.items() if k != "mesh"})
    program, step, workload = make_sides(one, "xla", small=True)
    state = program.init()
    params = jax.tree.map(jnp.array, state.params)
    moments = jax_gpt.make_optimizer(case.optimizer, "bfloat16").init(params)
    for _ in range(steps):
        state, metrics = program.step(state, program.feed.to_devices(workload.batch))
        params, moments, loss, norm = step(params, moments, workload.batch)
        for name, value in (("train/loss", loss), ("grad_norm", norm)):
            np.testing.assert_allclose(float(metrics[name]), float(value), rtol=0.01)


def compile_kernels(devices: Sequence[Any], leaves: int = 200) -> dict[str, float]:
    """Returns the seconds in which an update of so many kernels is traced and compiled.

    Args:
        devices: those of a target, of which the first compiles.
        leaves: how many kernels, of four sizes.
    """
    place = jax.sharding.SingleDeviceSharding(devices[0])

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    shapes = {f"kernel_{i}": (128, 128 + 128 * (i % 4)) for i in range(leaves)}
    params = placed({name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()})
    seconds = {}
    for name, tx in {"optim.muon": optim.muon(1e-3), "optax.adamw": optax.adamw(1e-3)}.items():

        def update(grads: Any, state: Any, params: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = placed(jax.eval_shape(tx.init, params))
        began = time.perf_counter()
        jax.jit(update, donate_argnums=(1, 2)).lower(params, state, params).compile()
        seconds[name] = time.perf_counter() - began
    return seconds
