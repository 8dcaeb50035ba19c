"""Exit codes, the error of a user's mistake, text for terminals, and a parser of options.

Imports nothing that takes long.
"""

import argparse
import difflib
from collections.abc import Collection, Iterable, Sequence
from shlex import quote
from typing import IO, Any, NoReturn

# Exit codes. 75 is EX_TEMPFAIL of sysexits.h: start the same command again.
DONE, FAILED, MISTAKE, STOPPED = 0, 1, 2, 75

_MAX_LINES = 7
_MAX_LINE = 400


class UserError(ValueError):
    """A mistake of the user: a command prints it without a traceback and exits with 2.

    A mistake in a config is a `trainer.config.ConfigError`, a UserError with file and line.

    Args:
        message: whole sentences: what was given, what exists, what to do. At most seven lines are
            kept, and control characters are escaped.
    """

    def __init__(self, message: str):
        lines = [_shown(line) for line in message.splitlines() if line.strip()]
        super().__init__("\n".join(lines[:_MAX_LINES]))


def printable(text: str, keep: str = "") -> str:
    r"""Escapes the characters of a text that are not printable, such as "\x1b".

    Names in a config may have any characters, including those that move a terminal's cursor.

    Args:
        text: the text.
        keep: characters that are not escaped, such as "\n".
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Aligns the cells of a table in columns.

    Args:
        rows: the cells of each row; all rows have the same number of cells.
        right: the indices of the columns that are aligned at the right.

    Returns:
        One line for each row, with unprintable characters escaped.

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


def duration(seconds: float) -> str:
    """Formats a duration with two units at most.

    Args:
        seconds: the duration.

    Example:
        >>> duration(0.25), duration(75), duration(8000), duration(200_000)
        ('0.2 s', '1 min 15 s', '2 h 13 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for size, unit, smaller, less in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {less}"
    raise AssertionError("a minute is the smallest size")


class Parser(argparse.ArgumentParser):
    """An argparse parser that prints errors in two lines, and escapes control characters.

    A parser of several commands keeps the name of the one that was given as `command`.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses the arguments; for an unknown one, prints what to write and exits with 2.

        Args:
            args: the arguments; None for those of the process.
            namespace: receives the values; None for a new one.

        Returns:
            The namespace.
        """
        # argparse's own parse_args only lists the unknown arguments, and suggests nothing.
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = getattr(arguments, "command", self.prog.split()[-1])
            command = self._commands().get(name, self)
            command.error(_unknown(name, unknown, command._option_string_actions))
        return arguments

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        groups = self._subparsers._group_actions if self._subparsers else []
        return {name: each for group in groups for name, each in (group.choices or {}).items()}  # type: ignore[attr-defined]

    def error(self, message: str) -> NoReturn:
        """Prints an error and exits with 2, without the usage, which is long.

        Args:
            message: the error, without a full stop.
        """
        self.exit(MISTAKE, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        super()._print_message(printable(message, keep="\n\t"), file)


def _shown(line: str) -> str:
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE - 103]}...{line[-100:]}"
    return printable(line)


def _unknown(command: str, unknown: Sequence[str], options: Iterable[str]) -> str:
    """Returns an error message about unknown arguments, with what to write instead.

    Args:
        command: the command, such as "train".
        unknown: the unknown arguments, such as ["--steps=100"] or ["--steps", "100"].
        options: the options of the command, such as "--set".
    """
    joined: list[str] = []
    for argument in unknown:
        before = joined[-1] if joined else ""
        if before.startswith("--") and "=" not in before and not argument.startswith("-"):
            joined[-1] += f"={argument}"  # "--steps 100"
        else:
            joined.append(argument)
    text = f"{command} does not take {' '.join(unknown)}."
    # Strict, because the default of 0.6 would take --steps for --set.
    near = [difflib.get_close_matches(each.partition("=")[0], options, 1, 0.85) for each in joined]
    if any(near):
        return f"{text} Did you mean {' and '.join(dict.fromkeys(sum(near, [])))}?"
    if "--set" in options and all("=" in each for each in joined):
        settings = " ".join(f"--set {quote(each.lstrip('-'))}" for each in joined)
        return f"{text} To set a value of the config, write {settings}"
    return text
