"""The results of a run so far: what summary.json says of its rows of metrics."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.engine.contracts import tokens_per_example
from trainer.engine.experiment import Experiment
from trainer.train.services import Ended
from trainer.writers import Writer, iterate_metrics
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import Best, Summary

_EVALUATED = tuple(PREFIXES.values())
_PROGRESS = ("step", "examples", "epochs", "tokens")


class Results(Writer):
    """Keeps the newest and the best metrics of the rows that a run writes.

    Attributes:
        newest: the newest value of each metric, without those of the machine.
        best: name of an evaluation metric -> "min" and "max" -> the best value and its step; a loss
            has only "min".
        seconds: the newest perf/seconds.
        step: the step of the newest row.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.best: dict[str, dict[str, Best]] = {}
        self.seconds = 0.0
        self.step = 0
        self._rate = 0.0  # steps per second

    def read(self, folder: Path) -> "Results":
        """Adds the rows that earlier processes wrote.

        Args:
            folder: of the run, whose rows after the restored step were dropped.

        Returns:
            This object.

        Raises:
            OSError: metrics.jsonl cannot be read.
        """
        for row in iterate_metrics(folder):
            self.write_scalars(row["step"], row)
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
        is_loss = name.endswith("/loss")
        if not is_loss and ("max" not in best or value > best["max"].value):
            best["max"] = Best(value, step)

    def seconds_at(self, step: int) -> float:
        """Returns the time of the steps up to one whose state was restored.

        Args:
            step: the step. Those after the last row count with the speed of that row.
        """
        after = max(0, step - self.step)
        return self.seconds + (after / self._rate if self._rate else 0.0)

    def summary(self, ended: Ended, experiment: Experiment) -> Summary:
        """Returns the summary of a run.

        Args:
            ended: how it ended.
            experiment: of the run.
        """
        examples = ended.step * experiment.data.batch_size
        tokens = tokens_per_example(experiment.data)
        return Summary(
            end=ended.end,
            step=ended.step,
            metrics=dict(self.newest),
            why=ended.why,
            exit=ended.code,
            steps=experiment.steps,
            examples=examples,
            tokens=None if tokens is None else examples * tokens,
            seconds=self.seconds,
            best=self.best,
        )
