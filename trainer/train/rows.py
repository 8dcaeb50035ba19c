"""The rows of a run: that metrics.jsonl has all of them, and the results that they contain.

A `Stopwatch` measures the time of the steps and how far a run is, and `Utilization` how well it
uses its devices.
"""

import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import writers
from trainer.engine import every, memory
from trainer.engine.contracts import tokens_per_example
from trainer.engine.diagnostics import NoiseScale
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.engine.targets import peak_of
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


class Utilization:
    """Converts the speed of a program to what its devices do."""

    def __init__(self, program: Program):
        data, devices = program.experiment.data, program.mesh.devices.flat
        self._tokens = data.batch_size * (tokens_per_example(data) or 0)
        self._peak = peak_of(devices, program.experiment.roles.compute)
        self._devices = program.mesh.local_devices
        self._flops = self._six = 0
        if self._peak is not None:
            self._flops = program.flops
            params = jax.tree.leaves(program.abstract_state().params)
            self._six = 6 * sum(x.size for x in params) * self._tokens

    def row(self, steps_per_second: float) -> dict[str, float]:
        """Returns what a row of metrics says about the devices at a speed in steps per second."""
        # That is "perf/memory_peak_bytes"; "perf/tokens_per_second" if the data set counts tokens;
        # and, if the peak of every device is known, "perf/mfu" and with tokens "perf/mfu_6nd".
        found: dict[str, float] = {}
        if self._tokens:
            found["perf/tokens_per_second"] = steps_per_second * self._tokens
        if self._peak is not None:
            found["perf/mfu"] = steps_per_second * self._flops / self._peak
            if self._tokens:
                found["perf/mfu_6nd"] = steps_per_second * self._six / self._peak
        return found | {"perf/memory_peak_bytes": memory_peak(self._devices)}


def memory_peak(devices: Iterable[Any]) -> int:
    """Returns the most memory in use so far, in bytes, of the device that used the most."""
    # If a device does not count its memory, as a CPU, it is the most resident memory here.
    stats = [memory.stats_of(device) for device in devices]
    if stats and all("peak_bytes_in_use" in each for each in stats):
        return max(int(each["peak_bytes_in_use"]) for each in stats)
    # Not ru_maxrss: on Linux it begins with the peak of the process that started this one.
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    if (found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)) is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Adds up the time in which it runs."""

    # `running` says whether it runs from now on, and `now` returns seconds. `share` is the share of
    # the time that is added up; change it only while the clock is stopped.

    def __init__(self, running: bool = True, now: Callable[[], float] = time.perf_counter):
        self.share, self._now = 1.0, now
        self._seconds = 0.0
        self._since = now() if running else None

    def __call__(self) -> float:
        """Returns the seconds in which it ran."""
        if self._since is None:
            return self._seconds
        return self._seconds + (self._now() - self._since) * self.share

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs during this context, and only then."""
        self._since = self._now()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not run during this context."""
        ran = self._since is not None
        self._stop()
        try:
            yield
        finally:
            self._since = self._now() if ran else None

    def _stop(self) -> None:
        self._seconds, self._since = self(), None


class Stopwatch:
    """Times the steps as the device finishes them, excluding evaluations, saves and hooks."""

    # `step` steps are finished now, and took `seconds`. `clock` runs while steps are computed; None
    # for one that runs from now on. `use` adds what the devices do at a speed; None adds nothing.

    def __init__(
        self,
        step: int,
        data: Any,
        seconds: float = 0.0,
        clock: Clock | None = None,
        use: Utilization | None = None,
    ):
        self._use = use
        self._clock = clock or Clock()
        self.paused = self._clock.paused  # a context whose time does not count
        self._batch_size: int = data.batch_size
        self._epoch = data.num_examples
        self._tokens = tokens_per_example(data)
        self._last = step, self._clock()
        self._before = seconds - self._clock()
        self._rate, self._waited = 0.0, 0.0
        self._share: float | None = None

    def lap(self, step: int, waited: float | None = None) -> None:
        """Ends a lap, when `step` steps are finished."""
        # `waited` are the seconds so far in which the devices waited for data; None if not known.
        (before, since), now = self._last, self._clock()
        seconds = max(now - since, 1e-9)
        self._rate = (step - before) / seconds
        self._last = step, now
        if waited is not None:
            self._share = min((waited - self._waited) / seconds, 1.0)
            self._waited = waited

    def row(self, step: int) -> dict[str, float]:
        """Returns what a row of training, at a step of the last lap, says besides its metrics."""
        # That is progress as `progress` returns it, with the time at which the step was finished,
        # and the speed of the lap: steps and examples per second. If it is known, the share of the
        # lap in which the devices waited for data; and what `Utilization.row` returns.
        last, at = self._last
        seconds = self._before + at - (last - step) / self._rate
        return self.progress(step, seconds) | {
            "perf/steps_per_second": self._rate,
            "perf/examples_per_second": self._rate * self._batch_size,
            **({} if self._share is None else {"perf/data_wait": self._share}),
            **(self._use.row(self._rate) if self._use else {}),
        }

    def progress(self, step: int, seconds: float | None = None) -> dict[str, float]:
        """Returns examples, epochs, tokens and seconds up to a finished step, as metrics."""
        # The `seconds` at which it was finished are by default those of now.
        seconds = self._before + self._clock() if seconds is None else seconds
        examples = step * self._batch_size
        return {
            "examples": examples,
            "epochs": examples / self._epoch if self._epoch else 0.0,
            **({} if self._tokens is None else {"tokens": examples * self._tokens}),
            "perf/seconds": max(seconds, 0.0),
        }
