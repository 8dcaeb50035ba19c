"""Warns if rounding to bfloat16 or float16 cancels every update of a parameter group."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import optim
from optim.paths import flatten
from trainer.engine.contracts import Batch
from trainer.engine.program import Program
from trainer.engine.step import State

# A step, and group -> checksums, learning_rate, skipped.
_Measured = tuple[int, dict[str, dict[str, jax.Array]]]


class StuckParameters:
    """Compares the low-precision parameters of each group at the ends of the log intervals."""

    # The devices compute a checksum of their bits at the end of every whole log interval, only if
    # low_precision is "nearest" and there are trainable bfloat16 or float16 parameters. Each group
    # is reported once. An interval is ignored if one of its steps was skipped, or if the group's
    # learning rate is zero at its beginning or end.

    def __init__(self, program: Program, log: Callable[[str], None]):
        self._log, self._experiment = log, program.experiment
        self._groups: dict[str, str] | None = None  # group that is compared -> its dtypes
        self._measure = jax.jit(lambda state: _measure(program.experiment.optimizer, state))
        self._wait = program.simulated  # this program must not be in flight with the steps there
        self._before: _Measured | None = None
        self._newest: _Measured | None = None

    def begin(self, step: int, state: State) -> None:
        """Takes the checksums of the state that the run starts from, or goes back to."""
        if self._groups is None:  # those whose updates are rounded to nearest
            optimizer = self._experiment.optimizer
            nearest = optimizer.low_precision == "nearest"
            self._groups = {
                group: " or ".join(sorted({x.dtype.name for x in own.values()}))
                for group, own in _low_precision(optimizer, state.params).items()
                if nearest
            }
        self._before = self._newest = None
        self.observe(step, (), state)

    def observe(self, step: int, batches: Sequence[Batch], state: State) -> None:
        """Compares the checksums at the end of a log interval with those of the one before."""
        # `state` is the one after `step` updates; it is not donated.
        if not self._groups or step % self._experiment.log_every:
            return
        self._compare()
        self._before, self._newest = self._newest, (step, self._measure(state))
        if self._wait:
            jax.block_until_ready(self._newest)
        if step + self._experiment.log_every > self._experiment.steps:
            self._compare()  # there is no later call

    def _compare(self) -> None:
        """Compares the last two sets of checksums, which the devices have long computed."""
        if self._before is None or self._newest is None or self._groups is None:
            return
        (start, old), (end, new) = jax.device_get((self._before, self._newest))
        for group in sorted(self._groups):
            first, last = old[group], new[group]
            idle = not (first["learning_rate"] and last["learning_rate"])
            if idle or first["skipped"] != last["skipped"]:
                continue
            if (first["checksums"] == last["checksums"]).all():
                dtypes = self._groups.pop(group)
                self._log(
                    f"warning: from step {start} to {end} no {dtypes}"
                    f" parameter of group {group!r} moved. Either its gradients are zero, or each"
                    f" update is too small to change a {dtypes} number: low_precision='master' in"
                    " optim.optimizer keeps float32 copies, which take small updates."
                )


def _low_precision(optimizer: optim.Optimizer, params: Any) -> dict[str, dict[str, jax.Array]]:
    """Lists the trainable parameters of fewer than 32 bits: group -> path -> parameter."""
    labels, groups = flatten(optimizer.label(params)), {}
    for path, x in optimizer.trainable(params).items():
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
            groups.setdefault(labels[path], {})[path] = x
    return groups


def _measure(optimizer: optim.Optimizer, state: State) -> dict[str, dict[str, jax.Array]]:
    now = optimizer.hyperparameters(optimizer.position(state.opt_state))
    return {
        group: {
            "checksums": jnp.stack([_checksum(x) for x in own.values()]),  # uint32 [parameters]
            # An optimizer without a learning rate is expected to move its parameters.
            "learning_rate": jnp.asarray(now[group].get("learning_rate", 1.0)),
            "skipped": optimizer.skipped(state.opt_state),
        }
        for group, own in _low_precision(optimizer, state.params).items()
    }


def _checksum(x: jax.Array) -> jax.Array:
    """Hashes the bits of an array to a uint32, so that a change of one element always shows."""
    # Each element is multiplied by another odd weight. In a plain sum, an element whose bits rise
    # and one whose bits fall by the same amount would cancel.
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    weights = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        weights = weights * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    # The factor is even (2**32 divided by the golden ratio, rounded), so that every weight is odd
    # and a multiplication by it loses no bit.
    return jnp.sum(bits * (weights * jnp.uint32(0x9E3779B2) + 1), dtype=jnp.uint32)
