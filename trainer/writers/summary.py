"""summary.json: what came of a run, single or of a sweep."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from trainer.config.wording import brief
from trainer.writers.json_files import DamagedFile, damaged, read_json

ENDS = ("done", "diverged", "failed")  # of a run that has ended, and is not continued
SUMMARY_FILE = "summary.json"
_TEXTS = ("nan", "inf", "-inf")  # of metrics, because JSON has no such numbers
_ADVICE = "restore it from a copy; or remove it, and the run counts as not ended."


class Best(NamedTuple):
    """The best value of a metric in a run.

    Attributes:
        value: the value.
        step: the first step that had it.
    """

    value: float
    step: int


@dataclass(frozen=True)
class Summary:
    """How a run ended, and its results.

    Attributes:
        end: "done"; "diverged" if a step was not finite and the run halted; "failed" if it could
            not be computed or saved; "stopped" if a signal or --until ended it after a checkpoint.
        step: the last step; the one that was not finite if the run diverged.
        metrics: the newest metrics of training and evaluation, by their names in metrics.jsonl.
        why: a sentence about a run that is not done, or whose metrics.jsonl lacks rows.
        exit: the exit code of the process; for a trial of a sweep, that of its run alone. None in
            files of earlier versions, like the fields below.
        steps: number of steps that the config asks for.
        examples: training examples of the steps so far.
        tokens: tokens of these examples; None if the data set does not count tokens.
        seconds: the time of the steps, as perf/seconds in metrics.jsonl.
        best: name of an evaluation metric -> "min" and "max" -> its smallest and its largest value
            in the run; a loss has only "min", because nothing else is best.
    """

    end: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    exit: int | None = None
    steps: int | None = None
    examples: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    best: Mapping[str, Mapping[str, Best]] = field(default_factory=dict)

    def value(self, row: str) -> float | None:
        """Returns the value of a metric by which runs are compared; see `value_of`.

        Args:
            row: the name of the metric in metrics.jsonl.
        """
        return value_of(self.end, self.metrics, row)

    def flat(self) -> dict[str, float | str]:
        """Returns all of it by name, as loggers have it: the best values as "min/eval/loss"."""
        known = {
            "end": self.end,
            "why": self.why,
            "exit": self.exit,
            "step": self.step,
            "steps": self.steps,
            "examples": self.examples,
            "tokens": self.tokens,
            "perf/seconds": self.seconds,
        }
        best = {
            f"{mode}/{name}": best.value
            for name, modes in self.best.items()
            for mode, best in modes.items()
        }
        given = {name: value for name, value in known.items() if value not in (None, "")}
        return {**self.metrics, **best, **given}

    def text(self) -> str:
        """Returns the content of summary.json."""
        content = {
            "end": self.end,
            "exit": self.exit,
            "step": self.step,
            "steps": self.steps,
            "examples": self.examples,
            **({} if self.tokens is None else {"tokens": self.tokens}),
            "perf/seconds": self.seconds,
            # One of _TEXTS.
            "metrics": {n: x if math.isfinite(x) else repr(x) for n, x in self.metrics.items()},
            "best": {
                name: {mode: best._asdict() for mode, best in modes.items()}
                for name, modes in self.best.items()
            },
            "why": self.why,
        }
        return json.dumps(content, indent=1) + "\n"


def value_of(end: str, metrics: Mapping[str, float], row: str) -> float | None:
    """Returns the value of a metric by which runs are compared.

    Args:
        end: how the run ended.
        metrics: its newest metrics.
        row: the name of the metric in metrics.jsonl.

    Returns:
        None if the run is not done, or has no finite value.
    """
    value = metrics.get(row)
    return value if end == "done" and value is not None and math.isfinite(value) else None


class _Best(TypedDict):
    value: float
    step: int


_Content = TypedDict(
    "_Content",
    {
        "end": str,
        "step": int,
        "metrics": dict[str, float | str],
        "why": str,
        "exit": NotRequired[int | None],
        "steps": NotRequired[int | None],
        "examples": NotRequired[int | None],
        "tokens": NotRequired[int | None],
        "perf/seconds": NotRequired[float | None],
        "best": NotRequired[dict[str, dict[str, _Best]]],
    },
)


def read_summary(folder: str | os.PathLike[str]) -> Summary | None:
    """Reads the summary.json of a run.

    Args:
        folder: of the run, or of a trial.

    Returns:
        The summary; None if the file is absent, as that of a run which has not ended, or damaged,
        as it may be after a loss of power.

    Raises:
        OSError: the disk cannot be read.
    """
    with contextlib.suppress(FileNotFoundError, DamagedFile):
        return load_summary(folder)
    return None


def read_outcome(folder: str | os.PathLike[str]) -> Summary | None:
    """Reads what came of a trial: the summary.json in its folder.

    Args:
        folder: of the trial.

    Returns:
        The summary; None if the file is absent or damaged, as it may be after a loss of power, or
        is that of a trial which was continued as a run and stopped.
    """
    summary = read_summary(folder)
    return None if summary is None or summary.end not in ENDS else summary


def load_summary(folder: str | os.PathLike[str]) -> Summary:
    """Reads the summary.json of a run.

    Args:
        folder: of the run, or of a trial.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is damaged.
        OSError: the disk cannot be read.
    """
    file = Path(folder) / SUMMARY_FILE
    content = read_json(file, _Content, _ADVICE)
    metrics = content["metrics"]
    texts = {name: text for name, text in metrics.items() if isinstance(text, str)}
    for name, text in texts.items():
        if text not in _TEXTS:
            raise damaged(file, f"metrics[{name!r}] is {brief(text)}, not a number", _ADVICE)
    seconds = content.get("perf/seconds")
    return Summary(
        end=content["end"],
        step=content["step"],
        metrics={name: float(value) for name, value in metrics.items()},
        why=content["why"],
        exit=content.get("exit"),
        steps=content.get("steps"),
        examples=content.get("examples"),
        tokens=content.get("tokens"),
        seconds=None if seconds is None else float(seconds),
        best={
            name: {mode: Best(float(best["value"]), best["step"]) for mode, best in modes.items()}
            for name, modes in content.get("best", {}).items()
        },
    )
