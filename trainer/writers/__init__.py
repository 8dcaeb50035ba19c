"""Where metrics go: metrics.jsonl, TensorBoard, the console, loggers, and clu's writers by name.

Start with `create`. A run calls only methods that clu's MetricWriter also has, so that any of clu's
writers can be used. Only this package imports tensorboardX, wandb, mlflow and clu's writers, and
only when a run uses them.
"""
# ruff: noqa: F401  # what other packages import from here; users import lockstep

import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.tree import ConfigError
from trainer.writers.base import Log, MultiWriter, Writer, to_stderr
from trainer.writers.console import ConsoleWriter
from trainer.writers.files import Fence
from trainer.writers.lines import JsonlWriter, Lost, iterate_metrics, read_metrics, truncate_after
from trainer.writers.loggers import (
    LOGGERS,
    Logger,
    LoggerWriter,
    Reporter,
    RunIdentity,
    identity_of_run,
    identity_of_trial,
)
from trainer.writers.tensorboard import TensorBoardWriter

CLU = ("AsyncMultiWriter", "LoggingWriter", "SummaryWriter", "create_default_writer")
NAMES = ("jsonl", "tensorboard", "console", *LOGGERS, *(f"clu.{name}" for name in CLU))


def is_console(name: str) -> bool:
    """Returns whether a writer is the terminal: "console", or "console:grad_norm,speed", say."""
    return name.partition(":")[0] == "console"


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError if a writer does not exist, or its package is not installed."""
    for name in names:
        if name not in NAMES and not is_console(name):
            near = difflib.get_close_matches(name, NAMES, 1, 0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"There is no writer {name!r}.{hint} There are {', '.join(NAMES)}.")
        if name in LOGGERS and not _has(LOGGERS[name]):
            raise ConfigError(
                f"The writer {name!r} needs the package {LOGGERS[name]}, which is not installed. "
                f"Install the extra with `pip install lockstep-jax[{name}]`, or remove the writer."
            )
        if name.startswith("clu.") and not _has("tensorflow"):
            raise ConfigError(
                f"The writer {name!r} is clu's own and needs TensorFlow, which is not installed. "
                "Install the extra with `pip install lockstep-jax[tensorflow]`, or use the writer "
                "'tensorboard', which writes the same files without it."
            )


def _has(package: str) -> bool:
    try:
        # Do not import it to find out: clu's writers import TensorFlow, in 9.6 s and 694 MB.
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules marks it as absent
        return False


def create_clu(name: str, logdir: str | os.PathLike[str]) -> Any:
    """Returns a writer of clu, such as "clu.SummaryWriter"; raises ConfigError if it cannot."""
    try:
        clu = importlib.import_module("clu.metric_writers")
    except ImportError as e:
        raise ConfigError(
            f"The writer {name!r} is clu's own, and clu's writers cannot be imported: {e}. "
            "Install the extra with `pip install lockstep-jax[tensorflow]`."
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
    fence: Fence = None,
    lost: Lost | None = None,
    also: Sequence[Writer] = (),
    identity: Callable[[], RunIdentity] | None = None,
    reporter: Reporter | None = None,
) -> MultiWriter:
    """Returns the writers of a run; metrics.jsonl is always the first of them.

    Example:
        >>> import tempfile
        >>> from trainer import writers
        >>> with tempfile.TemporaryDirectory() as workdir:
        ...     writer = writers.create([], workdir)
        ...     writer.write_scalars(1, {"train/loss": 0.5})
        ...     writer.close()
        ...     writers.read_metrics(workdir)
        [{'step': 1, 'train/loss': 0.5}]
    """
    # Rows after the step `resumed` are dropped from metrics.jsonl and hidden in TensorBoard; 0 is
    # for a run that starts from scratch in an old workdir. `fence` is called before every write; it
    # raises if this process must not write any more. `lost` is told of rows that are lost, and
    # `identity` returns what loggers call the run. Raises OSError if metrics.jsonl cannot be read.
    check_names(names)
    jsonl = JsonlWriter(workdir, log=log, fence=fence, lost=lost)
    if resumed is not None:
        jsonl.truncate_after(resumed)
    writers: list[Any] = [jsonl]
    last = resumed or 0  # the last step of an earlier process
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            purge = None if resumed is None else resumed + 1  # the first step of this process
            writers.append(TensorBoardWriter(workdir, purge_step=purge, log=log, fence=fence))
        elif is_console(name):
            more = [each for each in name.partition(":")[2].split(",") if each]
            writers.append(ConsoleWriter(total_steps, batch_size, more=more, first_step=last))
        elif name in LOGGERS:
            identity = identity or (lambda: identity_of_run(Path(workdir), {}))
            reporter = reporter or Reporter(log)
            make = partial(_make_logger, name, identity, reporter)
            rows = jsonl.path
            writers.append(LoggerWriter(name, make, reporter, rows=rows, resumed=last, fence=fence))
        elif name != "jsonl":
            writers.append(create_clu(name, workdir))
    return MultiWriter([*writers, *also])


def _make_logger(name: str, identity: Callable[[], RunIdentity], reporter: Reporter) -> Logger:
    if name == "wandb":
        from trainer.writers.wandb_logger import WandbLogger

        return WandbLogger(identity(), reporter)
    from trainer.writers.mlflow_logger import MlflowLogger

    return MlflowLogger(identity(), reporter)
