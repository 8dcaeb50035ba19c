"""Says whether the disk, the memory, another worker or a trial caused an exception in a worker."""

import os
from pathlib import Path

import jax

from trainer.checkpoint import CheckpointError
from trainer.checkpoint.errors import ABSENT
from trainer.data.shards import DataChanged
from trainer.messages import UserError
from trainer.train.rows import MetricsError
from trainer.workdir import WorkdirTakenOver
from trainer.writers.json_files import DamagedFile


def is_disk_error(error: BaseException) -> bool:
    """Returns whether files could not be read or written, which may work at a later start."""
    # A UserError counts by the error of the system that caused it, unless that says that something
    # does not exist or is of another kind.
    if isinstance(error, UserError) and not isinstance(error.__cause__, ABSENT):
        return isinstance(error.__cause__, OSError)
    return isinstance(error, OSError | MetricsError | CheckpointError)


def damage_in(folder: Path, error: BaseException) -> str:
    """Returns what is wrong with a file in `folder`; "" if the error has another cause."""
    if isinstance(error, DamagedFile) and error.file.is_relative_to(folder):
        return error.fault
    kinds = (IsADirectoryError, NotADirectoryError, FileExistsError)
    if isinstance(error, kinds) and Path(os.fsdecode(error.filename or "")).is_relative_to(folder):
        return f"{error.filename} is damaged ({error.strerror})"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether trials do not fit into the memory of the host or of a device."""
    out_of = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return out_of or isinstance(error, MemoryError)


def is_takeover(error: BaseException) -> bool:
    """Returns whether another process has taken a wave over from this one."""
    return isinstance(error, WorkdirTakenOver) or isinstance(error.__cause__, WorkdirTakenOver)


def is_trial_error(error: BaseException) -> bool:
    """Returns whether the code of a trial, such as its data set or hook, raised an error."""
    # The error is one that was raised while the trial was advanced.
    of_others = (is_disk_error, is_out_of_memory, is_takeover)
    others = isinstance(error, jax.errors.JaxRuntimeError | DamagedFile | DataChanged)
    return not (others or any(is_of(error) for is_of in of_others))
