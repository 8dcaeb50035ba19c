"""Writes any text as LaTeX that pdfLaTeX sets, with the characters as they are."""

import re
from collections.abc import Sequence

from trainer.messages import printable

_ASCII = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "-": "-{}",  # two would be a dash
    "[": "{[}",  # after \\ it would begin an argument, as would *
    "]": "{]}",
    "*": "{*}",
    ",": ",{}",  # two, as ! and ? before `, would be another character
    "!": "!{}",
    "?": "?{}",
}
_MATH = {
    "−": "-",
    "±": r"\pm",
    "×": r"\times",
    "·": r"\cdot",
    "≤": r"\leq",
    "≥": r"\geq",
    "≈": r"\approx",
    "≠": r"\neq",
    "→": r"\rightarrow",
    "←": r"\leftarrow",
    "∞": r"\infty",
    "Δ": r"\Delta",
    "Σ": r"\Sigma",
    "Ω": r"\Omega",
    "ϵ": r"\epsilon",
    "ϕ": r"\phi",
    "µ": r"\mu",  # the micro sign, which is not the Greek letter
} | dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψω",
        (
            rf"\{name}"
            for name in (
                "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi pi "
                "rho sigma tau upsilon varphi chi psi omega"
            ).split()
        ),
        strict=True,
    )
)
_MATH |= {chr(0x2080 + digit): f"_{digit}" for digit in range(10)}
_TYPES = {"–": "--", "—": "---", "‘": "`", "’": "'", "“": "``", "”": "''", "…": r"\ldots{}"}
_PART = r".+?(?:\s+|(?<=\w)[./=_-](?=[^\W\d_])|$)"  # of a text, after which a line may end
# Letters below U+0180 that no font of pdfLaTeX's usual encoding, T1, has.
_MISSING = "\u0126\u0127\u0138\u013f\u0140\u0149\u0166\u0167\u017f"


def tex(text: str) -> str:
    r"""Returns a text in one line, as LaTeX shows it with pdfLaTeX and the T1 encoding.

    A character that pdfLaTeX has no font for is written as its number, such as U+4E2D.

    Args:
        text: any text, such as the name of an arm.

    Example:
        >>> tex("a_b & 100% #1"), tex("β≥中")
        ('a\\_b \\& 100\\% \\#1', '$\\beta$$\\geq$U+4E2D')
    """
    return _plain(" ".join(text.split()))


def wrapped(text: str, width: int) -> list[str]:
    """Returns the lines of a text: as few as possible, and then as short as possible.

    It is broken at spaces, and in names and paths after a point, slash, sign or underscore. A line
    is longer than `width` only if it has no such place.

    Args:
        text: plain text.
        width: characters of a line.

    Example:
        >>> wrapped("optimizer.learning_rate.peak_value", 24)
        ['optimizer.learning_', 'rate.peak_value']
        >>> wrapped("log_uniform 0.0001 to 0.01", 24)
        ['log_uniform', '0.0001 to 0.01']
    """
    parts = re.findall(_PART, " ".join(text.split()))
    lines = _filled(parts, width)
    narrower = (_filled(parts, each) for each in range(1, width))
    return next((each for each in narrower if len(each) == len(lines)), lines)


def _filled(parts: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def prose(text: str) -> str:
    """Returns a paragraph as LaTeX, with what stands between backticks as code.

    Args:
        text: the paragraph.
    """
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    return "".join(
        f"\\texttt{{{_plain(part)}}}" if index % 2 else _plain(part)
        for index, part in enumerate(parts)
    )


def _plain(text: str) -> str:
    return "".join(map(_character, printable(text)))


def _character(c: str) -> str:
    if c in _MATH:
        return f"${_MATH[c]}$"
    if c.isascii():
        return _ASCII.get(c, c)
    known = "\u00a0" < c < "\u0180" and c not in _MISSING
    return _TYPES.get(c, c if known else f"U+{ord(c):04X}")
