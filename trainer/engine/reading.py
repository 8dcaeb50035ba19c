"""Finds what a traced function reads."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval


def reading(traced: jax.stages.Traced, outputs: Any) -> tuple[Sequence[Any], list[bool]]:
    """Returns the equations that some outputs need, and for each input whether they need it."""
    # `outputs` has the structure of the outputs, and True for those that are asked about.
    jaxpr, used = partial_eval.dce_jaxpr(traced.jaxpr.jaxpr, jax.tree.leaves(outputs))
    return jaxpr.eqns, used
