"""Where in a package of the user's an exception came from, told in a few words."""

import traceback
from pathlib import Path


def told(error: BaseException, package: str) -> str:
    """Returns what an exception says, and the last line of a package that led to it.

    Args:
        error: what was raised.
        package: the name of the package, or of a module or function in it.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename:
        place = (error.filename, error.lineno or 0)
        text = f"{type(error).__name__}: {error.msg}"
    else:
        place = _last_place(error, package.split(".")[0])
    return f"{text.rstrip('.')} ({_shown(place[0])}:{place[1]})" if place else text


def _last_place(error: BaseException, root: str) -> tuple[str, int] | None:
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).split(".")[0] == root
    ]
    return places[-1] if places else None


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
