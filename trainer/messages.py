"""Exit codes, the errors of a user's mistake, and text for terminals."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

# Exit codes. 75 is EX_TEMPFAIL of sysexits.h: start the same command again.
DONE, FAILED, MISTAKE, STOPPED = 0, 1, 2, 75

_TRACED = re.compile(
    r"\.?\s(?:The error occurred while tracing|The problem arose with)(?s:.*?)See https://docs.jax\S+"
)
_UNKNOWN_VALUE = (
    ". No value is known while a step is compiled: write jnp.where in place of an if, and leave"
    " out float() and numpy"
)
_MAX_LINES = 12
_MAX_LINE = 800  # long folders leave room for the words


class UserError(ValueError):
    """A mistake of the user: a command prints it without a traceback and exits with 2.

    A mistake in a config is a `trainer.config.ConfigError`, a UserError with file and line. The
    message is whole sentences: what was given, what exists, what to do. At most twelve lines of
    it are kept, and control characters are escaped. What jax says of how it traced is left out.
    """

    def __init__(self, message: str):
        message = _TRACED.sub(_UNKNOWN_VALUE, message)
        lines = [_shown(line) for line in message.splitlines() if line.strip()]
        super().__init__("\n".join(lines[:_MAX_LINES]))

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook prints in place of a hundred lines of traceback."""
        return [f"{type(self).__name__}: {self}"]


@contextmanager
def refuse_os_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Raises UserError for an OSError within: the problem, its reason, and advice."""
    try:
        yield
    except OSError as error:
        reason = f"{problem}: {error.strerror or error}."
        raise UserError(f"{reason} {advice}".rstrip()) from error


def check_positive(function: str, **numbers: int | None) -> None:
    """Raises ValueError if one of the numbers, which are arguments of a function, is below 1."""
    for argument, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{function} needs {argument} to be at least 1, but got {number}.")


def printable(text: str, keep: str = "") -> str:
    """Escapes characters that are not printable, except those in `keep`."""
    # Names in a config may have any characters, including those that move a terminal's cursor.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Aligns the cells of a table in columns, those with an index in `right` at the right.

    All rows must have the same number of cells. Returns one line for each row, with unprintable
    characters escaped.

    Example:
        >>> table([("group", "parameters"), ("hidden", "64")], right=[1])
        ['group   parameters', 'hidden          64']
    """
    cells = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def joined(words: Sequence[str], most: int | None = None) -> str:
    """Returns words, if there are any, as an enumeration; counts those after the first `most`.

    Example:
        >>> joined(["a", "b", "c"]), joined(["a", "b", "c"], most=2)
        ('a, b and c', 'a, b and 1 other')
    """
    if most is not None and len(words) > most:
        words = [*words[:most], plural(len(words) - most, "other")]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def started() -> list[str]:
    """Returns how a user started this process, such as ["lockstep"]; [] if not by our command."""
    argv = sys.orig_argv
    if "trainer" in argv and argv[argv.index("trainer") - 1] == "-m":
        return argv[: argv.index("trainer") + 1]
    return ["lockstep"] if os.path.basename(sys.argv[0]) == "lockstep" else []


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun, whose plural ends in "s", "es" after "ch", or "ries".

    Example:
        >>> plural(1, "step"), plural(1000, "step"), plural(5, "search"), plural(2, "try")
        ('1 step', '1,000 steps', '5 searches', '2 tries')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    noun = noun.removesuffix("y") + "ie" if ending and noun.endswith("ry") else noun
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Formats a duration with two units at most.

    Example:
        >>> duration(0.25), duration(75), duration(8000), duration(200_000)
        ('0.2 s', '1 min 15 s', '2 h 13 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    sizes = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
    size, unit, smaller, less = next(each for each in sizes if seconds >= each[0])
    return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {less}"


def _shown(line: str) -> str:
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE - 103]}...{line[-100:]}"
    return printable(line)
