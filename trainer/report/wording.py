"""Numbers as words, for the sentences and tables of a report."""

import math


def p_text(p: float) -> str:
    """Returns a p value with two digits, or as many as keep it on its side of 0.05.

    Example:
        >>> p_text(0.0123), p_text(0.04996), p_text(0.05004), p_text(1e-7)
        ('0.012', '0.04996', '0.05', '< 0.0001')
    """
    if p < 1e-4:
        return "< 0.0001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < 0.05) == (p < 0.05)), repr(p))


def p_sentence(p: float) -> str:
    """Returns a p value as a sentence has it, such as "p = 0.012" or "p < 0.0001"."""
    text = p_text(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def shown(x: float) -> str:
    """Returns a number with four significant digits."""
    return f"{x + 0.0:.4g}".replace("-", "−")  # + 0.0 makes -0 a 0


def finite(value: float) -> float | None:
    """Returns a number as a cell, None if it is not finite."""
    return value if math.isfinite(value) else None
