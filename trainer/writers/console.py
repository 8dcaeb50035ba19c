"""Prints metrics, one line per log interval, and a progress bar on a terminal."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from numpy.typing import ArrayLike

from trainer.config.wording import known_names
from trainer.messages import printable
from trainer.writers.base import Writer, real_number

if TYPE_CHECKING:
    from rich.progress import Progress

SPEED = "perf/steps_per_second"
TOKEN_SPEED = "perf/tokens_per_second"
# Prefixes of the metrics that are shown, in the order of a line; what is asked for follows them.
_ORDER = (
    *("train/loss", "train/", "validation/", "eval/"),
    *("skipped", "rollbacks", "learning_rate/"),
)
_WIDE = 60  # columns of a terminal from which the bar also shows the speed
_REFRESH = 0.1  # seconds between two updates of the bar


class ConsoleWriter(Writer):
    """Prints a line for each step: losses, metrics, learning rates, and the time left (ETA)."""

    # Values of one step are merged until values of another step arrive or flush() is called. On a
    # terminal the lines are above a progress bar (rich), which progress() advances and which shows
    # the speed. A line has the metrics that fit into the width of the terminal, and every value
    # that is not finite. The speed is the metric "perf/steps_per_second" if the loop writes it,
    # otherwise it is measured between lines. Other metrics under "perf/" are not printed. `more`
    # has names of metrics to print besides; "speed" for what is computed in a second; or "all".

    def __init__(
        self,
        total_steps: int | None = None,
        batch_size: int | None = None,
        *,
        more: Sequence[str] = (),
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._batch_size = total_steps, batch_size
        self._more = more
        self._known = {"speed", "all"}  # names that were given, or mean something
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._pending: tuple[int, dict[str, float]] | None = None
        # step and time that speed is measured from
        self._speed_from: tuple[int, float] | None = None
        self._speed: float | None = None  # steps per second
        self._token_speed: float | None = None  # tokens per second, if the loop writes it
        self._loop_writes_speed = False  # whether the loop writes the speed
        self._bar_updated = 0.0  # time of the bar's last update
        self._bar: Progress | None = None
        self._first = first_step

    def progress(self, step: int) -> None:
        """Advances the bar, if there is one; cheap enough to call at every step."""
        now, first = self._clock(), self._speed_from is None
        if first:  # the first call comes after the compilation
            self._speed_from = (step, now)
            self._open_bar()
        if self._bar is not None and (first or now - self._bar_updated > _REFRESH):
            self._bar_updated = now
            self._bar.update(self._bar.task_ids[0], completed=step)

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Adds scalars to the line of a step, and prints the line of an earlier step."""
        if self._pending is not None and self._pending[0] != step:
            self.flush()
        values = {name: real_number(name, value) for name, value in scalars.items()}
        if self._pending is None:
            self._pending, now, since = (int(step), {}), self._clock(), self._speed_from
            if since is None:
                self._speed_from = (step, now)
            elif step > since[0] and now > since[1]:
                # The loop's own speed leaves out evaluations and saves; this one cannot.
                if not self._loop_writes_speed:
                    self._speed = (step - since[0]) / (now - since[1])
                self._speed_from = (step, now)
        self._loop_writes_speed = self._loop_writes_speed or SPEED in values
        self._speed = values.get(SPEED, self._speed)
        self._token_speed = values.get(TOKEN_SPEED, self._token_speed)
        self._known.update(values)
        for name, value in values.items():
            asked = "all" in self._more or name in self._more
            if not name.startswith("perf/") and (
                asked or _rank(name) < len(_ORDER) or not math.isfinite(value)
            ):
                self._pending[1][name] = value

    def flush(self) -> None:
        """Prints the pending line."""
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        total = f"/{self._total}" if self._total else ""
        named = (f"{printable(name)} {_short(values[name])}" for name in sorted(values, key=_rank))
        fields = [f"step {step}{total}", *named]
        if (bar := self._open_bar()) is not None:
            console = bar.console
            speed = self._speed_text() if console.width >= _WIDE else ""
            bar.update(bar.task_ids[0], completed=step, speed=speed)
            line = _line_that_fits(fields, console.width)
            # No markup: rich would read a name in brackets as a style.
            console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
        else:
            if {"all", "speed"} & {*self._more} and (speed := self._speed_text()):
                fields.append(speed)
            if self._speed and self._total and step < self._total:
                hours, rest = divmod(round((self._total - step) / self._speed), 3600)  # seconds
                clock = f"{rest // 60:02d}:{rest % 60:02d}"
                fields.append(f"ETA {hours}:{clock}" if hours else f"ETA {clock}")
            print("  ".join(fields), file=self._stream, flush=True)

    def close(self) -> None:
        """Prints the pending line, and removes the bar."""
        self.flush()
        if unknown := [name for name in self._more if name not in self._known]:
            known = known_names(unknown[0], sorted(self._known), "There are")
            text = f"The writer console:{','.join(self._more)} found no metric {unknown[0]!r}."
            print(printable(f"{text} {known}"), file=self._stream)
            self._more = ()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._total = None  # so that a later flush() opens no other bar

    def _speed_text(self) -> str:
        if self._speed is None:
            return ""
        text = f"{_short(self._speed)} steps/s"
        if self._token_speed is not None:
            text += f"  {_short(self._token_speed)} tokens/s"
        elif self._batch_size:
            text += f"  {_short(self._speed * self._batch_size)} examples/s"
        return text

    def _open_bar(self) -> "Progress | None":
        """Starts the bar if the stream is a terminal; returns the bar if there is one."""
        if self._bar is None and self._total and self._stream and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as Remaining

            console = Console(file=self._stream)
            columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
            columns += (TextColumn("ETA"), Remaining())
            self._bar = Progress(*columns, console=console, refresh_per_second=4, expand=True)
            self._bar.add_task("", total=self._total, completed=self._first, speed="")
            self._bar.start()
        return self._bar


def _rank(name: str) -> int:
    """Returns the key that sorts the metrics of a line; metrics of equal rank keep their order."""
    ranks = (rank for rank, start in enumerate(_ORDER) if name.startswith(start))
    return next(ranks, len(_ORDER))


def _line_that_fits(fields: Sequence[str], width: int) -> str:
    """Joins the fields that fit into a width; the first two are used in any case."""
    from rich.cells import cell_len

    line = "  ".join(fields[:2])
    for field in fields[2:]:
        if cell_len(line) + 2 + cell_len(field) <= width:
            line += f"  {field}"
    return line


def _short(value: int | float | bool) -> str:
    if isinstance(value, bool | int):
        return str(value)
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
