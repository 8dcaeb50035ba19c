"""Describes an exception and the line of the user's code that raised it."""

import re
import sys
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent

# A traceback in the message of an error, and what follows its last frame.
_IN_TEXT = re.compile(
    r'.*^  File "(.+?)", line (\d+), in [^\n]*\n(?:    [^\n]*\n)*(.*)', re.M | re.S
)


def summary(error: BaseException, package: str) -> str:
    """Returns the message of an exception, and the last line of a package in its traceback.

    Args:
        error: the exception.
        package: the name of the package, or of a module or function in it.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    # The file of a syntax error was never executed, so it is not in the traceback.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_shown(error.filename)}:{error.lineno or 0})"
    where = location(error, package)
    return f"{text.rstrip('.')}{where}" if where else text


def cause(error: BaseException) -> str:
    """Returns the type and the message of an exception on one line, and where it was raised.

    That is the last line of the user's code, or the last line if the user's code has no part in it.

    Args:
        error: the exception. jax passes on that of a host callback as text, with its traceback; the
            result is then about the latter.

    Example:
        >>> def fail():
        ...     raise ValueError("It is too large.")
        >>> try:
        ...     fail()
        ... except ValueError as error:
        ...     print(cause(error))  # doctest: +ELLIPSIS
        ValueError: It is too large (...:2)
    """
    text = f"{type(error).__name__}: {error}"
    where = location(error) or location(error, "")
    if found := _IN_TEXT.fullmatch(str(error)):
        file, line, text = found.groups()
        where = f" ({_shown(file)}:{line})"
    return f"{' '.join(text.split()).rstrip('.: ')}{where}"


def location(error: BaseException, package: str | None = None) -> str:
    """Returns the last matching line of a traceback, as " (nets.py:12)"; "" if there is none.

    Args:
        error: the exception.
        package: the package whose lines match; "" matches all lines, and None code of the user,
            which is neither part of Lockstep nor installed.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        root = str(frame.f_globals.get("__name__", "")).split(".")[0]
        file = Path(frame.f_code.co_filename)
        wanted = root == package.split(".")[0] if package else _is_the_users(root, file)
        if wanted or package == "":
            return f" ({_shown(file)}:{line})"
    return ""


def _is_the_users(root: str, file: Path) -> bool:
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    # With `python -m trainer` the root of trainer/__main__.py is "__main__", as a script's is.
    ours = root in ("trainer", "optim", "lockstep") or file.parent == _PACKAGE
    known = ours or root in sys.stdlib_module_names
    return not known and not installed and file.exists()


def _shown(file: str | Path) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # outside of the current folder, or that folder was removed
        return str(path)
