"""Decides which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from trainer.checkpoint.reading import read_metric


class Retention:
    """Keeps the newest checkpoints, the best ones by a finite metric, and chosen steps.

    Args:
        latest: how many of the newest to keep, at least 1.
        best: how many of the best to keep as well.
        mode: 'max' or 'min'; of two equal metrics the earlier one is better.
        always: steps that are always kept.
    """

    def __init__(self, latest: int, best: int, mode: str, always: Collection[int]) -> None:
        if latest < 1 or best < 0:
            raise ValueError(
                f"keep_latest={latest} and keep_best={best} were given; "
                "keep_latest must be at least 1 and keep_best at least 0."
            )
        if mode not in ("max", "min"):
            raise ValueError(f"best_mode={mode!r} was given; it must be 'max' or 'min'.")
        self._latest = latest
        self._best = best
        self._sign = -1 if mode == "max" else 1  # sorted() puts the best metric first
        self._always = frozenset(always)
        self._metrics: dict[int, float] = {}
        self._later_metrics: dict[int, float] = {}

    def read(self, found: Mapping[int, Path]) -> None:
        """Reads the metrics of the checkpoints on disk.

        Args:
            found: step -> the step's folder.

        Raises:
            OSError: the disk cannot be read.
        """
        self._metrics = {
            s: self._later_metrics.get(s, read_metric(path)) for s, path in found.items()
        }

    def saving(self, step: int, metric: float | None) -> None:
        """Sets the metric of a checkpoint that is about to be saved.

        Args:
            step: of the checkpoint.
            metric: None if it has none.
        """
        self._later_metrics.pop(step, None)  # it was of another state
        self._metrics[step] = math.nan if metric is None else metric

    def record_metric(self, step: int, metric: float) -> None:
        """Sets the metric of a checkpoint that was saved before it was evaluated.

        Args:
            step: of the checkpoint.
            metric: replaces the one on disk.
        """
        self._later_metrics[step] = self._metrics[step] = metric

    def forget_after(self, step: int) -> None:
        """Forgets the metrics of later steps than `step`."""
        for known in (self._later_metrics, self._metrics):
            for later in [s for s in known if s > step]:
                del known[later]

    def superfluous(self, steps: Collection[int]) -> set[int]:
        """Returns those of some steps that need not be kept.

        Args:
            steps: of all checkpoints.
        """
        metrics = {step: self._metrics.get(step, math.nan) for step in steps}
        # NaN has no order: orbax's own policy took a NaN for the best metric.
        finite = [step for step in steps if math.isfinite(metrics[step])]
        best = sorted(finite, key=lambda step: (self._sign * metrics[step], step))[: self._best]
        return set(steps) - set(sorted(steps)[-self._latest :]) - set(best) - self._always
