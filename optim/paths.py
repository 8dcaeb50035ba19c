"""Names the leaves of a parameter tree: "blocks/attn/qkv/kernel"."""

from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
    """Spells a jax key path as one string, its parts joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """Lists the leaves of a tree by their path names, in the tree's own order.

    Args:
        tree: any pytree.

    Returns:
        A dict from path name to leaf.

    Raises:
        ValueError: two leaves have the same path name ({"a/b": x, "a": {"b": y}}).
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {path_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        names = [path_name(path) for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Two parameters are both called {twice!r}; rename one of them.")
    return named


def unflatten(like: Any, named: dict[str, Any]) -> Any:
    """Puts named leaves back into the structure of `like` (the inverse of `flatten`)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: named[path_name(path)], like)
