"""`train` and `load_run`: runs, their metrics and their parameters."""

import tempfile
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.configs import Config, Packages, as_config
from lockstep.processes import Translate, run_command, run_here
from trainer import config as configs
from trainer.messages import UserError
from trainer.writers import iterate_metrics
from trainer.writers.summary import Summary, read_summary

if TYPE_CHECKING:
    from pandas import DataFrame

Step = int | Literal["latest", "best"]


class Run:
    """A run in its folder, finished or not.

    Args:
        folder: of the run, also an attribute.
        vocabulary: further packages whose functions its config names.

    Attributes:
        config: a copy of its config.

    Raises:
        UserError: the folder is not that of a run.
    """

    def __init__(self, folder: str | PathLike[str], vocabulary: Packages = ()):
        from trainer.train.trained import read_run

        self.folder = Path(folder)
        if (self.folder / "plan.json").exists():
            raise UserError(
                f"{folder} is the folder of a sweep: read it with ls.load_sweep, whose trials()"
                " names its runs, and whose run(name) returns one of them."
            )
        self.config = Config(read_run(self.folder), vocabulary)
        self._program: Any = None
        self._model: Any = None

    @property
    def summary(self) -> Summary | None:
        """How the run ended, and its results; None if it has not ended.

        It has `end` ("done", "diverged", "failed" or "stopped"), `step`, `metrics` and `best`.
        """
        return read_summary(self.folder)

    def metrics(self, *names: str) -> "DataFrame":
        """Returns the rows of metrics.jsonl as a table with a row for each logged step.

        Args:
            names: metrics; without any, all columns. "step" is always one.

        Returns:
            A metric that was not computed at a step is NaN there.

        Raises:
            UserError: there are no metrics, or none of the given name.
        """
        try:
            rows = list(iterate_metrics(self.folder))
        except OSError as error:
            raise UserError(f"The metrics of {self.folder} cannot be read: {error}.") from error
        if not rows:
            raise UserError(f"The run in {self.folder} has no metrics yet.")
        known = dict.fromkeys(name for row in rows for name in row)
        for name in names:
            if name not in known:
                from trainer.config.wording import known_names

                hint = known_names(name, list(known), "It has")
                raise UserError(f"The run in {self.folder} has no metric {name!r}. {hint}")
        if names:
            kept = dict.fromkeys(("step", *names))
            rows = [{n: row[n] for n in kept if n in row} for row in rows if {*names} & {*row}]
        from pandas import DataFrame

        return DataFrame(rows)

    def params(self, step: Step = "latest", *, raw: bool = False) -> Any:
        """Returns the parameters of a checkpoint.

        Args:
            step: "latest", "best" by the `best_metric` of the config, or a number.
            raw: whether to return the parameters that are trained; otherwise those that the run
                evaluates, which are averages with `ema_decay` or a schedule-free optimizer.

        Returns:
            Nested dicts of numpy arrays.

        Raises:
            UserError: there is no such checkpoint, or it is damaged.
        """
        return self._trained(step, raw=raw).params

    def model_state(self, step: Step = "latest") -> Any:
        """Returns what the model keeps beside its parameters, such as batch statistics.

        Args:
            step: see `params`.
        """
        return self._trained(step, raw=True).model_state

    def variables(self, step: Step = "latest") -> dict[str, Any]:
        """Returns the variables of a flax linen module: `run.module.apply(run.variables(), x)`.

        Args:
            step: see `params`.
        """
        trained = self._trained(step, raw=False)
        return {"params": trained.params, **trained.model_state}

    @property
    def model(self) -> Any:
        """The model: `model.apply(params, model_state, batch, key=None, train=False)`.

        `apply` returns the outputs and the new model state.

        Raises:
            UserError: the config names packages that were not given as the vocabulary, or a file of
                them was edited after this process imported it.
        """
        if self._model is None:
            from lockstep.programs import check_code
            from trainer.engine.experiment import as_model

            builder = configs.Builder(self.config.resolved, self.config.vocabulary)
            model = as_model(builder.build("model"))
            check_code(self.config.vocabulary)
            self._warn_of_other_code()
            self._model = model
        return self._model

    @property
    def module(self) -> Any:
        """The flax module of the model.

        A linen module, to be applied to `variables()`; or an nnx module with the parameters and
        statistics of the newest checkpoint, in evaluation mode: `run.module(x)`.

        Raises:
            UserError: the model is neither; or there is no checkpoint of the nnx module.
        """
        if (module := getattr(self.model, "module", None)) is not None:
            return module
        if (bind := getattr(self.model, "bind", None)) is None:
            raise UserError(
                f"The model of the run in {self.folder} is not a flax module: call"
                " run.model.apply(params, model_state, batch, key=None, train=False)."
            )
        return bind(self.params(), self.model_state())

    def evaluate(self, split: str | None = None, step: Step = "latest") -> dict[str, float]:
        """Evaluates a checkpoint on the data of the run.

        Args:
            split: "validation", "test" or another split; None for all of them.
            step: see `params`.

        Returns:
            The metrics of the split, such as "loss"; of all splits by their names in metrics.jsonl.

        Raises:
            UserError: there is no such checkpoint or split, or the data are not on this machine.
        """
        from lockstep.programs import Program, loaded_program
        from trainer.checkpoint import CheckpointError
        from trainer.train.trained import choose_step, restore_of

        if self._program is None:
            self._program = loaded_program(self.config)
            self._warn_of_other_code()
        try:
            number, _ = choose_step(self.folder, self.config.resolved, step)
            state = restore_of(self._program, self.folder, number)
        except (CheckpointError, OSError) as error:
            raise UserError(str(error)) from error
        return Program(self._program).evaluate(state, split)

    def __repr__(self) -> str:
        if (summary := self.summary) is None:
            return f"Run({str(self.folder)!r}), not ended"
        return f"Run({str(self.folder)!r}), {summary.end} at step {summary.step:,}"

    def _warn_of_other_code(self) -> None:
        """Warns if the run was computed with other files of the user's packages."""
        from trainer.sweep.code_changes import fingerprint_of
        from trainer.workdir import code

        then = fingerprint_of(self.folder).get("code", {})
        now = code.hashes(self.config.vocabulary)
        if changed := [x for x in code.differing_files(then, now) if x in then and x in now]:
            warnings.warn(
                f"The run in {self.folder} was computed with another content of"
                f" {', '.join(changed)}: with the functions of now, its parameters may give other"
                " outputs and metrics than in the run.",
                stacklevel=3,
            )

    def _trained(self, step: Step, *, raw: bool) -> Any:
        from trainer.train.trained import read_trained

        return read_trained(self.folder, step, self.config.vocabulary, raw=raw)


