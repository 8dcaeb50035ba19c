"""Measures the time of the steps, how far a run is, and how well it uses its devices."""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from trainer.engine import memory
from trainer.engine.contracts import tokens_per_example
from trainer.engine.peaks import peak_of
from trainer.engine.program import Program


class Utilization:
    """Converts the speed of a program to what its devices do."""

    def __init__(self, program: Program):
        data, devices = program.experiment.data, program.mesh.devices.flat
        self._tokens = data.batch_size * (tokens_per_example(data) or 0)
        self._peak = peak_of(devices, program.experiment.roles.compute)
        self._devices = program.mesh.local_devices
        self._flops = self._six = 0
        if self._peak is not None:
            self._flops = program.flops
            params = jax.tree.leaves(program.abstract_state().params)
            self._six = 6 * sum(x.size for x in params) * self._tokens

    def row(self, steps_per_second: float) -> dict[str, float]:
        """Returns what a row of metrics says about the devices at a speed in steps per second."""
        # That is "perf/memory_peak_bytes"; "perf/tokens_per_second" if the data set counts tokens;
        # and, if the peak of every device is known, "perf/mfu" and with tokens "perf/mfu_6nd".
        found: dict[str, float] = {}
        if self._tokens:
            found["perf/tokens_per_second"] = steps_per_second * self._tokens
        if self._peak is not None:
            found["perf/mfu"] = steps_per_second * self._flops / self._peak
            if self._tokens:
                found["perf/mfu_6nd"] = steps_per_second * self._six / self._peak
        return found | {"perf/memory_peak_bytes": memory_peak(self._devices)}


def memory_peak(devices: Iterable[Any]) -> int:
    """Returns the most memory in use so far, in bytes, of the device that used the most."""
    # If a device does not count its memory, as a CPU, it is the most resident memory here.
    stats = [memory.stats_of(device) for device in devices]
    if stats and all("peak_bytes_in_use" in each for each in stats):
        return max(int(each["peak_bytes_in_use"]) for each in stats)
    # Not ru_maxrss: on Linux it begins with the peak of the process that started this one.
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    if (found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)) is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Adds up the time in which it runs."""

    # `running` says whether it runs from now on, and `now` returns seconds. `share` is the share of
    # the time that is added up; change it only while the clock is stopped.

    def __init__(self, running: bool = True, now: Callable[[], float] = time.perf_counter):
        self.share, self._now = 1.0, now
        self._seconds = 0.0
        self._since = now() if running else None

    def __call__(self) -> float:
        """Returns the seconds in which it ran."""
        if self._since is None:
            return self._seconds
        return self._seconds + (self._now() - self._since) * self.share

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs during this context, and only then."""
        self._since = self._now()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not run during this context."""
        ran = self._since is not None
        self._stop()
        try:
            yield
        finally:
            self._since = self._now() if ran else None

    def _stop(self) -> None:
        self._seconds, self._since = self(), None


class Stopwatch:
    """Times the steps as the device finishes them, excluding evaluations, saves and hooks."""

    # `step` steps are finished now, and took `seconds`. `clock` runs while steps are computed; None
    # for one that runs from now on. `use` adds what the devices do at a speed; None adds nothing.

    def __init__(
        self,
        step: int,
        data: Any,
        seconds: float = 0.0,
        clock: Clock | None = None,
        use: Utilization | None = None,
    ):
        self._use = use
        self._clock = clock or Clock()
        self.paused = self._clock.paused  # a context whose time does not count
        self._batch_size: int = data.batch_size
        self._epoch = data.num_examples
        self._tokens = tokens_per_example(data)
        self._last = step, self._clock()
        self._before = seconds - self._clock()
        self._rate, self._waited = 0.0, 0.0
        self._share: float | None = None

    def lap(self, step: int, waited: float | None = None) -> None:
        """Ends a lap, when `step` steps are finished."""
        # `waited` are the seconds so far in which the devices waited for data; None if not known.
        (before, since), now = self._last, self._clock()
        seconds = max(now - since, 1e-9)
        self._rate = (step - before) / seconds
        self._last = step, now
        if waited is not None:
            self._share = min((waited - self._waited) / seconds, 1.0)
            self._waited = waited

    def row(self, step: int) -> dict[str, float]:
        """Returns what a row of training, at a step of the last lap, says besides its metrics."""
        # That is progress as `progress` returns it, with the time at which the step was finished,
        # and the speed of the lap: steps and examples per second. If it is known, the share of the
        # lap in which the devices waited for data; and what `Utilization.row` returns.
        last, at = self._last
        seconds = self._before + at - (last - step) / self._rate
        return self.progress(step, seconds) | {
            "perf/steps_per_second": self._rate,
            "perf/examples_per_second": self._rate * self._batch_size,
            **({} if self._share is None else {"perf/data_wait": self._share}),
            **(self._use.row(self._rate) if self._use else {}),
        }

    def progress(self, step: int, seconds: float | None = None) -> dict[str, float]:
        """Returns examples, epochs, tokens and seconds up to a finished step, as metrics."""
        # The `seconds` at which it was finished are by default those of now.
        seconds = self._before + self._clock() if seconds is None else seconds
        examples = step * self._batch_size
        return {
            "examples": examples,
            "epochs": examples / self._epoch if self._epoch else 0.0,
            **({} if self._tokens is None else {"tokens": examples * self._tokens}),
            "perf/seconds": max(seconds, 0.0),
        }
