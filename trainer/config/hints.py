"""Says what may have been meant by a line that no parser can read."""

import re

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
_WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_IN_GIN = [
    (r"\s*[\w./]+\s*:\s+\S.*|\s*-\s.*", "This looks like YAML, whose files end in .yaml."),
    (
        r".*=.*\b[0-9][0-9_.]*\s*(%|steps?\b|epochs?\b|examples?\b).*",
        "A number of steps with a unit stands in quotes, as in '5%'.",
    ),
    (rf".*!{_NAME}.*", "A call is written @name.of.function() in Gin."),
    (
        rf".*@{_NAME}\(\s*\w.*",
        "Arguments stand in lines of their own, as in models.mlp.width = 64, and not in the call.",
    ),
]
_IN_YAML = [
    (r"\s*[\w./]+\s*=\s*\S.*|experiment\s*:\s*", "This looks like Gin, whose files end in .gin."),
    (
        rf".*!{_NAME}\(.*",
        "Arguments stand in braces, as in !optax.adamw {learning_rate: 1e-3}.",
    ),
    (rf".*!{_NAME}\{{.*", "A space is missing before the brace."),
    (
        rf".*!{_NAME}\s+[\w']+:\s.*",
        "Arguments stand in braces, as in !models.mlp {width: 64}, or in lines of their own below.",
    ),
    (
        rf".*[:,\[]\s+{_NAME}\s*\{{.*",
        "A call begins with an exclamation mark, as in !models.mlp {width: 64}.",
    ),
]


def in_gin(line: str, reason: str) -> tuple[str, str]:
    """Returns why Gin's parser cannot read a line, in words for a user, and what to do.

    Args:
        line: the line.
        reason: what the parser says.
    """
    word = re.search(r"malformed node.*Failed to parse token '(.*?)'", reason)
    if word is None:
        if reason.startswith("Expected indentation"):
            return reason, "The bindings of a block are indented below its first line."
        return reason, _first(_IN_GIN, line)
    wrong = f"{word[1]!r} is no value"
    if word[1].lower() in _WORDS:
        return wrong, f"In Gin it is written {_WORDS[word[1].lower()]}."
    if re.search(rf"(?<![@\w]){re.escape(word[1])}[\w.]*\(", line):
        return wrong, "A call is written @name.of.function() in Gin."
    return wrong, f"Put a string in quotes, {word[1]!r}; a macro is read with %{word[1]}."


def in_yaml(text: str, line: int = 0) -> str:
    """Returns what may have been meant by a text that is no YAML in a line, or nothing.

    Args:
        text: the whole text.
        line: the line where it ceases to be YAML, counted from 0.
    """
    lines = text.split("\n")
    first = next((each for each in lines if each.strip() and not each.startswith("#")), "")
    return _first(_IN_YAML, lines[line]) or _first(_IN_YAML[:1], first)


def _first(hints: list[tuple[str, str]], line: str) -> str:
    return next((hint for pattern, hint in hints if re.fullmatch(pattern, line[:200])), "")
