"""The last steps of a run before a checkpoint, which the optimizer of another run follows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.paths import flatten
from trainer import checkpoint
from trainer import config as configs
from trainer.checkpoint import CheckpointError
from trainer.config import Config, ConfigError
from trainer.engine.loading import load_located
from trainer.engine.mesh import ambient
from trainer.engine.plan import with_place
from trainer.engine.program import Program
from trainer.engine.step import State, shadow_step
from trainer.train.restoring import restore_of, to_save
from trainer.train.rollback import counters_of
from trainer.train.warm_start import with_counts


class SharedPath:
    """The last `count` steps of the run in a folder before the checkpoint of a step."""

    # The run's own program computes them again, from the newest checkpoint before them, and their
    # last state must have the bits of the checkpoint, whose leaves are `arrays`. `vocabulary` are
    # packages that the run's config may name. Raises CheckpointError, which also says if there is
    # no checkpoint to begin with, or the run cannot be computed again.

    def __init__(
        self,
        folder: Path,
        step: int,
        count: int,
        arrays: Mapping[str, np.ndarray],
        vocabulary: Sequence[str] = (),
    ):
        self._folder, self._step, self._first, self._arrays = folder, step, step - count, arrays
        try:
            config = configs.load([folder / "config.yaml"])
            self._program = load_located(config, vocabulary, steps_per_call=1)
        except ConfigError as error:
            text = f"The run in {folder} cannot be computed again: {error}"
            raise CheckpointError(text) from error
        self._from = self._step_before(count)
        self._skipped = int(arrays.get("run_state/rollback", np.zeros(4, np.int32))[1])
        self._advance: Any = None
        self._start: State | None = None  # the state before the first of the steps
        self._verified = False
        self._found: dict[bytes, Any] = {}  # hyperparameters -> the state of the optimizer

    def _step_before(self, count: int) -> int:
        """Returns the step of the newest state before the steps; raises CheckpointError."""
        steps = [info.step for info in checkpoint.ls(self._folder)]
        early = [step for step in steps if step <= self._first]
        if early:
            return max(early)
        whole = self._program.experiment.warm_start is None
        if self._first == 0 and whole:
            return 0  # the initial state, which can be computed
        if self._first < 0:
            raise CheckpointError(
                f"follow is {count:,}, and the run in {self._folder} has {self._step:,} gradients"
                f" before step {self._step:,}."
            )
        fewer = [f"{self._step - step:,}" for step in steps if step < self._step][:1]
        fewer += [f"{self._step:,}, all of them"] if whole else []
        most = f" follow can be at most {fewer[0]}" if fewer else ""
        most += f", or {fewer[1]}" if len(fewer) > 1 else ""
        raise CheckpointError(
            f"To follow {count:,} gradients before step {self._step:,} takes a checkpoint of step"
            f" {self._first:,} or earlier, and {self._folder} has those of"
            f" {', '.join(map(str, steps))}.{most}{'.' if most else ''} A run keeps more with a"
            " larger keep_latest."
        )

    def check(self, program: Program, config: Config | None) -> None:
        """Raises ConfigError if the optimizer of a program cannot follow another run."""
        opt_state = program.abstract_state().opt_state
        shardings = jax.tree.map(lambda x: x.sharding, opt_state)
        step = jax.jit(partial(self._step_of, program), donate_argnums=1, out_shardings=shardings)
        run, inputs = self._program, program.inputs.pack()
        batch = run.feed.abstract_batch()
        try:
            self._traced = step.trace(run.abstract_state(), opt_state, inputs, batch)
        except optim.GroupError as error:
            raise with_place(error, config) from error

    def _step_of(
        self, program: Program, state: State, opt_state: Any, hyperparams: Any, batch: Any
    ) -> Any:
        """Returns the state of the program's optimizer after a step of the run."""
        run = self._program
        experiment = run.inputs.insert(run.experiment, state.hyperparams)
        other = program.inputs.insert(program.experiment, hyperparams).optimizer
        with ambient(run.mesh, run.sharding.axes_of(state.params)):
            return shadow_step(experiment, other, state, opt_state, batch).opt_state

    def follow(self, program: Program, init: Callable[[Any, Any], Any]) -> Any:
        """Computes the state of the optimizer of a program after the steps."""
        # `init` computes a new one from parameters and hyperparameters. `program` may differ from
        # the one of `check` in its floats. Raises CheckpointError if the run has other bits now.
        hyperparams = program.inputs.pack()
        key = np.asarray(hyperparams).tobytes()
        if key not in self._found:
            self._found[key] = self._followed(hyperparams, init)
        # A copy: the first step takes the state as donated buffers.
        return jax.tree.map(jnp.copy, self._found[key])

    def _followed(self, hyperparams: Any, init: Callable[[Any, Any], Any]) -> Any:
        run = self._program
        if self._start is None:
            self._advance = self._traced.lower().compile()
            self._start = self._state_before()
        state = jax.tree.map(jnp.copy, self._start)
        # At the position of the schedules of the run.
        counts = np.asarray(state.opt_state.scalars["int32"])[-2:]
        opt_state = with_counts(init(state.params, hyperparams), counts)
        batches = run.feed.batches(self._first + self._skipped)
        for _ in range(self._first, self._step):
            batch = next(batches)
            opt_state = self._advance(state, opt_state, hyperparams, run.feed.to_devices(batch))
            if run.simulated:
                jax.block_until_ready(opt_state)
            state, [metrics] = run.advance(state, [batch])
            jax.block_until_ready(metrics.arrays)  # so that few batches wait for the devices
        if not self._verified:
            self._verify(state)
        return opt_state

    def _state_before(self) -> State:
        """Computes the state of the run before the steps, from a checkpoint."""
        run = self._program
        early = self._from > 0 or run.experiment.warm_start is not None
        state = restore_of(run, self._folder, self._from) if early else run.init()
        if counters_of(state.run_state).skipped_batches != self._skipped:
            raise CheckpointError(
                f"The run in {self._folder} went back between step {self._from:,} and step"
                f" {self._step:,}, so that its last gradients are not those of one path. Follow"
                " fewer, from a later checkpoint, or none."
            )
        batches = run.feed.batches(self._from + self._skipped)
        for _ in range(self._from, self._first):
            state, [metrics] = run.advance(state, [next(batches)])
            jax.block_until_ready(metrics.arrays)
        return state

    def _verify(self, state: State) -> None:
        """Raises CheckpointError if a state does not have the bits of the checkpoint."""
        found = flatten(to_save(state), verbatim=True)
        wrong = [path for path, x in found.items() if not _same(x, self._arrays.get(path))]
        if wrong:
            raise CheckpointError(
                f"Steps {self._from + 1:,} to {self._step:,} of the run in {self._folder} were"
                f" computed again, to follow their gradients, and do not lead to its checkpoint of"
                f" step {self._step:,}: {len(wrong)} of {len(found)} arrays differ, such as"
                f" {wrong[0]}. The code, data, versions or machine are not those of the run, as"
                " its run.json has them. Restore them, or leave out follow."
            )
        self._verified = True


def _same(x: Any, saved: np.ndarray | None) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return saved is not None and np.asarray(x).tobytes() == np.asarray(saved).tobytes()
