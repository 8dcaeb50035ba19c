"""Names the leaves of a parameter tree: "blocks/attn/qkv/kernel"."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_VALUE = jax.tree_util.GetAttrKey("value")


def path_name(path: tuple[Any, ...]) -> str:
    """Spells a jax key path as one line, its parts joined by "/"; "params" for a bare array."""
    name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "params"
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def names(tree: Any) -> list[str]:
    """Lists the path names of a tree's leaves, in the tree's own order.

    A node with nothing but a `value`, such as a variable of flax.nnx, has the name of its value:
    "dense/kernel", and not "dense/kernel/value".
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if any(path and path[-1] == _VALUE for path in paths):
        below = Counter(path[:end] for path in paths for end in range(len(path)))
        alone = [len(path) > 1 and path[-1] == _VALUE and below[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_name(path) for path in paths]


def as_arrays(tree: Any) -> Any:
    """Turns the numbers of Python and NumPy in a tree into arrays of jax, as optax does."""
    kinds = (bool, int, float, complex, np.ndarray, np.generic)
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, tree)


def flatten(tree: Any) -> dict[str, Any]:
    """Lists the leaves of a tree by their path names, in the tree's own order.

    Args:
        tree: any pytree.

    Returns:
        A dict from path name to leaf.

    Raises:
        ValueError: two leaves have the same path name ({"a/b": x, "a": {"b": y}}).
    """
    called = names(tree)
    named = dict(zip(called, jax.tree.leaves(tree), strict=True))
    if len(named) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(f"Two parameters are both called {twice!r}; rename one of them.")
    return named


def unflatten(like: Any, named: dict[str, Any]) -> Any:
    """Puts named leaves back into the structure of `like` (the inverse of `flatten`)."""
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names(like)])
