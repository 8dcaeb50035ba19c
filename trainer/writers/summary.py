"""summary.json: the results of a run, single or of a sweep."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.writers.json_files import AnyFloat, DamagedFile, as_json, read_json

# `end` of a run that is not to be resumed
ENDS = ("done", "diverged", "failed", "pruned")
SUMMARY_FILE = "summary.json"
_ADVICE = "restore it from a copy; or remove it, and the run counts as not ended."


@dataclass(frozen=True)
class Best:
    """The best value of a metric in a run."""

    value: float
    step: int  # the first step that had it


@dataclass(frozen=True)
class Summary:
    """How a run ended, and its results."""

    # summary.json has the fields by these names and in this order. A new field needs no more than
    # its line here, and its value in `trainer.train.rows.Results.summary`: loggers have it too,
    # reports as `Result.summary`, and `sweep check` compares what is named perf/ with the rows.
    # Fields that may be None are None in files of earlier versions.

    # "done"; "diverged" if the run ended at a step that was not finite, or its last parameters or
    # the loss of its last evaluation are not finite; "failed" if it could not be computed or
    # saved; "stopped" if a signal or --until ended it after a checkpoint
    end: str
    # the exit code of the process; for a trial of a sweep, that of its run alone
    exit: int | None = field(default=None, kw_only=True)
    step: int  # the last step; the one that was not finite if the run diverged
    # number of steps that the config asks for
    steps: int | None = field(default=None, kw_only=True)
    # the step at which it began, if it continued another run
    first_step: int | None = field(default=None, kw_only=True, metadata={"omit_none": True})
    # training examples of the steps so far
    examples: int | None = field(default=None, kw_only=True)
    # tokens of these examples; None if the data set does not count tokens
    tokens: int | None = field(default=None, kw_only=True, metadata={"omit_none": True})
    seconds: float | None = field(default=None, kw_only=True, metadata={"name": "perf/seconds"})
    # the newest metrics of training and evaluation, by their names in metrics.jsonl
    metrics: Mapping[str, AnyFloat] = field(default_factory=dict, metadata={"required": True})
    # name of an evaluation metric -> "min" and "max" -> its smallest and its largest value in the
    # run; a loss has only "min"
    best: Mapping[str, Mapping[str, Best]] = field(default_factory=dict, kw_only=True)
    # a sentence about a run that is not done, or whose metrics.jsonl lacks rows
    why: str = field(default="", metadata={"required": True})

    def value(self, row: str) -> float | None:
        """Returns a metric by its name in metrics.jsonl; None if not done or not finite."""
        value = self.metrics.get(row)
        done = self.end == "done" and value is not None and math.isfinite(value)
        return value if done else None

    def flat(self) -> dict[str, float | str]:
        """Returns all values by name, as loggers show them; the best ones as "min/eval/loss"."""
        best = {
            f"{mode}/{name}": best.value
            for name, modes in self.best.items()
            for mode, best in modes.items()
        }
        plain = {name: x for name, x in as_json(self).items() if name not in ("metrics", "best")}
        return {**self.metrics, **best} | {n: x for n, x in plain.items() if x not in (None, "")}

    def text(self) -> str:
        """Returns the content of summary.json."""
        return json.dumps(as_json(self), indent=1) + "\n"


def read_summary(folder: str | os.PathLike[str]) -> Summary | None:
    """Reads the summary.json of a run or trial; None if it is absent or damaged."""
    # It is absent while the run has not ended, and may be damaged after a loss of power.
    with contextlib.suppress(FileNotFoundError, DamagedFile):
        return read_json(Path(folder) / SUMMARY_FILE, Summary, _ADVICE)
    return None


def read_outcome(folder: str | os.PathLike[str]) -> Summary | None:
    """Reads the summary.json of a trial that has ended; None if it is absent or damaged."""
    # It is also None for a trial that was continued as a run and stopped.
    summary = read_summary(folder)
    return None if summary is None or summary.end not in ENDS else summary
