"""What came of a trial: the summary.json in its folder."""

import dataclasses
import math
from pathlib import Path

from trainer.sweep.definition import Goal
from trainer.writers.summary import Summary, read_summary

ENDS = ("done", "diverged", "failed")


class Outcome(Summary):
    """The summary of a trial, which is "done", "diverged" or "failed"."""

    def value(self, goal: Goal) -> float | None:
        """Returns the value by which trials are compared; None for a trial that has none.

        Args:
            goal: names the metric and the split.
        """
        value = self.metrics.get(goal.row)
        usable = self.end == "done" and value is not None and math.isfinite(value)
        return value if usable else None


def outcome_of(summary: Summary) -> Outcome:
    """Converts the summary of a run to an outcome.

    Args:
        summary: of a run that ended, and was not stopped.
    """
    return Outcome(
        **{each.name: getattr(summary, each.name) for each in dataclasses.fields(summary)}
    )


def read_outcome(folder: Path) -> Outcome | None:
    """Reads the summary.json of a trial.

    Args:
        folder: of the trial.

    Returns:
        The outcome; None if the file is absent or damaged, as it may be after a loss of power, or
        is that of a trial which was continued as a run and stopped.
    """
    summary = read_summary(folder)
    return None if summary is None or summary.end not in ENDS else outcome_of(summary)
