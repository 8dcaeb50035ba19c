"""Writes TensorBoard's event files without TensorFlow; the only file that imports tensorboardX."""

import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import ArrayLike

from trainer.writers.base import Log, Writer, real_number, to_stderr
from trainer.writers.files import Fence
from trainer.writers.record_file import RecordFile
from trainer.writers.summary import Summary

_PREFIX = "events.out.tfevents."
_STAMP = re.compile(re.escape(_PREFIX) + r"(\d+)(?:\.(\d+))?")


class TensorBoardWriter(Writer):
    """Writes TensorBoard's event files with tensorboardX; the first write creates a new file."""

    # TensorBoard hides `purge_step` and later steps of the files that earlier processes of the run
    # wrote: it is the restored step + 1, or None to hide nothing.

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        purge_step: int | None = None,
        log: Log = to_stderr,
        fence: Fence = None,
    ) -> None:
        _import_without_torch()
        name = f"{_PREFIX}{_time_stamp(Path(logdir))}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordFile(Path(logdir) / name, None, log)
        self._log = log
        self._fence = fence or (lambda: None)
        self._unwritten: list[bytes] = []
        self._purge_step, self._started = purge_step, False

    @property
    def error(self) -> str | None:
        """Why the newest values are not in the file, or None."""
        return self._file.error

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Writes scalars of a step, as float32."""
        summary = _proto("summary").Summary()
        for name, value in scalars.items():
            summary.value.add(tag=name, simple_value=float(real_number(name, value)))
        self._add(step, [summary])  # one event: each has a time, a step and two checksums

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts in markdown by their names."""
        from tensorboardX.summary import text

        self._add(step, [text(name, value) for name, value in texts.items()])

    def write_hparams(self, hparams: Mapping[str, object]) -> None:
        """Writes hyperparameters for the tab HParams, beside the last values of all scalars."""
        from tensorboardX import summary

        # Drop the first result, an "experiment": TensorBoard would take the columns of a table of
        # many runs from that of one run. Without it, the table has those of all runs.
        _, start, _ = summary.hparams(hparams, {})
        self._add(0, [start])

    def finish(self, summary: Summary) -> None:
        """Writes how the run ended, for the tab HParams, if it is done or diverged."""
        # Nothing in a process that wrote no values: the run had ended before.
        if summary.end not in ("done", "diverged") or not self._started:
            return
        hparams, api = _proto("plugin_hparams"), _proto("api")
        status = api.STATUS_SUCCESS if summary.end == "done" else api.STATUS_FAILURE
        end = hparams.SessionEndInfo(status=status, end_time_secs=time.time())
        content = hparams.HParamsPluginData(session_end_info=end, version=0)
        message = _proto("summary").Summary()
        data = message.value.add(tag="_hparams_/session_end_info").metadata.plugin_data
        data.plugin_name, data.content = "hparams", content.SerializeToString()
        self._add(0, [message])

    def close(self) -> None:
        """Writes what could not be written before, and closes the file."""
        self.flush()
        self._file.close()

    def _add(self, step: int, summaries: Sequence[Any]) -> None:
        events = _proto("event")
        event = partial(events.Event, wall_time=time.time())
        new = []
        if not self._started:
            # The first event of a file has the version of its format.
            new.append(event(file_version="brain.Event:2"))
            if self._purge_step is not None:
                # At this event TensorBoard drops what it has read about this step and later ones.
                start = events.SessionLog(status=events.SessionLog.START)
                new.append(event(step=self._purge_step, session_log=start))
        new += [event(step=int(step), summary=summary) for summary in summaries]
        self._started = True
        self._unwritten += map(_record, new)
        self.flush()

    def flush(self) -> None:
        """Writes the values that are not in the file, and restores what other programs removed."""
        change = self._file.change_by_others()
        if self._unwritten or change:
            self._fence()
            if change and not self._restore(change):
                return
            if self._file.write(b"".join(self._unwritten)):
                self._unwritten = []

    def _restore(self, change: str) -> bool:
        whole = self._file.knows_old_content()
        if not self._file.restore(lambda _, before: before if whole else [], self._fence):
            return False
        outcome = "its events were restored" if whole else "its earlier events are lost for good"
        self._log(f"{self._file.path} {change} by another program; {outcome}.")
        return True


def _time_stamp(logdir: Path) -> str:
    """Returns the time in seconds for the name of a new file, later than those in the folder."""
    # TensorBoard reads the files of a folder in the order of their names, and `purge_step` of a
    # file hides steps of the files before it. The clock may have been set back between two starts.
    newest = 0  # in microseconds
    for path in logdir.glob(f"{_PREFIX}*"):
        if found := _STAMP.match(path.name):
            seconds, fraction = found[1], (found[2] or "")[:6].ljust(6, "0")
            newest = max(newest, int(seconds) * 10**6 + int(fraction))
    seconds, fraction = divmod(max(int(time.time() * 10**6), newest + 1), 10**6)
    return f"{seconds:010d}.{fraction:06d}"  # equal lengths, so that names sort by time


def _import_without_torch() -> None:
    """Imports tensorboardX without torch, which it imports if installed (200 MB, 2 seconds)."""
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        importlib.import_module("tensorboardX")
    finally:
        if absent:
            del sys.modules["torch"]


def _proto(name: str) -> ModuleType:
    return importlib.import_module(f"tensorboardX.proto.{name}_pb2")


def _record(event: Any) -> bytes:
    """Returns an event as a TFRecord: length and data, each followed by its masked CRC-32C."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = len(data).to_bytes(8, "little")
    return b"".join(field + masked_crc32c(field).to_bytes(4, "little") for field in (length, data))
