"""Where metrics go: metrics.jsonl, TensorBoard, the console, and clu's own writers by name.

Every writer has the methods of clu's MetricWriter, so that any of clu's plugs in. The only room
that knows tensorboardX and clu's writers; neither is imported before it is used.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

from trainer.config.tree import ConfigError
from trainer.writers.base import Log, MultiWriter, Writer, to_stderr
from trainer.writers.console import ConsoleWriter
from trainer.writers.jsonl import JsonlWriter, Lost
from trainer.writers.lines import iterate_metrics, read_metrics, truncate_after
from trainer.writers.tensorboard import TensorBoardWriter

__all__ = [
    "NAMES",
    "ConsoleWriter",
    "JsonlWriter",
    "MultiWriter",
    "TensorBoardWriter",
    "Writer",
    "check_names",
    "create",
    "create_clu",
    "iterate_metrics",
    "read_metrics",
    "truncate_after",
]

CLU = ("AsyncMultiWriter", "LoggingWriter", "SummaryWriter", "create_default_writer")
NAMES = ("jsonl", "tensorboard", "console", *(f"clu.{name}" for name in CLU))


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
    lost: Lost | None = None,
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
      lost: takes a sentence and a number when rows of metrics.jsonl are gone for good.

    Raises ConfigError; OSError where metrics.jsonl cannot be read or cut.
    """
    check_names(names)
    jsonl = JsonlWriter(workdir, log=log, fence=fence, lost=lost)
    if resumed is not None:
        jsonl.truncate_after(resumed)
    writers: list[Any] = [jsonl]
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            purge = None if resumed is None else resumed + 1
            writers.append(TensorBoardWriter(workdir, purge_step=purge, log=log, fence=fence))
        elif name == "console":
            writers.append(ConsoleWriter(total_steps, batch_size, first_step=resumed or 0))
        elif name != "jsonl":
            writers.append(create_clu(name, workdir))
    return MultiWriter(writers)
