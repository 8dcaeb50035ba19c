"""Builds the parts of messages: descriptions of values and exceptions, and suggestions."""

import difflib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.tree import Call, Key, Tree


def nearest(word: str, known: Iterable[Key]) -> str | None:
    """Returns the known name with the spelling nearest to a word; None if none is near.

    Example:
        >>> nearest("adamW", ["adam", "adamw", "sgd"])
        'adamw'
    """
    names = {str(name).lower(): str(name) for name in known}
    # Cut, because the time of difflib grows with the product of the lengths.
    close = difflib.get_close_matches(word[:100].lower(), names, n=1)
    return names[close[0]] if close else None


def known_names(word: str, known: Iterable[Key], there_is: str = "There is") -> str:
    """Returns a sentence that suggests the nearest known name, or lists all; "" if there are none.

    Example:
        >>> known_names("widht", ["width", "depth"])
        "Did you mean 'width'?"
        >>> known_names("color", ["width", "depth"], "It has")
        'It has: depth, width.'
    """
    names = sorted(map(str, known))
    if (near := nearest(word, names)) is not None:
        return f"Did you mean {near!r}?"
    return f"{there_is}: {listing(names)}." if names else ""


def listing(names: Sequence[str], most: int = 8) -> str:
    """Joins names by commas; those beyond the first `most` are only counted.

    Example:
        >>> listing(["a", "b", "c"], most=2)
        'a, b, and 1 more'
    """
    shown = ", ".join(name[:100] for name in names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


# bool before int: True is an instance of int.
_KIND = {bool: "boolean", int: "integer", float: "float", str: "string", list: "list", dict: "dict"}


def describe(tree: Tree) -> str:
    """Describes a value in a message.

    Example:
        >>> describe("fast"), describe(Call("optax.adamw"))
        ("the string 'fast'", 'a call of optax.adamw')
    """
    if isinstance(tree, Call):
        return f"the function {tree.name}" if tree.partial else f"a call of {tree.name}"
    if tree is None:
        return "null"
    kind = next((words for of, words in _KIND.items() if isinstance(tree, of)), "value")
    return f"the {kind} {brief(tree)}"


def shorten(text: str, most: int = 60) -> str:
    """Returns a text of limited length; a longer one ends in three dots.

    Example:
        >>> shorten("optax.adamw(b2=0.95)", most=14)
        'optax.adamw...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def brief(tree: Tree, most: int = 60) -> str:
    """Returns a value as one line of limited length; a longer one ends in three dots.

    Example:
        >>> brief(Call("optax.adamw", {"b2": 0.95}))
        'optax.adamw(b2=0.95)'
    """
    return shorten(_brief(tree), most)


def _brief(tree: Tree) -> str:
    if isinstance(tree, Call):
        return f"{'@' if tree.partial else ''}{tree.name}({_items(tree.kwargs, '=', str)})"
    if isinstance(tree, dict):
        return "{" + _items(tree, ": ", repr) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_brief, tree[:9])) + "]"
    return repr(tree[:100]) if isinstance(tree, str) else repr(tree)


def _items(items: Mapping[Any, Tree], sign: str, spell: Callable[[Any], str]) -> str:
    some = list(items.items())[:9]
    return ", ".join(f"{spell(key)}{sign}{_brief(value)}" for key, value in some)


_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
_WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}
# (pattern of a whole line, advice) for each; the first pattern that matches is used.
_IN_GIN = [
    (r"\s*[\w./]+\s*:\s+\S.*|\s*-\s.*", "This looks like YAML, whose files end in .yaml."),
    (
        r".*=.*\b[0-9][0-9_.]*[KMBT]?\s*(%|(step|epoch|example|token)s?\b).*",
        "Put a number of steps with a unit in quotes, as in '5%'.",
    ),
    (rf".*!{_NAME}.*", "A call is written @name.of.function() in Gin."),
    (
        rf".*@{_NAME}\(\s*\w.*",
        "Write arguments on lines of their own, as in models.mlp.width = 64, not in the call.",
    ),
]
_IN_YAML = [
    (r"\s*[\w./]+\s*=\s*\S.*|experiment\s*:\s*", "This looks like Gin, whose files end in .gin."),
    (rf".*!{_NAME}\(.*", "Write arguments in braces, as in !optax.adamw {learning_rate: 1e-3}."),
    (rf".*!{_NAME}\{{.*", "Add a space before the brace."),
    (
        rf".*!{_NAME}\s+[\w']+:\s.*",
        "Write arguments in braces, as in !models.mlp {width: 64}, or on lines of their own below.",
    ),
    (
        rf".*[:,\[]\s+{_NAME}\s*\{{.*",
        "A call begins with an exclamation mark, as in !models.mlp {width: 64}.",
    ),
]


def in_gin(line: str, reason: str) -> tuple[str, str]:
    """Returns why Gin's parser, with message `reason`, cannot read a line, and advice."""
    if (word := re.search(r"malformed node.*Failed to parse token '(.*?)'", reason)) is None:
        if reason.startswith("Expected indentation"):
            return reason, "Indent the bindings of a block below its first line."
        return reason, _first(_IN_GIN, line)
    wrong = f"{word[1]!r} is not a value"
    if word[1].lower() in _WORDS:
        return wrong, f"In Gin it is written {_WORDS[word[1].lower()]}."
    if re.search(rf"(?<![@\w]){re.escape(word[1])}[\w.]*\(", line):
        return wrong, "A call is written @name.of.function() in Gin."
    return wrong, f"Put a string in quotes, {word[1]!r}; a macro is read with %{word[1]}."


def in_yaml(text: str, line: int = 0) -> str:
    """Returns advice for a text that is not valid YAML, or ""; `line` counts from 0."""
    lines = text.split("\n")
    first = next((each for each in lines if each.strip() and not each.startswith("#")), "")
    return _first(_IN_YAML, lines[line]) or _first(_IN_YAML[:1], first)


# Functions with one argument that is a list. That of optax's *args is called args in a config.
_LISTS = {
    "optax.chain": "args",
    "optax.named_chain": "args",
    "space.values": "values",
    "method.explicit": "trials",
}


def list_for_call(tag: str) -> str:
    """Returns the message for a list in place of arguments, as in "!optax.chain [a, b]"."""
    name = _LISTS.get(tag.lstrip("!").removeprefix("partial:"))
    hint = ", with the argument's name" if name is None else ""
    return (
        f"{tag} takes its arguments by name, and was given a list: write {tag}"
        f" {{{name or 'argument'}: [...]}}{hint}."
    )


def _first(hints: list[tuple[str, str]], line: str) -> str:
    # Cut, because the patterns backtrack, and would take long on a long line.
    return next((hint for pattern, hint in hints if re.fullmatch(pattern, line[:200])), "")


_PACKAGE = Path(__file__).parent.parent

# A traceback in the message of an error, and what follows its last frame.
_IN_TEXT = re.compile(
    r'.*^  File "(.+?)", line (\d+), in [^\n]*\n(?:    [^\n]*\n)*(.*)', re.M | re.S
)


def summary(error: BaseException, package: str) -> str:
    """Returns the message of an exception, and the last line of a package in its traceback."""
    # `package` may also be the name of a module or function in it.
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    # The file of a syntax error was never executed, so it is not in the traceback.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}{place(error.filename, error.lineno or 0)}"
    return f"{text.rstrip('.')}{where}" if (where := location(error, package)) else text


def cause(error: BaseException) -> str:
    """Returns the type and the message of an exception on one line, and where it was raised.

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
    if found := _IN_TEXT.fullmatch(str(error)):  # jax passes on those of host callbacks as text
        file, line, text = found.groups()
        where = place(file, line)
    return f"{' '.join(text.split()).rstrip('.: ')}{where}"


def location(error: BaseException, package: str | None = None) -> str:
    """Returns a traceback's last matching line, as " (nets.py:12)"; "" if there is none."""
    # `package` "" matches all lines, and None code of the user, which is neither part of Lockstep
    # nor installed. If no line matches, those of the exception's cause are asked.
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        root = str(frame.f_globals.get("__name__", "")).split(".")[0]
        file = Path(frame.f_code.co_filename)
        wanted = root == package.split(".")[0] if package else is_the_users(root, file)
        if wanted or package == "":
            return place(file, line)
    return "" if error.__cause__ is None else location(error.__cause__, package)


def place(file: str | Path, line: int | str) -> str:
    """Returns a place in the user's code as a message has it: " (nets.py:12)"."""
    path = Path(file)
    with suppress(ValueError, OSError):  # outside of the current folder, or that folder was removed
        path = path.relative_to(Path.cwd())
    return f" ({path}:{line})"


def is_the_users(root: str, file: Path) -> bool:
    """Returns whether a file is the user's; `root` is the first part of its module's name."""
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    # With `python -m trainer` the root of trainer/__main__.py is "__main__", as a script's is.
    ours = root in ("trainer", "optim", "lockstep") or file.parent == _PACKAGE
    known = ours or root in sys.stdlib_module_names
    return not known and not installed and file.exists()
