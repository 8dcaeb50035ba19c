"""Where metrics go: metrics.jsonl, TensorBoard, the console, and clu's own writers by name.

Every writer has the methods of clu's MetricWriter, so that any of clu's plugs in. The only file
that knows clu's writers; nothing is imported before it is used.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.tree import ConfigError
from trainer.metrics_file import RecordFile, encode, number, truncate_after, whole_lines

CLU = ("AsyncMultiWriter", "LoggingWriter", "SummaryWriter", "create_default_writer")
NAMES = ("jsonl", "tensorboard", "console", *(f"clu.{name}" for name in CLU))

Log = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Prints a line of warning."""
    print(line, file=sys.stderr, flush=True)


class Writer:
    """The methods of clu.metric_writers.MetricWriter, each of which does nothing.

    A kind of value that a writer has no place for is left out, as in clu.
    """

    def write_summaries(
        self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Takes raw tensors with the metadata of a TensorBoard plugin."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Takes numbers of a step; several calls of one step add to each other."""

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Takes images [N, H, W, C] or [H, W, C], C 1 or 3, uint8 or floats in [0, 1]."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Takes videos [N, T, H, W, C] or [T, H, W, C]."""

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Takes audios [N, T, C] in [-1, 1]."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Takes texts in markdown."""

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Takes arrays of any shape, to be shown as histograms."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Takes a flat mapping of hyperparameters, once a run."""

    def flush(self) -> None:
        """Writes what is buffered."""

    def close(self) -> None:
        """Flushes and closes."""


class JsonlWriter(Writer):
    """Writes scalars to metrics.jsonl, one line a step.

    Values of one step are merged until another step comes or flush() is called; what comes for the
    last written step after that is merged into its line.

    Args:
      path: the file, or a workdir.
      log: takes a line of warning when the disk is full; values are kept meanwhile.
      fence: called before anything is written; what it raises is raised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log: Log = to_stderr,
        fence: Callable[[], None] | None = None,
    ) -> None:
        path = Path(path)
        self.path = path / "metrics.jsonl" if path.is_dir() else path
        self._file = RecordFile(self.path, whole_lines, log)
        self._fence = fence
        self._pending: dict[int, dict[str, Any]] = {}
        self._last: tuple[int, dict[str, Any], int] | None = None  # step, values, offset of line

    @property
    def error(self) -> str | None:
        """Why the newest values are not in the file, or None."""
        return self._file.error

    def truncate_after(self, step: int) -> int:
        """Drops the lines of later steps and torn ones, before anything is written.

        Returns how many lines were dropped. The run that goes on from `step` writes them again.
        """
        if self._fence is not None:
            self._fence()
        self._file.close()
        self._last = None
        return truncate_after(self.path, step)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Merges scalars into the line of a step; raises ValueError for what is no real number."""
        values = {name: number(name, value) for name, value in scalars.items()}
        if self._pending and step not in self._pending:
            self.flush()
        self._pending.setdefault(int(step), {}).update(values)

    def flush(self) -> None:
        """Writes the pending lines to the file."""
        if not self._pending:
            return
        if self._fence is not None:
            self._fence()
        lines, at = self._pending, None
        if self._last is not None and self._last[0] in lines:
            step, values, at = self._last
            lines = {step: values | lines[step]} | {s: v for s, v in lines.items() if s != step}
        encoded = [encode(step, values) for step, values in lines.items()]
        if self._file.write(b"".join(encoded), at):
            last = next(reversed(lines))
            self._last = (last, lines[last], self._file.end - len(encoded[-1]))
            self._pending = {}

    def close(self) -> None:
        """Writes the pending lines and closes the file."""
        self.flush()
        self._file.close()


class MultiWriter(Writer):
    """Hands everything to several writers; when one raises, the others get theirs all the same."""

    def __init__(self, writers: Sequence[Any]) -> None:
        self.writers = tuple(writers)

    @property
    def error(self) -> str | None:
        """Why a writer could not write its newest values, or None."""
        errors = (getattr(writer, "error", None) for writer in self.writers)
        return next((error for error in errors if error), None)

    def write_summaries(
        self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._each("write_summaries", step, values, metadata)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._each("write_scalars", step, scalars)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        self._each("write_images", step, images)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        self._each("write_videos", step, videos)

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        self._each("write_audios", step, audios, sample_rate=sample_rate)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._each("write_texts", step, texts)

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        self._each("write_histograms", step, arrays, num_buckets)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._each("write_hparams", hparams)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
        first: Exception | None = None
        for writer in self.writers:
            try:
                getattr(writer, method)(*args, **kwargs)
            except Exception as e:
                first = first or e
        if first is not None:
            raise first


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no writer's, or whose package is not installed."""
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"There is no writer {name!r}.{hint} There are {', '.join(NAMES)}.")
        if name.startswith("clu.") and not _has_tensorflow():
            raise ConfigError(
                f"The writer {name!r} is clu's own and needs TensorFlow, which is not installed. "
                "Install the extra with `pip install lockstep[tensorflow]`, or use the writer "
                "'tensorboard', which writes the same files without it."
            )


def _has_tensorflow() -> bool:
    try:
        return importlib.util.find_spec("tensorflow") is not None
    except ValueError:  # it is marked as absent
        return False


def create_clu(name: str, logdir: str | os.PathLike[str]) -> Any:
    """Makes one of clu's own writers, as "clu.SummaryWriter"; raises ConfigError."""
    check_names([name])
    try:
        clu = importlib.import_module("clu.metric_writers")
    except ImportError as e:
        raise ConfigError(
            f"The writer {name!r} is clu's own, and clu's writers cannot be imported: {e}. "
            "Install the extra with `pip install lockstep[tensorflow]`."
        ) from e
    logdir = os.fspath(logdir)
    if name == "clu.LoggingWriter":
        return clu.LoggingWriter()
    if name == "clu.AsyncMultiWriter":
        return clu.AsyncMultiWriter([clu.SummaryWriter(logdir)])
    return getattr(clu, name.removeprefix("clu."))(logdir)


def create(
    names: Sequence[str],
    workdir: str | os.PathLike[str],
    *,
    resumed: int | None = None,
    total_steps: int | None = None,
    batch_size: int | None = None,
    log: Log = to_stderr,
    fence: Callable[[], None] | None = None,
) -> MultiWriter:
    """Makes the writers of a run by name; metrics.jsonl is always the first of them.

    Args:
      names: out of NAMES; "jsonl" may be left out.
      workdir: where the files go.
      resumed: the step that was restored; what was logged of later steps is dropped from
        metrics.jsonl and hidden in TensorBoard. 0 for a run that begins anew in an old workdir.
      total_steps: for the console's ETA.
      batch_size: for the console's examples per second.
      log: takes lines of warning.
      fence: called before anything is written; what it raises is raised.

    Raises ConfigError.
    """
    check_names(names)
    jsonl = JsonlWriter(workdir, log=log, fence=fence)
    if resumed is not None:
        jsonl.truncate_after(resumed)
    writers: list[Any] = [jsonl]
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            from trainer.event_files import TensorBoardWriter

            purge = None if resumed is None else resumed + 1
            writers.append(TensorBoardWriter(workdir, purge_step=purge, log=log, fence=fence))
        elif name == "console":
            from trainer.console import ConsoleWriter

            writers.append(ConsoleWriter(total_steps, batch_size, first_step=resumed or 0))
        elif name != "jsonl":
            writers.append(create_clu(name, workdir))
    return MultiWriter(writers)
