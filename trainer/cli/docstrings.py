"""Reads docstrings in Google's style, ours and optax's: the formulas and the references."""

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(
    r"^(Args|Arguments|Returns?|Raises|Examples?|References?|Notes?|Attributes|Yields|Usage"
    r"|\.\. (note|warning|seealso)::?)[^\n]*:?[ ]*$",
    re.MULTILINE,
)
_REFERENCES = re.compile(r"^References?:(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARXIV = re.compile(r"arxiv\.org/(?:abs|pdf)/(\d{4}\.\d{4,5})")
_YEAR = re.compile(r"\b(?:19|20)\d\d\b")

# Commands of LaTeX, and what stands for them; another command stands for itself, without its mark.
_SYMBOLS = {
    **dict.fromkeys(("leftarrow", "gets"), "<-"),
    **dict.fromkeys(("rightarrow", "to"), "->"),
    **dict.fromkeys(("cdot", "times", "odot"), "*"),
    **dict.fromkeys(("leq", "le"), "<="),
    **dict.fromkeys(("geq", "ge"), ">="),
    **dict.fromkeys(("ldots", "dots"), "..."),
    **dict.fromkeys(("left", "right", "big", "Big", "bigg", "Bigg", "limits", "displaystyle"), ""),
    **dict.fromkeys((",", ";", ":", "!", " ", "quad", "qquad"), " "),
    "neq": "!=",
    "|": "||",
    "\\": "\n",
}
_UPRIGHT = ("text", "texttt", "textbf", "mathrm", "mathcal", "boldsymbol", "operatorname")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[{}]|[^\\{}]+")


class PaperReference(NamedTuple):
    """A work that a docstring refers to."""

    text: str  # the reference on one line, with its address
    short: str  # its first authors, and its number in arXiv or its year


def summary_of(doc: str) -> str:
    r"""Returns the first sentence of a docstring, without marks, on one line.

    Example:
        >>> summary_of("The Lion optimizer.\n\nLion is discovered by symbolic program search.")
        'The Lion optimizer.'
    """
    return re.split(r"(?<=[\w)]\.) (?=[A-Z])", without_marks(doc.partition("\n\n")[0]))[0]


def rule(doc: str) -> str:
    r"""Returns the formulas of a docstring as plain text, or else its second paragraph.

    A formula in LaTeX is written with ASCII characters: its commands become words.

    Example:
        >>> print(rule("Steps.\n\nOne step is\n\n    W <- W - learning_rate * G\n\nArgs:"))
        One step is
          W <- W - learning_rate * G
        >>> print(rule("Steps.\n\n.. math::\n  m_t \\leftarrow \\beta_1 {g_t}^2\n\nArgs:"))
        m_t <- beta_1 (g_t)^2
    """
    header = _HEADER.search(doc)
    body = doc[: header.start()] if header else doc
    _, _, body = body.partition("\n\n")
    if formulas := list(_formulas(body)):
        return "\n\n".join(formulas)
    first = next((each for each in body.split("\n\n") if each.strip()), "")
    return textwrap.fill(without_marks(first), 96)


def _formulas(body: str) -> Iterator[str]:
    """Yields the formulas (indented blocks) of a text, LaTeX as plain text."""
    # A formula that is not LaTeX comes with what leads to it.
    before = ""
    for block in re.split(r"\n[ ]*\n(?=\S|[ ]+\S)", body):
        if block.startswith(".. math::"):
            before = ".. math::"
            block = block.removeprefix(".. math::").strip("\n")
        if before == ".. math::":
            if block.strip():
                yield plain_math(block)
                before = ""
        elif block.startswith(" ") and re.search(r"<-|=", block) and ">>>" not in block:
            has_lead = bool(before) and not before.endswith(".")
            lead = textwrap.fill(without_marks(before), 96) + "\n" if has_lead else ""
            formula = textwrap.dedent(block).strip("\n")
            yield f"{lead}{textwrap.indent(formula, '  ' if lead else '')}"
            before = ""
        else:
            before = block.strip()


def plain_math(text: str) -> str:
    r"""Returns a formula in LaTeX with ASCII characters, a line for each of its lines.

    Example:
        >>> plain_math(r"u_t &\leftarrow -\alpha_t \frac{\hat{m}_t}{\sqrt{v_t} + \epsilon}")
        'u_t <- -alpha_t (hat(m)_t) / (sqrt(v_t) + epsilon)'
    """
    text = re.sub(r"\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\})?", "", text).replace("&", "")
    plain = _plain(_TOKEN.findall(" ".join(text.split()))[::-1])
    plain = re.sub(r"(?<=[a-z]) (?=[_^'])", "", plain)
    lines = (re.sub(r" {2,}", " ", line).strip() for line in plain.split("\n"))
    return "\n".join(line for line in lines if line)


def _plain(tokens: list[str]) -> str:
    """Takes the tokens up to a closing brace, or all, and returns them as plain text."""
    # The next token is the last one of the list, from which it is taken away.

    def group() -> str | None:  # in braces; None if the next token begins none
        if tokens and not tokens[-1].strip():
            tokens.pop()
        if not tokens or tokens[-1] != "{":
            return None
        tokens.pop()
        return _plain(tokens).strip()

    found = ""
    while tokens and (token := tokens.pop()) != "}":
        name = token[1:]
        if token == "{":
            inner = _plain(tokens).strip()
            found += inner if len(inner) <= 1 or _is_wrapped(inner) else f"({inner})"
        elif not token.startswith("\\"):
            found += token
        elif name in _SYMBOLS or not name.isalpha():  # or an escaped character
            found += _SYMBOLS.get(name, name)
        elif (first := group()) is None:
            found += f"{name} "
        elif name == "frac":
            parts = first, group() or ""
            found += " / ".join(part if _is_wrapped(part) else f"({part})" for part in parts)
        else:
            found += first if name in _UPRIGHT else f"{name}({first})"
    return found


def _is_wrapped(text: str) -> bool:
    """Returns whether a text is one pair of parentheses with what is inside."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return character == ")" and index == len(text) - 1
    return False


def references(doc: str) -> list[PaperReference]:
    r"""Returns what a docstring refers to in its section of references, the first one first.

    Example:
        >>> work = "Chen et al, `Lion <https://arxiv.org/abs/2302.06675>`_, 2023"
        >>> (found,) = references(f"The Lion optimizer.\n\nReferences:\n  {work}")
        >>> found.text
        'Chen et al, Lion, https://arxiv.org/abs/2302.06675, 2023'
        >>> found.short
        'Chen et al. arXiv:2302.06675'
    """
    if (found := _REFERENCES.search(doc)) is None:
        return []
    # optax separates works by empty lines, and we by semicolons.
    works = [each for each in re.split(r"\n[ ]*\n|;\s+(?=[A-Z])", found[1]) if each.strip()]
    listed = []
    for text in map(without_marks, works):
        named = re.sub(r"^Algorithms?\b.*?\bof\s+", "", text)  # of a book
        name = re.split(r"[,:(]|\bet al\b", named)[0].strip(" .")
        name += " et al." if re.search(r"\bet al\b", text) else ""
        number, years = _ARXIV.search(text), _YEAR.findall(text)
        if number:
            name = "" if name.startswith("http") else f"{name} "  # some name the address only
            listed.append(PaperReference(text, f"{name}arXiv:{number[1]}"))
        else:
            listed.append(PaperReference(text, f"{name} {years[-1]}" if years else name))
    return listed


def without_marks(text: str) -> str:
    """Returns a text of reStructuredText on one line, without its marks.

    Example:
        >>> without_marks("See :func:`optax.adam` and `Adam <https://arxiv.org/abs/1412.6980>`_")
        'See optax.adam and Adam, https://arxiv.org/abs/1412.6980'
    """
    text = " ".join(text.split())
    text = re.sub(r":math:`([^`]*)`", lambda found: plain_math(found[1]), text)
    text = re.sub(r":\w+:`~?([^`<]+?)(?: *<[^`]*>)?`", r"\1", text)
    text = re.sub(r"[`']?([^`<]+?)\s*<(http[^`>]*|www[^`>]*)>_?`?_{0,2}", r"\1, \2", text)
    text = re.sub(r"\[([^\]]*)\]\((https?://[^)]*)\)", r"\1, \2", text)
    return re.sub(r",?`|,(?=,)", "", text)
