"""What the trials of a program need: memory side by side, and time."""

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from trainer.engine import memory
from trainer.engine.loading import load_located
from trainer.sweep.programs import ProgramGroup

_SHARE = 0.5  # of the memory that the states of a wave may take
_BLOCKS = 3  # that are timed


def most_side_by_side(state_bytes: int, workers: int) -> int:
    """Returns how many trials fit into memory side by side, at least 1.

    Args:
        state_bytes: bytes of the state of a trial.
        workers: how many workers share the memory of a host; each has a GPU of its own.
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    limit = memory.of_host() if on_cpu else memory.of_device(device)
    if limit is None:
        return 2**31
    # A host also has a copy of every state while it saves them.
    share = _SHARE / (2 * workers if on_cpu else 1)
    return max(1, int(limit * share / max(1, state_bytes)))


class Needs(NamedTuple):
    """What a program needs on this machine.

    Attributes:
        step_seconds: seconds of a step, without evaluations.
        temporary_bytes: memory of a step besides its state; None if the compiler does not tell.
    """

    step_seconds: float
    temporary_bytes: int | None


def measure(group: ProgramGroup, vocabulary: Sequence[str] = ()) -> Needs:
    """Compiles a program and times a few of its steps.

    Args:
        group: the trials of the program.
        vocabulary: further packages whose public functions the configs may name.
    """
    program = load_located(group.trials[0].config, vocabulary)
    state = program.init()
    program.compile(state)
    steps = program.block_rule.steps
    batches = program.feed.batches(0)
    seconds = []
    for _ in range(_BLOCKS + 1):
        block = list(itertools.islice(batches, steps))
        start = time.perf_counter()
        state, _ = program.advance(state, block)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / steps)
    analysis = program.compiled.memory_analysis()
    return Needs(min(seconds[1:]), analysis and analysis.temp_size_in_bytes)
