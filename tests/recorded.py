"""What the comparisons of chains and lookaheads with recorded results have in common.

Programs of authors that the tests do not run ran once, in float64; the tests have their results in
files (tests/optim/*.npz). Each such test lists its comparisons as `Recorded`, from which
`python -m tests.references` makes a table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Recorded:
    """One comparison with recorded results.

    Attributes:
        optimizer: ours: a recipe of parts and the like, with names in place of what the results
            have for each step.
        program: the program that computed the results.
        measure: runs ours; gives the largest difference of parameters that are compared.
        bound: what the difference stays below.
        remarks: what differs by definition, or what was changed in the program.
    """

    optimizer: Any
    program: str
    measure: Callable[[], float]
    bound: float
    remarks: str = ""


def rate() -> None:
    """Stands for the learning rate of a step in a recipe that is printed."""


def mu() -> None:
    """Stands for the momentum of a step in a recipe that is printed."""


def made(recipe: Any) -> Any:
    """Calls a recipe of partials, the inner ones first; lists are those of what is made."""
    if isinstance(recipe, partial):
        inner = {name: made(x) for name, x in recipe.keywords.items()}
        return recipe.func(*map(made, recipe.args), **inner)
    return list(map(made, recipe)) if isinstance(recipe, list) else recipe


def largest(found: Any, expected: Any) -> float:
    """Returns the largest difference of two arrays of equal shapes."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    return float(np.max(np.abs(found - expected)))
