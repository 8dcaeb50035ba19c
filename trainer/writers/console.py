"""Metrics for the eye: a line per log interval, and a progress bar where there is a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from trainer.config.tree import printable
from trainer.writers.base import Writer, number

SPEED = "perf/steps_per_second"
_REFRESH = 0.1  # seconds between two moves of the bar


class ConsoleWriter(Writer):
    """Prints the scalars of a step as one line, with speed and ETA.

    Values of one step are merged until another step comes or flush() is called. On a terminal the
    lines stand above a progress bar (rich), which progress() moves between them. The speed is what
    the loop says it is, as "perf/steps_per_second"; else it is measured from line to line. Other
    scalars under "perf/" are left out.

    Args:
      total_steps: of the whole run, for ETA and the bar; None where it is not known.
      batch_size: examples a step, for examples per second.
      first_step: how many steps were done before, when a run goes on.
      stream: where to; default stdout.
      clock: seconds, for the speed.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        batch_size: int | None = None,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._batch_size = batch_size
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._mark: tuple[int, float] | None = None  # step and time that the speed counts from
        self._speed: float | None = None  # steps per second
        self._told = False  # whether the loop says the speed
        self._moved = 0.0  # when the bar was moved the last time
        self._bar: Any = None
        self._task: Any = None
        self._first = first_step

    def progress(self, step: int) -> None:
        """Moves the bar to a step; cheap, and nothing off a terminal: call it at every step."""
        now, first = self._clock(), self._mark is None
        if first:  # the first call comes after the compilation
            self._mark = (step, now)
            self._open()
        if self._bar is not None and (first or now - self._moved > _REFRESH):
            self._moved = now
            self._bar.update(self._task, completed=step)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Takes numbers of a step."""
        if self._pending is not None and self._pending[0] != step:
            self.flush()
        values = {name: number(name, value) for name, value in scalars.items()}
        if self._pending is None:
            self._pending = (int(step), {})
            self._measure(step)
        self._told = self._told or SPEED in values
        self._speed = values.get(SPEED, self._speed)
        shown = {name: value for name, value in values.items() if not name.startswith("perf/")}
        self._pending[1].update(shown)

    def flush(self) -> None:
        """Prints the line that waits."""
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        total = f"/{self._total}" if self._total else ""
        parts = [f"step {step}{total}"]
        parts += [f"{printable(name)} {_short(value)}" for name, value in values.items()]
        if self._open():
            self._bar.update(self._task, completed=step, speed=self._pace())
            self._bar.console.print("  ".join(parts), highlight=False, markup=False)
        else:
            tail = [text for text in (self._pace(), self._eta(step)) if text]
            print("  ".join(parts + tail), file=self._stream, flush=True)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Prints nothing: they are in config.yaml."""

    def close(self) -> None:
        """Prints what waits and takes the bar away."""
        self.flush()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._total = None

    def _measure(self, step: int) -> None:
        now = self._clock()
        if self._mark is None:
            self._mark = (step, now)
        elif step > self._mark[0] and now > self._mark[1]:
            if not self._told:
                self._speed = (step - self._mark[0]) / (now - self._mark[1])
            self._mark = (step, now)

    def _pace(self) -> str:
        if self._speed is None:
            return ""
        text = f"{_short(self._speed)} steps/s"
        if self._batch_size:
            text += f"  {_short(self._speed * self._batch_size)} examples/s"
        return text

    def _eta(self, step: int) -> str:
        if not self._speed or not self._total or step >= self._total:
            return ""
        seconds = round((self._total - step) / self._speed)
        hours, rest = divmod(seconds, 3600)
        clock = f"{rest // 60:02d}:{rest % 60:02d}"
        return f"ETA {hours}:{clock}" if hours else f"ETA {clock}"

    def _open(self) -> bool:
        """Starts the bar if the stream is a terminal, and tells whether there is one."""
        if self._bar is None and self._total and self._stream and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as Remaining

            console = Console(file=self._stream)
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
            self._bar = Progress(
                *columns, TextColumn("ETA"), Remaining(), console=console, refresh_per_second=4
            )
            self._task = self._bar.add_task("", total=self._total, completed=self._first, speed="")
            self._bar.start()
        return self._bar is not None


def _short(value: int | float | bool) -> str:
    if isinstance(value, bool | int):
        return str(value)
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
