"""Numbers and lists as words, for the sentences of a report."""

from collections.abc import Sequence

_SMALL = "0.0001"  # p values below are not told apart


def joined(words: Sequence[str]) -> str:
    """Returns words as an enumeration: "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def p_text(p: float, level: float = 0.05) -> str:
    """Returns a p value, such as "p = 0.012", on the same side of the level as the value itself.

    Example:
        >>> p_text(0.0123), p_text(0.04996), p_text(0.05004)
        ('p = 0.012', 'p = 0.04996', 'p = 0.05')
    """
    return f"p < {_SMALL}" if p < float(_SMALL) else f"p = {rounded_p(p, level)}"


def rounded_p(p: float, level: float = 0.05) -> str:
    """Returns a p value with two digits, or as many as keep it on its side of the level."""
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < level) == (p < level)), repr(p))


def shown(x: float) -> str:
    """Returns a number with four significant digits."""
    return f"{x:.4g}".replace("-", "−")
