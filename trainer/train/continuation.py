"""Continues another run from one of its checkpoints: its step, parameters, averages and data.

Start with `begin_with`, which also chooses a warm start. `trainer.train.shared_path` computes the
state of an optimizer that follows the last steps of the other run.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from optim.paths import flatten
from trainer import checkpoint
from trainer.checkpoint.reading import place
from trainer.config import Config
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import plural
from trainer.train.restoring import to_save, with_hyperparams
from trainer.train.rollback import Counters
from trainer.train.shared_path import SharedPath
from trainer.train.warm_start import WarmStart, count_warm_starts, located, put, with_counts

Read = TypeVar("Read")

_KEYS = ("from", "step", "continue", "optimizer", "follow", "sha256")
_COUNTERS, _SKIPS = "run_state/rollback", "run_state/skips"
# What to do if leaves of a part of the state differ.
_ADVICE = {
    "params": "A continuation has the model of the other run, with the same precision; a warm"
    " start without continue can rename parameters and leave some out.",
    "model_state": "A continuation has the model of the other run.",
    "ema": "Give both runs an ema_decay, or none: an average that begins in the middle of a run"
    " would be another one.",
    "opt_state": "Write optimizer: reset in warm_start, and the optimizer begins with a new state.",
    "run_state": "",
}


class Continuation:
    """A state of another run, from which this run goes on.

    The field `warm_start` of an experiment is a mapping with these keys:

    - "continue": True.
    - "from": the other run's folder.
    - "step": one of its checkpoints. This run counts on from there, and has `steps` in all.
    - "optimizer": "keep", the default, continues the state of the optimizer; "reset" begins a new
      one. The position of schedules, which is a count of updates, goes on in both cases.
    - "follow": the number of gradients by which a new state of the optimizer is advanced before
      this run begins: those of the last steps of the other run before `step`. 0 by default.
    - "sha256": what `checkpoint.leaves_digest` returned for the checkpoint; refuses another one.

    Taken over are the step, the parameters, the state of the model, their moving average (EMA) and,
    with on_nonfinite="rollback" or "skip", its counters, so that the data go on at the batch where
    the other run was. Hyperparameters and seeds are those of this run. With the config of the other
    run it has the bits that the other run has after `step`.

    `config` has the file and line for errors; `vocabulary` are packages that the other run's config
    may name. Raises ConfigError if the checkpoint does not exist, was changed, or does not fit.

    Attributes:
        source: the other run's folder and the step of its checkpoint, as run.json has them.
        number: how many warm starts led to this run, 1 if the other run was not warm-started.
    """

    def __init__(
        self, program: Program, config: Config | None = None, vocabulary: Sequence[str] = ()
    ):
        self._options: Mapping[str, Any] = program.experiment.warm_start or {}
        self._sources = config.sources if config else {}
        self._check_options()
        self._folder = Path(self._options["from"])
        self._step: int = self._options["step"]
        self.source = {"run": self._options["from"], "step": self._step}
        self._keeps = self._options.get("optimizer", "keep") == "keep"
        if program.experiment.steps <= self._step:
            steps = plural(program.experiment.steps, "step")
            self._refuse(
                "step",
                f"This run has {steps} in all, and continues {self._folder} from step"
                f" {self._step:,}: raise steps, or continue from an earlier checkpoint.",
            )
        self._check_digest()
        self._check_fits(program)
        self._arrays = self._read(checkpoint.load_leaves)
        self._check_counters(program)
        self.number = 1 + count_warm_starts(self._folder)
        shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state().opt_state)
        self._init = jax.jit(program.first_opt_state, out_shardings=shardings)
        self._path: SharedPath | None = None
        if count := self._options.get("follow", 0):
            try:
                self._path = SharedPath(self._folder, self._step, count, self._arrays, vocabulary)
                self._path.check(program, config)
            except checkpoint.CheckpointError as error:
                raise located(self._sources, "follow", str(error)) from error

    def first_state(self, program: Program) -> State:
        """Computes the state with which a run begins."""
        # `program` may differ from the one of the constructor in its seed and its floats.
        abstract = to_save(program.abstract_state())
        arrays = {
            _SKIPS: np.int32(0),
            **self._arrays,
            "run_state/seed": np.uint32(program.experiment.seed),
            _COUNTERS: np.asarray(self._counters(), np.int32),
        }
        kept = abstract if self._keeps else abstract._replace(opt_state=())
        leaves = [
            place(np.asarray(arrays[path]), target)
            for path, target in flatten(kept, verbatim=True).items()
        ]
        state = jax.tree.unflatten(jax.tree.structure(kept), leaves)
        state = with_hyperparams(program, state)
        return state if self._keeps else state._replace(opt_state=self._opt_state(program, state))

    def _opt_state(self, program: Program, state: State) -> Any:
        """Computes a new state of the optimizer, or one that followed the other run."""
        if self._path is not None:
            try:
                opt_state = self._path.follow(program, self._init)
            except checkpoint.CheckpointError as error:
                raise located(self._sources, "follow", str(error)) from error
        else:
            opt_state = self._init(state.params, state.hyperparams)
        return at_position(opt_state, self._arrays)

    def describe(self) -> str:
        """Returns a line for the log of the run."""
        state = "continues" if self._keeps else "begins with a new state"
        if self._path is not None:
            count = plural(self._options["follow"], "gradient")
            state += f", advanced by {count} of that run"
        return f"Continues {self._folder} from step {self._step:,}; the optimizer {state}."

    def _check_options(self) -> None:
        options = self._options
        if unknown := sorted(set(options) - set(_KEYS)):
            self._refuse(
                unknown[0],
                f"warm_start has an entry {unknown[0]!r} and continues another run; it takes"
                f" {', '.join(_KEYS)} then. What is not listed goes on as it was.",
            )
        if options["continue"] is not True:
            self._refuse(
                "continue", f"continue must be true, or be left out, got {options['continue']!r}."
            )
        if not isinstance(options.get("from"), str):
            self._refuse("from", "warm_start has no folder in 'from'.")
        for key, least in (("step", 1), ("follow", 0)):
            value = options.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                what = "the step of a checkpoint" if key == "step" else "a number of gradients"
                self._refuse(key, f"{key} must be {what}, at least {least}, got {value!r}.")
        if (kind := options.get("optimizer", "keep")) not in ("keep", "reset"):
            self._refuse("optimizer", f"optimizer must be 'keep' or 'reset', got {kind!r}.")
        if options.get("follow") and kind == "keep":
            self._refuse(
                "follow",
                f"follow is {options['follow']}, and the optimizer keeps the state of the other"
                " run, which has seen these gradients: write optimizer: reset, or remove follow.",
            )

    def _check_digest(self) -> None:
        """Raises ConfigError if there is no checkpoint, or another one than "sha256" names."""
        found = self._read(checkpoint.leaves_digest)
        if (wanted := self._options.get("sha256")) not in (None, found):
            self._refuse(
                "step",
                f"The checkpoint of step {self._step} in {self._folder} is not the one that sha256"
                f" names: its hash is {found}, not {wanted}. Put back the run that was there, or"
                " begin from this one: set sha256 to its hash, or plan the sweep again in another"
                " --workdir.",
            )

    def _check_fits(self, program: Program) -> None:
        """Raises ConfigError if a leaf of the checkpoint does not fit the program."""
        lines = checkpoint.misfits(self._folder, self._step, to_save(program.abstract_state()))
        wrong = [
            line
            for line in lines
            if not line.startswith((f"{_COUNTERS}:", f"{_SKIPS}:"))
            and (self._keeps or not line.startswith("opt_state/"))
        ]
        # The state of the optimizer has the shapes of the parameters.
        if others := [line for line in wrong if not line.startswith("opt_state/")]:
            wrong = others
        if wrong:
            parts = dict.fromkeys(line.partition("/")[0].partition(":")[0] for line in wrong)
            advice = " ".join(filter(None, (_ADVICE.get(part, "") for part in parts)))
            key = "optimizer" if [*parts] == ["opt_state"] else "from"
            self._refuse(
                key,
                f"The checkpoint of step {self._step} in {self._folder} does not fit this run:\n  "
                + "\n  ".join(wrong[:3])
                + (f"\n  and {len(wrong) - 3} more\n" if len(wrong) > 3 else "\n")
                + advice,
            )

    def _check_counters(self, program: Program) -> None:
        skipped, policy = self._counters().skipped_batches, program.experiment.on_nonfinite
        if skipped and policy != "rollback":
            self._refuse(
                "from",
                f"The run in {self._folder} went back and skipped {skipped} batches before step"
                f" {self._step}, which only on_nonfinite: rollback continues, and this run has"
                f" {policy}.",
            )

    def _counters(self) -> Counters:
        found = self._arrays.get(_COUNTERS)
        return Counters() if found is None else Counters(*(int(n) for n in found))

    def _read(self, read: Callable[[Path, int], Read]) -> Read:
        """Reads something of the checkpoint; raises ConfigError if it cannot be read."""
        try:
            return read(self._folder, self._step)
        except checkpoint.CorruptCheckpoint as error:
            self._refuse("step", f"The checkpoint of step {self._step} is damaged: {error}.")
        except (checkpoint.CheckpointError, OSError) as error:
            self._refuse("step", str(error))

    def _refuse(self, key: str, text: str) -> NoReturn:
        raise located(self._sources, key, text)


def at_position(opt_state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Puts a new state of an optimizer where a run was: the position of its schedules."""
    # `arrays` are the leaves of the run's checkpoint. The float32 copies of low_precision="master"
    # are those of the run, because they are its parameters, and not a state of the optimizer.
    master = {
        path: arrays[f"opt_state/master/{path}"]
        for path in flatten(opt_state.master, verbatim=True)
        if f"opt_state/master/{path}" in arrays
    }
    opt_state = with_counts(opt_state, arrays["opt_state/scalars/int32"][-2:])
    return opt_state._replace(master=put(opt_state.master, master))


def begin_with(
    program: Program, config: Config | None = None, vocabulary: Sequence[str] = ()
) -> WarmStart | Continuation:
    """Returns what the first state of a run with a `warm_start` is computed from."""
    # For the arguments and errors see `Continuation`.
    if "continue" in (program.experiment.warm_start or {}):
        return Continuation(program, config, vocabulary)
    return WarmStart(program, config)
