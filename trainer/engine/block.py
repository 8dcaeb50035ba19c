"""Chooses how many steps a run computes at once, and in which form; and computes them in a loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.engine import every
from trainer.engine.contracts import Batch
from trainer.engine.experiment import Experiment
from trainer.engine.flops import count_flops, has_convolution
from trainer.engine.mesh import is_simulated
from trainer.engine.step import State, StepMetrics

Step = Callable[[Any, Any], tuple[Any, StepMetrics]]
Loop = Callable[[Any, Any, Any], tuple[Any, StepMetrics]]
Block = tuple[State, Sequence[Batch]]  # what `Program.advance` takes
Computed = tuple[State, Sequence[StepMetrics]]  # what it returns

# Operations of a block: about a tenth of a second on two cores, and milliseconds on an accelerator.
# A signal, a save or a log line waits for the end of the block.
_CPU_OPERATIONS, _ACCELERATOR_OPERATIONS = 2**32, 2**40
_MOST_STEPS = 64  # beyond, the time of the host between two blocks no longer shows
MOST_BYTES = 2**26  # of the batches of a block, which are on the device together


class BlockRule(NamedTuple):
    """How a run advances: by at most `steps` steps at once, in a form."""

    # Both forms compute the same bits. "dispatch" calls the compiled step once for each step;
    # "device_loop" computes all steps in a loop inside of one program, without the host.

    steps: int
    form: Literal["dispatch", "device_loop"]
    why: str  # why this form was chosen, for the plan


def choose_block(experiment: Experiment, mesh: Mesh, jaxpr: Any, batch: Any) -> BlockRule:
    """Chooses the steps of a block from a step's operations and the kind of device."""
    # The number is a power of two, unless the experiment's `steps_per_call` sets another.
    steps, why = experiment.steps_per_call, "steps_per_call is 1"
    if steps is None:
        steps, why = _choose_steps(experiment, mesh, jaxpr, batch)
    if steps == 1:
        return BlockRule(1, "dispatch", why)
    if mesh.size > 1:
        return BlockRule(steps, "dispatch", "a sharded step has other bits inside a loop")
    if mesh.devices.flat[0].platform != "cpu":
        return BlockRule(steps, "dispatch", "equal bits inside a loop were tested on CPUs only")
    if has_convolution(jaxpr):
        # https://github.com/jax-ml/jax/issues/12868
        why = "inside a loop on a CPU, gradients of convolutions are slow and have other bits"
        return BlockRule(steps, "dispatch", why)
    return BlockRule(steps, "device_loop", "the step has the same bits inside a loop")


def _choose_steps(experiment: Experiment, mesh: Mesh, jaxpr: Any, batch: Any) -> tuple[int, str]:
    """Returns the steps of a block, and why they are not more."""
    if is_simulated(mesh):
        return 1, "simulated devices deadlock if many steps are in flight"
    operations = max(1, count_flops(jaxpr, elementwise=True) // mesh.size)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    size = max(1, sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values()))
    # A block ends where a log line, an evaluation or a save is due: a longer one is never filled.
    evaluated = every.shortest(experiment.eval_every)
    shortest = min(experiment.log_every, evaluated, experiment.save_every)
    due = 2 ** math.ceil(math.log2(shortest))
    most = _CPU_OPERATIONS if on_cpu else _ACCELERATOR_OPERATIONS
    limits = {
        f"a step has {operations:,} operations": most // operations,
        f"a batch has {size:,} bytes": MOST_BYTES // size,
        "a log line, an evaluation or a save is due after every step": due,
        "the host's time no longer shows": _MOST_STEPS,
    }
    why = min(limits, key=lambda name: limits[name])
    return 2 ** int(math.log2(max(1, limits[why]))), why


def most_in_a_loop(mesh: Mesh, jaxpr: Any) -> int:
    """Returns how many evaluations of a batch, each `jaxpr`, to compute in one loop; 1 for none."""
    # A power of two, at least 8: where few take as long as a block, the host's time does not show.
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu" or has_convolution(jaxpr):
        return 1
    operations = max(1, count_flops(jaxpr, elementwise=True))
    most = min(_MOST_STEPS, _CPU_OPERATIONS // operations)
    return 2 ** int(math.log2(most)) if most >= 8 else 1


def step_function(traced: jax.stages.Traced) -> Step:
    """Returns a traced step as a function that jax does not trace again."""
    results = jax.tree.structure(traced.out_info)

    def step(state: Any, batch: Any) -> Any:
        found = jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(results, found)

    return step


def loop_on_device(
    step: Step, state: Any, batches: Mapping[str, Any], count: Any
) -> tuple[Any, StepMetrics]:
    """Computes `count` consecutive steps in a loop, as a pure function."""
    # It ends after a step whose `StepMetrics.proceeds` is false. `batches` has arrays [steps,
    # batch, ...]; `count` is an int32 scalar that may be traced. The metrics are [steps]: those of
    # steps that were not computed are 0.

    def batch_at(index: Any) -> dict[str, Any]:
        at = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        return {name: at(x) for name, x in batches.items()}

    def body(carry: Any) -> Any:
        index, _, state, rows = carry
        state, metrics = step(state, batch_at(index))
        put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        rows = jax.tree.map(put, rows, metrics)
        return index + 1, metrics.proceeds > 0, state, rows

    size = next(iter(batches.values())).shape[0]
    row = jax.eval_shape(step, state, batch_at(0))[1]
    rows = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), row)
    # The number of steps is a value and not a shape, so that one program serves all lengths.
    start = (jnp.int32(0), jnp.array(True), state, rows)
    *_, state, rows = jax.lax.while_loop(lambda c: (c[0] < count) & c[1], body, start)
    return state, rows
