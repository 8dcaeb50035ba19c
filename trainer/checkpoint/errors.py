"""The errors of this package, and one-line descriptions of them and of errors of the disk."""

import errno
import os
import re
from collections.abc import Sequence

# Errors that mean that a file is missing, which trying again cannot change.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be used or does not exist."""


class UnlikeCheckpoint(CheckpointError):
    """Raised if a checkpoint has other leaves than the program."""


class CorruptCheckpoint(CheckpointError):
    """Raised if the files of a checkpoint are not as they were saved; not for a failing disk."""

    # The message is a part of a sentence; `problems` has a line for each damaged leaf or file.

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)


def system_error(error: BaseException) -> OSError | None:
    """Returns the OSError behind an error, or None if the system did not report one."""
    # The text of an error of tensorstore names the number of the system's error.
    if isinstance(error, OSError):
        return error
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # as tensorstore writes it
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return None


def means_absent(error: OSError) -> bool:
    """Returns whether an error means that there is no such file, also by a link to itself."""
    return isinstance(error, ABSENT) or error.errno == errno.ELOOP


def one_line(error: BaseException) -> str:
    """Describes an error in one line of at most 200 characters, without a full stop."""
    # An error of the operating system is described by the system's own text, such as "No space left
    # on device"; any other by the first line of its message.
    system = system_error(error)
    if system is not None and system.errno:
        return os.strerror(system.errno)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 200 else lines[0][:197] + "..."
