"""How well a run uses its devices: tokens a second, shares of the peak, memory."""

import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from trainer.engine import memory
from trainer.engine.contracts import tokens_per_example
from trainer.engine.peaks import peak_of
from trainer.engine.program import Program


class Utilization:
    """Converts the speed of a program to what its devices do.

    Args:
        program: the compiled experiment.
    """

    def __init__(self, program: Program):
        data, devices = program.experiment.data, program.mesh.devices.flat
        self._tokens = data.batch_size * (tokens_per_example(data) or 0)
        self._peak = peak_of(devices, program.experiment.precision)
        self._devices = program.mesh.local_devices
        self._flops = self._six = 0
        if self._peak is not None:
            self._flops = program.flops
            params = jax.tree.leaves(program.abstract_state().params)
            self._six = 6 * sum(x.size for x in params) * self._tokens

    def row(self, steps_per_second: float) -> dict[str, float]:
        """Returns what a row of metrics says beside the speed.

        Args:
            steps_per_second: the speed.

        Returns:
            "perf/memory_peak_bytes"; "perf/tokens_per_second" if the data set counts tokens; and,
            if the peak of every device is known, "perf/mfu" and with tokens "perf/mfu_6nd".
        """
        found: dict[str, float] = {}
        if self._tokens:
            found["perf/tokens_per_second"] = steps_per_second * self._tokens
        if self._peak is not None:
            found["perf/mfu"] = steps_per_second * self._flops / self._peak
            if self._tokens:
                found["perf/mfu_6nd"] = steps_per_second * self._six / self._peak
        return found | {"perf/memory_peak_bytes": memory_peak(self._devices)}


def memory_peak(devices: Iterable[Any]) -> int:
    """Returns the most memory that was in use so far, in bytes.

    Args:
        devices: of this process.

    Returns:
        Of the device that used the most; or, if a device does not count its memory, as a CPU, the
        most resident memory of this process.
    """
    stats = [memory.stats_of(device) for device in devices]
    if stats and all("peak_bytes_in_use" in each for each in stats):
        return max(int(each["peak_bytes_in_use"]) for each in stats)
    return _resident_peak()


def _resident_peak() -> int:
    # ru_maxrss of Linux begins with the peak of the process that started this one.
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    if (found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)) is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
