"""Casts parameters and batches to the dtype in which a model computes."""

from typing import Any

import jax
import jax.numpy as jnp


def in_precision(tree: Any, precision: str) -> Any:
    """Casts floats to the dtype in which the model computes.

    Args:
        tree: a pytree of arrays; leaves that are not floats stay as they are.
        precision: of the experiment; "bfloat16" and "mixed" compute in bfloat16.
    """
    return tree if precision == "float32" else to_bfloat16(tree)


def to_bfloat16(tree: Any) -> Any:
    """Casts the leaves of floating dtypes, and returns the others unchanged.

    Args:
        tree: a pytree of arrays.
    """
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
