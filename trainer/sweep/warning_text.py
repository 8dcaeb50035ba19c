"""Formats the warnings of the plans of arms, which are probably mistakes in their configs."""

from collections.abc import Iterable, Mapping

from trainer.messages import printable

Warnings = Mapping[str, tuple[str, ...]]  # arm -> sentences


def merge_warnings(every: Iterable[Warnings]) -> dict[str, tuple[str, ...]]:
    """Joins the warnings of several programs; equal ones of an arm are kept once."""
    found: dict[str, dict[str, None]] = {}
    for warnings in every:
        for arm, sentences in warnings.items():
            found.setdefault(arm, {}).update(dict.fromkeys(sentences))
    return {arm: tuple(sentences) for arm, sentences in found.items() if sentences}


def by_sentence(warnings: Warnings, order: Iterable[str]) -> dict[str, list[str]]:
    """Returns warning -> the arms that have it; `order` is that of the arms."""
    arms: dict[str, list[str]] = {}
    for arm in order:
        for sentence in warnings.get(arm, ()):
            arms.setdefault(sentence, []).append(arm)
    return arms


def warning_lines(warnings: Warnings, order: Iterable[str]) -> list[str]:
    """Returns a line for each warning, with the arms that have it.

    Example:
        >>> warning_lines({"b": ["The loss is odd."], "a": ["The loss is odd."]}, "ab")
        ['warning (a, b): The loss is odd.']
    """
    found = by_sentence(warnings, order)
    return [printable(f"warning ({', '.join(arms)}): {text}") for text, arms in found.items()]
