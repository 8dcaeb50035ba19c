"""The rows of a run: that metrics.jsonl has all of them, and the results that they contain."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import writers
from trainer.engine import every
from trainer.engine.contracts import tokens_per_example
from trainer.engine.diagnostics import NoiseScale
from trainer.engine.experiment import Experiment
from trainer.messages import DONE, FAILED
from trainer.train import multihost
from trainer.train.nonfinite import Log
from trainer.workdir import Workdir
from trainer.writers import MultiWriter, Reporter, RunIdentity, Writer, iterate_metrics
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import Best, Summary


class Ended(NamedTuple):
    """How a run ended."""

    end: str  # "done", "diverged", "failed" or "stopped"; see `writers.summary.Summary`
    code: int  # 0 done, 75 stopped after a saved checkpoint, 1 for all else
    step: int  # the last step
    why: str = ""  # a sentence about a run that is not done


class LoggedRows(NamedTuple):
    """The rows that a process of a run found in metrics.jsonl, and which ones it would add."""

    step: int  # the step that the process started from
    rows: int  # how many rows up to that step the file had
    log_every: int  # steps between two rows of training metrics
    # steps between two evaluations, each of which has a row as well; intervals that change as
    # pairs of the step from which on one holds and the interval, as JSON has them
    eval_every: int | Sequence[Sequence[int]]
    steps: int  # the last step of the run, which always has a row


def expected_rows(spans: Sequence[LoggedRows], restored: int) -> int | None:
    """Returns how many rows up to a restored step metrics.jsonl must have at least, if known."""
    # A state is saved only after its metrics are written, so every row up to a restored step must
    # be in the file. The one exception is a row that has only the evaluation at that step: a signal
    # may have interrupted the evaluation, which is then repeated. `spans` are of the run's
    # processes so far, oldest first. None if the number cannot be determined.
    for number in reversed(range(len(spans))):
        last, later = spans[number], spans[number + 1 :]
        if last.step <= restored:
            # [2:] is log_every, eval_every and steps, which decide which steps have rows.
            if any(other[2:] != last[2:] for other in later):
                return None  # the rows after last.step may be of this process or of a later one
            log_every, eval_every = last.log_every, last.eval_every
            intervals = eval_every if isinstance(eval_every, int) else {x: n for x, n in eval_every}
            rows = last.rows + restored // log_every - last.step // log_every
            # A step that is logged and evaluated has one row.
            due = every.due_steps(intervals, last.step, restored)
            rows += sum(step % log_every > 0 for step in due)
            if last.step < restored:
                logged = restored % log_every == 0
                evaluated = every.is_due(intervals, restored)
                if restored == last.steps:
                    rows += not (logged or evaluated)  # the last step always has a row
                elif evaluated and not logged:
                    rows -= 1  # that evaluation may have been interrupted
            return rows
    return None


class MetricsError(RuntimeError):
    """Raised if metrics.jsonl cannot be read, or truncated after the step that was restored."""


class Rows:
    """Opens the writers, reports lost rows of metrics.jsonl, and sets the exit code to 1 then."""

    # run.json in the run's folder records the rows, and which of them were lost. `results` are
    # those of the rows, from the last `open` on.

    def __init__(
        self, folder: Workdir, experiment: Experiment, log: Log, identity: Callable[[], RunIdentity]
    ):
        self._folder, self._experiment, self._log = folder, experiment, log
        self._identity, self._reporter = identity, Reporter(log)
        self.results = Results()

    def open(self, restored: int | None) -> MultiWriter:
        """Opens the run's writers, and reports how many rows metrics.jsonl lacks."""
        # Rows after the step `restored` are dropped; None stands for the first state. The writers
        # are an empty MultiWriter in every process but the first. Raises MetricsError if
        # metrics.jsonl cannot be read or truncated.
        if jax.process_index() > 0:
            return MultiWriter([])
        was_there = self._folder.metrics_file.exists()
        self.results = Results()
        try:
            writer = writers.create(
                self._experiment.writers,
                self._folder.path,
                resumed=restored or 0,
                total_steps=self._experiment.steps,
                batch_size=self._experiment.data.batch_size,
                log=self._log,
                fence=self._folder.check_fence,
                lost=self._folder.lose_rows,
                also=[self.results],
                identity=self._identity,
                reporter=self._reporter,
            )
            self.results.read(self._folder.path)
        except OSError as error:
            raise MetricsError(
                f"The rows of metrics.jsonl after step {restored or 0:,} could not be dropped: "
                f"{error}. Nothing is lost: start the same command again once the disk works."
            ) from error
        try:
            self._count(restored, writer.rows, was_there)
        except BaseException:
            writer.close()
            raise
        return writer

    def _count(self, restored: int | None, found: int, was_there: bool) -> None:
        """Compares the rows that the file has with those that the run wrote."""
        experiment = self._experiment
        step = experiment.first_step if restored is None else restored
        before = ({name: rows[name] for name in LoggedRows._fields} for rows in self._folder.rows())
        wanted = expected_rows([LoggedRows(**rows) for rows in before], step)
        if wanted is None:  # an earlier version wrote run.json, without the number of rows
            wanted = int(restored is not None and not was_there)
        evaluated = experiment.eval_every
        if not isinstance(evaluated, int):
            evaluated = [[first, interval] for first, interval in sorted(evaluated.items())]
        now = LoggedRows(step, found, experiment.log_every, evaluated, experiment.steps)
        self._folder.record(restored=restored, rows=now._asdict())
        if found >= wanted:
            return
        if was_there:
            sentence = (
                f"metrics.jsonl holds {found:,} of the {wanted:,} rows that the run wrote up to "
                f"step {step:,}: {wanted - found:,} are lost for good."
            )
        else:
            sentence = f"metrics.jsonl was removed: a new file starts after step {step:,}."
        self._log(sentence)
        self._folder.lose_rows(sentence)

    def end(self, ended: Ended) -> Ended:
        """Returns how the run ended, with exit code 1 instead of 0 if rows were lost for good."""
        lost = multihost.broadcast_from_host0(bool(self._folder.lost_rows))
        if ended.code != DONE or not lost:
            return ended
        why = "The run has finished its steps, but its metrics are not complete."
        self._log(f"error: {why}")
        for sentence in self._folder.lost_rows:
            self._log(f"  {sentence}")
        return ended._replace(code=FAILED, why=" ".join([why, *self._folder.lost_rows]))


