"""Numbers and lists as words, for the sentences of a report."""

from collections.abc import Sequence


def joined(words: Sequence[str]) -> str:
    """Returns words as an enumeration: "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def p_text(p: float) -> str:
    """Returns a p value, such as "p = 0.012"."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def shown(x: float) -> str:
    """Returns a number with four significant digits."""
    return f"{x:.4g}".replace("-", "−")
