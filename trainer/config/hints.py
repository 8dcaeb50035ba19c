"""Suggests corrections for lines that a parser cannot read."""

import re

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
    (
        rf".*!{_NAME}\(.*",
        "Write arguments in braces, as in !optax.adamw {learning_rate: 1e-3}.",
    ),
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
    """Returns why Gin's parser cannot read a line, and advice.

    Args:
        line: the line.
        reason: the message of the parser.
    """
    word = re.search(r"malformed node.*Failed to parse token '(.*?)'", reason)
    if word is None:
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
    """Returns advice for a text that is not valid YAML; "" if there is none.

    Args:
        text: the whole text.
        line: the line of the error, counted from 0.
    """
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
    """Returns the message for a list in place of arguments, as in "!optax.chain [a, b]".

    Args:
        tag: the tag, such as "!optax.chain".
    """
    name = _LISTS.get(tag.lstrip("!").removeprefix("partial:"))
    hint = ", with the argument's name" if name is None else ""
    return (
        f"{tag} takes its arguments by name, and was given a list: write {tag}"
        f" {{{name or 'argument'}: [...]}}{hint}."
    )


def _first(hints: list[tuple[str, str]], line: str) -> str:
    # The bound on the line bounds the time that the patterns take to backtrack.
    return next((hint for pattern, hint in hints if re.fullmatch(pattern, line[:200])), "")
