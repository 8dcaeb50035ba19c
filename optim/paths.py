"""Names the leaves of a parameter tree: "blocks/attn/qkv/kernel"."""

from collections import Counter
from typing import Any

import jax

_VALUE = jax.tree_util.GetAttrKey("value")


def path_name(path: tuple[Any, ...]) -> str:
    """Joins the keys of a jax key path by "/", on one line, with control characters escaped."""
    # The path of parameters that are a single array is empty.
    name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "params"
    if name.isprintable():
        return name
    # A key may be any string, and names are printed: a line break would end a line of the plan.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def names(tree: Any) -> list[str]:
    """Returns the path names of a tree's leaves, in the order of the leaves; two may be the same.

    Example:
        >>> names({"dense": {"kernel": 1.0, "bias": 0.0}, "layers": [2.0, 3.0]})
        ['dense/bias', 'dense/kernel', 'layers/0', 'layers/1']
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if any(path and path[-1] == _VALUE for path in paths):
        # A node whose only child is `value`, such as a variable of flax.nnx, has the name of its
        # value: "dense/kernel", not "dense/kernel/value". One with other children keeps the key:
        # without it, one leaf's name would be the beginning of the others'.
        below = Counter(path[:end] for path in paths for end in range(len(path)))
        alone = [len(path) > 1 and path[-1] == _VALUE and below[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_name(path) for path in paths]


def flatten(tree: Any, verbatim: bool = False) -> dict[str, Any]:
    """Returns leaves by their path names, in order; raises ValueError if two are the same."""
    # If `verbatim`, a name contains every key of the path, unescaped, as in saved files. By default
    # the names are those of `names`, which users see and match. Two leaves have the same name in
    # {"a/b": x, "a": {"b": y}}.
    called = names(tree)
    if verbatim:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        called = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    by_path = dict(zip(called, jax.tree.leaves(tree), strict=True))
    if len(by_path) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(
            f"Two leaves have the same path, {twice!r}. Rename one of them: a key must not contain "
            f"'/'."
        )
    return by_path


def unflatten(like: Any, by_path: dict[str, Any]) -> Any:
    """Inverts `flatten`: builds a tree like `like` from leaves by name; KeyError if one lacks."""
    return jax.tree.unflatten(jax.tree.structure(like), [by_path[name] for name in names(like)])