_EVALUATED = tuple(PREFIXES.values())
_PROGRESS = ("step", "examples", "epochs", "tokens")


class Results(Writer):
    """Keeps the newest and the best metrics of the rows that a run writes."""

    # `newest` has no perf/ metrics and no progress such as "epochs". `best` has name of an
    # evaluation metric -> "min" and "max" -> the best value and its step; a loss has only "min".
    # `seconds` is the newest perf/seconds, and `noise_scale` that of the rows which were read.

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.best: dict[str, dict[str, Best]] = {}
        self.seconds, self.step = 0.0, 0
        self.noise_scale = NoiseScale()
        self._rate = 0.0  # steps per second

    def read(self, folder: Path) -> "Results":
        """Adds the rows that earlier processes wrote, and returns this object."""
        # Rows after the restored step must be dropped. Raises OSError if they cannot be read.
        for row in iterate_metrics(folder):
            self.write_scalars(row["step"], row)
            self.noise_scale.add(row)
        return self

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Adds a row; see `Writer.write_scalars`."""
        for name, value in scalars.items():
            if "perf/" not in name and name not in _PROGRESS:
                self.newest[name] = value
                if name.startswith(_EVALUATED) and math.isfinite(value):
                    self._compare(name, float(value), step)
        self._rate = scalars.get("perf/steps_per_second", self._rate)
        self.seconds = scalars.get("perf/seconds", self.seconds)
        self.step = step

    def _compare(self, name: str, value: float, step: int) -> None:
        best = self.best.setdefault(name, {})
        if "min" not in best or value < best["min"].value:
            best["min"] = Best(value, step)
        if not name.endswith("/loss") and ("max" not in best or value > best["max"].value):
            best["max"] = Best(value, step)

    def seconds_at(self, step: int) -> float:
        """Returns the time of the steps up to a restored one, in seconds."""
        # Steps after the last row count with the speed of that row.
        after = max(0, step - self.step)
        return self.seconds + (after / self._rate if self._rate else 0.0)

    def summary(self, ended: Ended, experiment: Experiment) -> Summary:
        """Returns the summary of a run."""
        examples = ended.step * experiment.data.batch_size
        tokens = tokens_per_example(experiment.data)
        return Summary(
            end=ended.end,
            step=ended.step,
            metrics=dict(self.newest),
            why=ended.why,
            exit=ended.code,
            steps=experiment.steps,
            first_step=experiment.first_step or None,
            examples=examples,
            tokens=None if tokens is None else examples * tokens,
            seconds=self.seconds,
            best=self.best,
        )