def load_run(folder: str | PathLike[str], *, vocabulary: Packages = ()) -> Run:
    """Returns the run in a folder.

    Args:
        folder: of the run, which may not have ended; a trial of a sweep is a run, too.
        vocabulary: further packages whose public functions its config names. They are imported when
            the model or the program is built, and not before.

    Raises:
        UserError: the folder is not that of a run.
    """
    return Run(folder, vocabulary)


def train(
    config: Config | str | PathLike[str],
    workdir: str | PathLike[str],
    *,
    vocabulary: Packages = (),
    until: int | None = None,
    allow_changed: Sequence[str] = (),
    inline: bool = False,
    quiet: bool = False,
) -> Run:
    """Trains what a config says, from the newest checkpoint in the folder if there is one.

    It is the command `python -m trainer train`, in a process of its own whose output is shown here.
    A second call with the same folder resumes a run that was stopped. An interrupt, such as
    Ctrl-C or the button of a notebook, saves a checkpoint and raises `Stopped`.

    Args:
        config: the config, or its file.
        workdir: the folder of the run.
        vocabulary: further packages whose public functions the config may name.
        until: stops after this step, with a checkpoint.
        allow_changed: what may differ from when the run began, such as ["code"]; see the command.
        inline: whether to train in this process, such as for hooks that share objects with it. Its
            main thread must call this.
        quiet: whether the output is not shown.

    Returns:
        The run, which has ended.

    Raises:
        UserError: the config has a mistake, or the folder is that of another run.
        Stopped: the run was interrupted, and has a checkpoint.
        RunFailed: it could not be computed to its end, such as after a loss that was not finite.

    Example:
        >>> import tempfile
        >>> import lockstep as ls
        >>> config = ls.make_config(
        ...     model=ls.call.models.mlp(width=8),
        ...     data=ls.call.data.digits(batch_size=64),
        ...     loss=ls.call.losses.softmax_cross_entropy(),
        ...     optimizer=ls.call.optax.adamw(learning_rate=1e-3),
        ...     steps=2,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = ls.train(config, f"{folder}/run", quiet=True)
        ...     run.summary.step
        2
    """
    config = as_config(config, vocabulary)
    words = ["train", f"--workdir={fspath(workdir)}"]
    words += [f"--vocabulary={each}" for each in config.vocabulary]
    words += [] if until is None else [f"--until={until}"]
    words += [f"--allow_changed={each}" for each in allow_changed]
    with file_of(config) as (file, places):
        command = [*words, f"--config={file}"]
        if inline:
            run_here(command, places)
        else:
            run_command(command, places, quiet)
    return Run(workdir, config.vocabulary)


@contextmanager
def file_of(config: Config) -> Generator[tuple[Path, Translate]]:
    """Writes a config into a temporary file for a command; yields it with a `Translate`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config.to_yaml(), encoding="utf-8")
        yield file, partial(_with_places, str(file), config.resolved.sources)


def _with_places(file: str, sources: Mapping[str, configs.Source], line: str) -> str:
    """Returns a line of a message with the places of a config, not those of its file in YAML."""
    if file not in line:
        return line
    read = reversed([*configs.load([file]).sources.items()])
    lines = {at.line: str(sources[path]) for path, at in read if path and path in sources}
    for number in sorted(lines, reverse=True):
        line = line.replace(f"{file}:{number}", lines[number])
    return line.replace(file, "the config")
