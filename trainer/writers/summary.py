"""summary.json: what came of a run, single or of a sweep."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SUMMARY_FILE = "summary.json"


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
            # As text, because JSON has no NaN and no infinity.
            "metrics": {n: x if math.isfinite(x) else repr(x) for n, x in self.metrics.items()},
            "best": {
                name: {mode: best._asdict() for mode, best in modes.items()}
                for name, modes in self.best.items()
            },
            "why": self.why,
        }
        return json.dumps(content, indent=1) + "\n"


def read_summary(folder: str | os.PathLike[str]) -> Summary | None:
    """Reads the summary.json of a run.

    Args:
        folder: of the run, or of a trial.

    Returns:
        The summary; None if the file is absent, as that of a run which has not ended, or damaged,
        as it may be after a loss of power.
    """
    file = Path(folder) / SUMMARY_FILE
    try:
        content = json.loads(file.read_text())
        return Summary(
            end=str(content["end"]),
            step=int(content["step"]),
            metrics={name: float(value) for name, value in content["metrics"].items()},
            why=str(content["why"]),
            exit=_number(content, "exit", int),
            steps=_number(content, "steps", int),
            examples=_number(content, "examples", int),
            tokens=_number(content, "tokens", int),
            seconds=_number(content, "perf/seconds", float),
            best={
                name: {
                    mode: Best(float(best["value"]), int(best["step"]))
                    for mode, best in modes.items()
                }
                for name, modes in content.get("best", {}).items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _number(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    return None if value is None else kind(value)
