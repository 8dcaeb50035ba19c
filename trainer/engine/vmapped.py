"""Computes a block of steps of several trials at once, by vmap.

The bits of a trial then depend on the width, and not on its position or on the other trials; they
are not those of the trial alone. `difference` measures by how much they differ.
"""

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.engine.block import Block, Computed
from trainer.engine.program import Program
from trainer.engine.step import State, StepMetrics

# A call of a LAPACK kernel in StableHLO, with the shape of its first operand.
_LAPACK = re.compile(r"custom_call @lapack_(\w+)_ffi\(.*?: \(tensor<((?:\d+x)+)")


class Vmapped:
    """The block of a program for `width` trials at once, on one device."""

    # If there are fewer trials, the other places compute a trial of their own that nobody reads.

    def __init__(self, program: Program, width: int):
        self._program, self._width = program, width
        self._steps = program.block_rule.steps
        self._idle: list[State] = []
        loop = program.loop(program.abstract_state())

        def advance(states: tuple[State, ...], batches: Any, count: Any) -> Any:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            results = jax.vmap(loop, in_axes=(0, 0, None))(stacked, batches, count)
            return tuple(jax.tree.map(operator.itemgetter(i), results) for i in range(width))

        self._advance = jax.jit(advance, donate_argnums=0)

    def advance(self, blocks: Sequence[Block]) -> list[Computed]:
        """Computes the same steps of every trial, asynchronously; donates the buffers of states."""
        # `blocks` has at most `width` trials, each with its state and the same number of batches.
        states = [state for state, _ in blocks]
        while len(states) + len(self._idle) < self._width:
            self._idle.append(self._program.init())
        idle = self._width - len(states)
        feed, steps = self._program.feed, self._steps
        stacked = [feed.stack(batches, steps) for _, batches in blocks]
        stacked += stacked[:1] * idle
        batches = {name: np.stack([each[name] for each in stacked]) for name in stacked[0]}
        found = self._advance((*states, *self._idle[:idle]), batches, np.int32(len(blocks[0][1])))
        self._idle[:idle] = [state for state, _ in found[len(states) :]]
        return [(state, [metrics]) for state, metrics in found[: len(states)]]

    def difference(self) -> float:
        """Computes the largest relative difference of a loss from that of the program alone."""
        # It compares the first block of steps, for the experiment of the program.
        batches = self._program.feed.batches(0)
        block = [next(batches) for _ in range(self._steps)]
        _, alone = self._program.advance(self._program.init(), block)
        ((_, beside),) = self.advance([(self._program.init(), block)])
        losses = [
            np.asarray(StepMetrics.stack_on_host(each)["train/loss"], np.float64)
            for each in (alone, beside)
        ]
        return float(np.max(np.abs(losses[1] - losses[0]) / np.abs(losses[0])))


def batched_kernels(program: Program) -> list[str]:
    """Finds LAPACK kernels, such as "sgeqrf", that would get matrices of several trials at once."""
    # On a CPU, jaxlib's kernels distribute a batch to the threads that compute the program, and
    # wait for them: several kernels at once can wait for ever (see `optim.matrices`). Other devices
    # have kernels of their own, and none is listed.
    if program.mesh.devices.flat[0].platform != "cpu":
        return []
    state = program.abstract_state()
    batches = program.feed.abstract_batch(program.block_rule.steps)
    two = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), (state, batches))
    vmapped = jax.vmap(program.loop(state), in_axes=(0, 0, None))
    text = jax.jit(vmapped).lower(*two, jax.ShapeDtypeStruct((), np.int32)).as_text()
    shapes = [(name, shape.rstrip("x").split("x")) for name, shape in _LAPACK.findall(text)]
    return sorted({name for name, shape in shapes if math.prod(map(int, shape[:-2])) > 1})
