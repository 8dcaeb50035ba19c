"""Numbers of steps with a unit: '5%', '3 epochs', '1B tokens', '20 tokens/parameter'."""

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer.config.tree import ConfigError, Source
from trainer.config.wording import brief

_NUMBER = r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)"
T = typing.TypeVar("T")
# A suffix stands directly behind the number, as in '10M tokens'.
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
UNITS = r"([KMBT]?)\s*(steps?|examples?|tokens?)|\s*(%|epochs?|tokens?/parameter)"
_QUANTITY = re.compile(rf"\s*{_NUMBER}(?:{UNITS})\s*")

# An integer argument is a number of steps, which may have a unit, if its annotation says so, as in
# Annotated[int, "steps"], or if it has the name of such an argument of optax's schedules.
_STEPS = "steps"
# ns_steps and max_backtracking_steps count iterations within a step.
COUNTS_STEPS = re.compile(r"(?!ns_|max_)(\w+_)?steps|transition_begin|boundaries(_and_scales)?")

# Python refuses to convert more than 4,300 digits to a number.
_LONGEST = 60
_NEARLY = re.compile(rf"\s*[-+]?{_NUMBER}[A-Za-z]?\s*[%A-Za-z]*(/[a-z]*)?\s*")


def quantity(text: str) -> tuple[Fraction, str] | None:
    """Returns a number and its unit, such as "%", "epoch" or "tokens/parameter"; else None.

    Example:
        >>> quantity("1_000 examples"), quantity("1.5K tokens"), quantity("fast")
        ((Fraction(1000, 1), 'example'), (Fraction(1500, 1), 'token'), None)
    """
    # A Fraction is exact: as floats, 0.29 * 100 is 28.999999999999996.
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    number, suffix, counted, other = match.groups(default="")
    return Fraction(number.replace("_", "")) * _SUFFIXES[suffix], (counted or other).rstrip("s")


def looks_like_quantity(text: str) -> bool:
    """Returns whether a text resembles a number with a unit, even if misspelled: "3 epoks"."""
    return len(text) <= _LONGEST and _NEARLY.fullmatch(text) is not None


def is_steps(hint: Any) -> bool:
    """Returns whether an annotation, or a member of its union, marks a number of steps."""
    if (origin := typing.get_origin(hint)) is typing.Annotated and _STEPS in hint.__metadata__:
        return True
    unites = origin in (typing.Union, types.UnionType, typing.Annotated)
    return unites and any(is_steps(part) for part in typing.get_args(hint))


@dataclass(frozen=True)
class Units:
    """Converts numbers of steps with a unit; what is None is not known.

    Example:
        >>> Units(total_steps=1000, batch_size=128, num_examples=1797).steps("3 epochs")
        43
    """

    total_steps: int | None = None  # of the run, for '5%'
    batch_size: int | None = None  # for examples, epochs and tokens
    num_examples: int | None = None  # per epoch, for epochs
    tokens_per_example: int | None = None  # for tokens
    parameters: Callable[[], int] | None = None  # counts those of the model

    def steps(self, value: int | str, source: Source | None = None) -> int:
        """Converts an integer, or a text with a unit, to a number of steps; raises ConfigError."""
        # Epochs, examples and tokens are rounded up, so that none of them is missed; a percentage
        # is rounded to the nearest step, half up, and is at least one step unless it is 0%.
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        parsed = quantity(value) if isinstance(value, str) else None
        if parsed is None:
            raise ConfigError(
                f"{brief(value)} is not a number of steps: write one like 10_000, '5%', '3 epochs',"
                " '1_000_000 examples', '10M tokens', '20 tokens/parameter' or '500 steps'.",
                source,
            )
        number, unit = parsed
        if unit == "step":
            if number.denominator != 1:
                raise ConfigError(f"{value!r} is not a whole number of steps.", source)
            return int(number)
        if unit == "%":
            total = self._known(self.total_steps, value, "the number of steps of the run", source)
            # round() would round a half to the even neighbour.
            return max(math.floor(number * total / 100 + Fraction(1, 2)), 1 if number else 0)
        batch = self._known(self.batch_size, value, "the batch size", source)
        examples = number
        if unit == "epoch":
            examples *= self._known(self.num_examples, value, "the size of the data set", source)
        elif unit.startswith("token"):
            if self.tokens_per_example is None:
                raise ConfigError(
                    f"{value!r} is a number of tokens, and the data set does not say how many"
                    " tokens an example has: it has no attribute tokens_per_example, as data sets"
                    " of text have. Write a number of steps, epochs or examples.",
                    source,
                )
            if unit != "token":
                examples *= self._known(self.parameters, value, "the model", source)()
            examples /= self.tokens_per_example
        return math.ceil(examples / batch)

    def _known(self, what: T | None, value: object, words: str, source: Source | None) -> T:
        if what is None:
            raise ConfigError(
                f"{value!r} depends on {words}, which is not known here: write a plain number of"
                " steps.",
                source,
            )
        return what
