"""Continues another run from one of its checkpoints: its step, parameters, averages and data.

Start with `begin_with`, which also chooses a warm start. `SharedPath` computes the state of an
optimizer that follows the last steps of the other run.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.paths import flatten
from trainer import checkpoint
from trainer import config as configs
from trainer.checkpoint.reading import place_on_devices
from trainer.engine.experiment import with_place
from trainer.engine.mesh import ambient, replicated
from trainer.engine.program import Program, load_located
from trainer.engine.step import ShadowedStep, State, shadow_step
from trainer.messages import plural
from trainer.train.rollback import Counters, counters_of
from trainer.train.trained import restore_of, to_save, with_hyperparams
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
        self, program: Program, config: configs.Config | None = None, vocabulary: Sequence[str] = ()
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
        skipped, policy = self._counters().skipped_batches, program.experiment.on_nonfinite
        if skipped and policy != "rollback":
            self._refuse(
                "from",
                f"The run in {self._folder} went back and skipped {skipped} batches before step"
                f" {self._step}, which only on_nonfinite: rollback continues, and this run has"
                f" {policy}.",
            )
        self.number = 1 + count_warm_starts(self._folder)
        self._init = program.first_opt_states()
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
            place_on_devices(np.asarray(arrays[path]), target)
            for path, target in flatten(kept, verbatim=True).items()
        ]
        state = jax.tree.unflatten(jax.tree.structure(kept), leaves)
        state = with_hyperparams(program, state)
        if self._keeps:
            return state
        if self._path is None:
            opt_state = self._init(state.params, state.hyperparams)
        else:
            try:
                opt_state = self._path.follow(program, self._init)
            except checkpoint.CheckpointError as error:
                raise located(self._sources, "follow", str(error)) from error
        # The float32 copies of low_precision="master" are those of the run, because they are its
        # parameters, and not a state of the optimizer.
        stored = "opt_state/master/"
        master = {
            path: self._arrays[stored + path]
            for path in flatten(opt_state.master, verbatim=True)
            if stored + path in self._arrays
        }
        # Where the run was: at its position of the schedules.
        opt_state = with_counts(opt_state, self._arrays["opt_state/scalars/int32"][-2:])
        return state._replace(opt_state=opt_state._replace(master=put(opt_state.master, master)))

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


def begin_with(
    program: Program, config: configs.Config | None = None, vocabulary: Sequence[str] = ()
) -> WarmStart | Continuation:
    """Returns what the first state of a run with a `warm_start` is computed from."""
    if "continue" in (program.experiment.warm_start or {}):
        return Continuation(program, config, vocabulary)
    return WarmStart(program, config)


def trace_shadow(
    run: Program, other: Program, config: configs.Config | None, read: Callable[[ShadowedStep], Any]
) -> jax.stages.Traced:
    """Traces a function that advances the optimizer of `other` beside a run, which it leaves."""
    # It takes the state of the run, and the state (donated) and hyperparameters of the other
    # optimizer, and a batch; it returns the next state of that optimizer, and what `read` returns.
    # `config` is that of `other`: raises ConfigError if its optimizer cannot follow the run.

    def follow(state: State, opt_state: Any, hyperparams: Any, batch: Any) -> tuple[Any, Any]:
        experiment = run.inputs.insert(run.experiment, state.hyperparams)
        optimizer = other.inputs.insert(other.experiment, hyperparams).optimizer
        with ambient(run.mesh, run.sharding.axes_of(state.params)):
            found = shadow_step(experiment, optimizer, state, opt_state, batch)
        return found.opt_state, read(found)

    opt_state, batch = other.abstract_state().opt_state, run.feed.abstract_batch()
    out = jax.tree.map(lambda x: x.sharding, opt_state), replicated(run.mesh)
    follow = jax.jit(follow, donate_argnums=1, out_shardings=out)
    try:
        return follow.trace(run.abstract_state(), opt_state, other.inputs.pack(), batch)
    except optim.GroupError as error:
        raise with_place(error, config) from error


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
        except configs.ConfigError as error:
            text = f"The run in {folder} cannot be computed again: {error}"
            raise checkpoint.CheckpointError(text) from error
        self._from = self._step_before(count)
        self._skipped = int(arrays.get("run_state/rollback", np.zeros(4, np.int32))[1])
        self._advance: Any = None
        self._start: State | None = None  # the state before the first of the steps
        self._verified = False
        self._found: dict[bytes, Any] = {}  # hyperparameters -> the state of the optimizer

    def _step_before(self, count: int) -> int:
        """Returns the step of the newest state before the steps; raises CheckpointError."""
        steps = [info.step for info in checkpoint.ls(self._folder)]
        if early := [step for step in steps if step <= self._first]:
            return max(early)
        whole = self._program.experiment.warm_start is None
        if self._first == 0 and whole:
            return 0  # the initial state, which can be computed
        if self._first < 0:
            raise checkpoint.CheckpointError(
                f"follow is {count:,}, and the run in {self._folder} has {self._step:,} gradients"
                f" before step {self._step:,}."
            )
        fewer = [f"{self._step - step:,}" for step in steps if step < self._step][:1]
        fewer += [f"{self._step:,}, all of them"] if whole else []
        most = f" follow can be at most {fewer[0]}" if fewer else ""
        most += f", or {fewer[1]}" if len(fewer) > 1 else ""
        raise checkpoint.CheckpointError(
            f"To follow {count:,} gradients before step {self._step:,} takes a checkpoint of step"
            f" {self._first:,} or earlier, and {self._folder} has those of"
            f" {', '.join(map(str, steps))}.{most}{'.' if most else ''} A run keeps more with a"
            " larger keep_latest."
        )

    def check(self, program: Program, config: configs.Config | None) -> None:
        """Raises ConfigError if the optimizer of a program cannot follow another run."""
        self._traced = trace_shadow(self._program, program, config, lambda _: ())

    def follow(self, program: Program, init: Callable[[Any, Any], Any]) -> Any:
        """Computes the state of the optimizer of a program after the steps."""
        # `init` computes a new one from parameters and hyperparameters. `program` may differ from
        # the one of `check` in its floats. Raises CheckpointError if the run has other bits now.
        hyperparams = program.inputs.pack()
        if (key := np.asarray(hyperparams).tobytes()) not in self._found:
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
            there = run.feed.to_devices(batch)
            opt_state, _ = self._advance(state, opt_state, hyperparams, there)
            if run.simulated:
                jax.block_until_ready(opt_state)
            state, [metrics] = run.advance(state, [batch])
            jax.block_until_ready(metrics.arrays)  # so that few batches wait for the devices
        if self._verified:
            return opt_state
        found = flatten(to_save(state), verbatim=True)
        if wrong := [path for path, x in found.items() if not _same(x, self._arrays.get(path))]:
            raise checkpoint.CheckpointError(
                f"Steps {self._from + 1:,} to {self._step:,} of the run in {self._folder} were"
                f" computed again, to follow their gradients, and do not lead to its checkpoint of"
                f" step {self._step:,}: {len(wrong)} of {len(found)} arrays differ, such as"
                f" {wrong[0]}. The code, data, versions or machine are not those of the run, as"
                " its run.json has them. Restore them, or leave out follow."
            )
        self._verified = True
        return opt_state

    def _state_before(self) -> State:
        """Computes the state of the run before the steps, from a checkpoint."""
        run = self._program
        early = self._from > 0 or run.experiment.warm_start is not None
        state = restore_of(run, self._folder, self._from) if early else run.init()
        if counters_of(state.run_state).skipped_batches != self._skipped:
            raise checkpoint.CheckpointError(
                f"The run in {self._folder} went back between step {self._from:,} and step"
                f" {self._step:,}, so that its last gradients are not those of one path. Follow"
                " fewer, from a later checkpoint, or none."
            )
        batches = run.feed.batches(self._from + self._skipped)
        for _ in range(self._from, self._first):
            state, [metrics] = run.advance(state, [next(batches)])
            jax.block_until_ready(metrics.arrays)
        return state


def _same(x: Any, saved: np.ndarray | None) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return saved is not None and np.asarray(x).tobytes() == np.asarray(saved).tobytes()
