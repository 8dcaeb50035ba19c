"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from trainer.checkpoint.reading import read_metric


class Retention:
    """Keeps the newest checkpoints, the best by a metric that is finite, and some in any case.

    Args:
      latest: how many of the newest to keep, at least 1.
      best: how many of the best to keep beside them.
      mode: 'max' or 'min'; of equals the earlier one is better.
      always: steps that are never superfluous.
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
        self._sign = -1 if mode == "max" else 1
        self._always = frozenset(always)
        self._metrics: dict[int, float] = {}
        self._judged: dict[int, float] = {}

    def read(self, found: Mapping[int, Path]) -> None:
        """Learns what the checkpoints on disk are worth; raises OSError."""
        self._metrics = {s: self._judged.get(s, read_metric(path)) for s, path in found.items()}

    def saving(self, step: int, metric: float | None) -> None:
        """Notes what a checkpoint is worth that is about to be saved."""
        self._judged.pop(step, None)  # that was another state
        self._metrics[step] = math.nan if metric is None else metric

    def judge(self, step: int, metric: float) -> None:
        """Notes what a checkpoint is worth that was saved before that was known."""
        self._judged[step] = self._metrics[step] = metric

    def forget_after(self, step: int) -> None:
        """Forgets what was said of later steps than `step`."""
        for known in (self._judged, self._metrics):
            for later in [s for s in known if s > step]:
                del known[later]

    def superfluous(self, steps: Collection[int]) -> set[int]:
        """Returns the steps that need not be kept."""
        worth = {step: self._metrics.get(step, math.nan) for step in steps}
        finite = [step for step in steps if math.isfinite(worth[step])]
        best = sorted(finite, key=lambda step: (self._sign * worth[step], step))[: self._best]
        return set(steps) - set(sorted(steps)[-self._latest :]) - set(best) - self._always
