"""What came of a trial: summary.json in its folder."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer.sweep.definition import Goal
from trainer.writers import iterate_metrics

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        end: "done"; "diverged" if a step was not finite and the config halts there; "failed" if it
            could not be computed, for the reason in `why`.
        step: the last step; the one that was not finite if the trial diverged.
        metrics: the newest metrics of training and evaluation, by their names in metrics.jsonl.
        why: a sentence for a trial that diverged or failed.
    """

    end: Literal["done", "diverged", "failed"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def text(self) -> str:
        """Returns the content of summary.json."""
        metrics = {
            # As text, because JSON has no NaN and no infinity.
            name: x if math.isfinite(x) else repr(x)
            for name, x in self.metrics.items()
        }
        content = {"end": self.end, "step": self.step, "metrics": metrics, "why": self.why}
        return json.dumps(content, indent=1) + "\n"

    def value(self, goal: Goal) -> float | None:
        """Returns the value by which trials are compared; None for a trial that has none.

        Args:
            goal: names the metric and the split.
        """
        value = self.metrics.get(goal.row)
        usable = self.end == "done" and value is not None and math.isfinite(value)
        return value if usable else None


def newest_metrics(folder: Path) -> dict[str, float]:
    """Returns the newest value of each metric in the metrics.jsonl of a trial.

    Args:
        folder: of the trial.

    Returns:
        Name -> value, without the speed of the machine.

    Raises:
        OSError: the file cannot be read.
    """
    newest: dict[str, float] = {}
    for row in iterate_metrics(folder):
        newest |= {name: x for name, x in row.items() if name != "step" and "perf/" not in name}
    return newest


def read_outcome(folder: Path) -> Outcome | None:
    """Reads the summary.json of a trial.

    Args:
        folder: of the trial.

    Returns:
        The outcome; None if the file is absent or damaged, as it may be after a loss of power.
    """
    try:
        content = json.loads((folder / SUMMARY_FILE).read_text())
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        if content["end"] not in ("done", "diverged", "failed"):
            return None
        return Outcome(content["end"], int(content["step"]), metrics, str(content["why"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
